"""Where the weights live on the host, how they come back, and how edits are noticed.

A user may change weights at any time: ``load_state_dict``, ``p.data.mul_``, NumPy views,
``p.data = ...``. Version counters miss everything done through ``.data``, so each piece of each
parameter has a 64-bit fingerprint, taken when its words arrive and compared at the next step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity.arrivals import Arrivals
from smart_infinity.devices.base import Words
from smart_infinity.errors import UnsupportedError
from smart_infinity.layout import Layout, Piece, Record
from smart_infinity.link import HostLink
from smart_infinity.storage.buffers import checksum

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def words_of(tensor: torch.Tensor) -> Words:
    """A contiguous CPU tensor's elements as a flat NumPy view: fp32, or the 16-bit words."""
    flat = tensor.detach().reshape(-1)
    if tensor.dtype is torch.float32:
        view: Words = flat.numpy()
        return view
    halves: npt.NDArray[Any] = flat.view(torch.int16).numpy()
    return halves.view(np.uint16)


class HostWeights:
    """The parameters' words on the host.

    Args:
        layout: the layout; parameter indices are its own.
        parameters: by index.
        owners: by index, every (module, attribute) under which the model holds the parameter.
        link: the host link.
        arrivals: told of each piece that is delivered.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.nn.Parameter],
        owners: Sequence[Sequence[tuple[torch.nn.Module, str]]],
        link: HostLink,
        arrivals: Arrivals,
    ) -> None:
        self._layout, self._parameters, self._owners, self._link = layout, parameters, owners, link
        self._arrivals = arrivals
        self._first_piece = [
            np.cumsum([0] + [len(record.pieces) for record in device.records]).tolist()
            for device in layout.devices
        ]
        self._fingerprints = [np.zeros(first[-1], np.uint64) for first in self._first_piece]
        # By parameter: (device, number of the piece on it, start, length).
        self._pieces_of: list[list[tuple[int, int, int, int]]] = [[] for _ in parameters]
        for device in layout.devices:
            number = 0
            for record in device.records:
                for piece in record.pieces:
                    where = (device.index, number, piece.start, piece.length)
                    self._pieces_of[piece.parameter].append(where)
                    number += 1
        self._words: list[Words] = [np.zeros(0, np.float32)] * len(parameters)
        self._homes = [parameter.device for parameter in parameters]
        self._pointers = [0] * len(parameters)
        self.bind()

    def port(self, device: int) -> _Port:
        """The host's end of the link for one device."""
        return _Port(self, device)

    def bind(self) -> None:
        """Look at the parameters' memory anew, after a cast."""
        for index in range(len(self._parameters)):
            self._bind(index)

    def follow(self) -> None:
        """What is delivered from here on comes after what the loop has set its device to do."""

    def show(self, index: int) -> None:
        """What the loop sets its device to do from here on sees the parameter as delivered."""

    def show_all(self) -> None:
        """The same for all parameters."""

    def take_fingerprints(self) -> None:
        """Remember all words as they are now."""
        for index in range(len(self._parameters)):
            for device, number, start, length in self._pieces_of[index]:
                self._fingerprints[device][number] = self._digest(index, start, length)

    def check_identity(self) -> None:
        """Refuse parameters that were replaced, converted or reshaped since `offload()`.

        Before a step looks at any gradient: a replaced parameter has none, and would be left alone.
        """
        for index, parameter in enumerate(self._parameters):
            self._check_identity(index, parameter)

    def find_edits(self, active: npt.NDArray[np.bool_]) -> list[frozenset[int]]:
        """By device, the records that hold edited words of parameters without a gradient.

        Those of the active ones are found on the way, when a device visits their records.
        """
        edited: list[set[int]] = [set() for _ in self._layout.devices]
        for index, parameter in enumerate(self._parameters):
            if parameter.data_ptr() != self._pointers[index] or not parameter.is_contiguous():
                self._bind(index)
            if active[index]:
                continue
            for device, number, start, length in self._pieces_of[index]:
                if self._fingerprints[device][number] != self._digest(index, start, length):
                    edited[device].add(bisect_right(self._first_piece[device], number) - 1)
        return [frozenset(numbers) for numbers in edited]

    def num_pieces(self, index: int) -> int:
        """In how many pieces a parameter is delivered."""
        return len(self._pieces_of[index])

    def announce(self, active: npt.NDArray[np.bool_]) -> None:
        """Tell autograd that the active parameters were written."""
        written = [self._parameters[index] for index in np.flatnonzero(active).tolist()]
        if written:
            torch.autograd.graph.increment_version(written)

    def fetch(self, record: Record, index: int, piece: Piece) -> Words:
        """Words of a piece, to the device; see ``HostPort``."""
        words = self._words[piece.parameter][piece.start : piece.start + piece.length]
        return self._link.carry("weights_to_device", words)

    def fetch_edited(self, device: int, record: Record, index: int, piece: Piece) -> Words | None:
        """Words of a piece if they are not those that last arrived; see ``HostPort``."""
        number = self._first_piece[device][record.index] + index
        digest = self._digest(piece.parameter, piece.start, piece.length)
        if self._fingerprints[device][number] == digest:
            return None
        self._fingerprints[device][number] = digest
        return self.fetch(record, index, piece)

    def deliver(self, device: int, record: Record, index: int, piece: Piece, words: Words) -> None:
        """Updated words of a piece, to the host; see ``HostPort``."""
        number = self._first_piece[device][record.index] + index
        self._link.carry("weights_to_host", words)
        self._words[piece.parameter][piece.start : piece.start + piece.length] = words
        self._fingerprints[device][number] = checksum(words)
        self._arrivals.arrived(piece.parameter)

    def _digest(self, index: int, start: int, length: int) -> int:
        return checksum(self._words[index][start : start + length])

    def _bind(self, index: int) -> None:
        parameter = self._parameters[index]
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        self._words[index] = words_of(parameter)
        self._pointers[index] = parameter.data_ptr()

    def _check_identity(self, index: int, parameter: torch.nn.Parameter) -> None:
        spec = self._layout.parameters[index]
        for module, attribute in self._owners[index]:
            if module._parameters.get(attribute) is not parameter:
                raise UnsupportedError(
                    f"parameter {spec.name} of the model was replaced by another object since "
                    "offload() (load_state_dict(assign=True) and tie_weights() do that). Expected "
                    "the parameter that the optimizer holds: load with assign=False, or close the "
                    "optimizer and call offload() again"
                )
        home = self._homes[index]
        if DTYPES.get(parameter.dtype) != spec.dtype or parameter.device != home:
            raise UnsupportedError(
                f"parameter {spec.name} is {parameter.dtype} on {parameter.device} now and was "
                f"{spec.dtype} on {home} at offload(). Do not convert or move the model after "
                "offload(); pass dtype= to offload() instead"
            )
        if tuple(parameter.shape) != spec.shape:
            raise UnsupportedError(
                f"parameter {spec.name} has shape {tuple(parameter.shape)} now and had "
                f"{spec.shape} at offload(). Close the optimizer, and call offload() again after "
                "a change of shape"
            )


class _Port:
    """See ``devices.base.HostPort``."""

    def __init__(self, weights: HostWeights, device: int) -> None:
        self._weights, self._device = weights, device

    def fetch_weights(self, record: Record, index: int, piece: Piece) -> Words:
        return self._weights.fetch(record, index, piece)

    def edited_weights(self, record: Record, index: int, piece: Piece) -> Words | None:
        return self._weights.fetch_edited(self._device, record, index, piece)

    def deliver_weights(self, record: Record, index: int, piece: Piece, words: Words) -> None:
        self._weights.deliver(self._device, record, index, piece, words)
