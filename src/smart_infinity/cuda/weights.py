"""Weights on a GPU: how they come back to it, and how edits are noticed.

New words are copied to pinned memory and from there to the GPU, on a stream of its own, which
first waits for what the training loop has given the GPU to do: it may still read the old weights.
The loop's stream waits in turn for the words that it needs; the processor does not.

Fingerprints stay on the GPU: they are taken there when words arrive, and compared there at the
next step, which learns of all pieces in one answer.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity.arrivals import Arrivals
from smart_infinity.cuda.pinned import PinnedPool, mark, new_stream
from smart_infinity.devices.base import Words
from smart_infinity.layout import Layout, Piece, Record
from smart_infinity.link import HostLink
from smart_infinity.weights import HostWeights, words_of

CHUNKS = 4

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32}


def fingerprint_factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd random int64 factors, the same at every call, for pieces of up to ``count`` elements."""
    factors = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, count))
    return (factors | 1).to(device)


def fingerprint(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A 64-bit fingerprint of flat words of 16 or 32 bits, as a scalar where they are.

    It is the sum of the words, as integers, each times its factor, modulo 2**64. Factors are odd,
    so any change of a single word changes it; others go unnoticed with a chance of about 2**-64.
    """
    integers = words.view(_INTEGER_OF_SIZE[words.itemsize])
    return (integers * factors[: integers.numel()]).sum()


class CudaWeights(HostWeights):
    """The parameters' words on a GPU; see `HostWeights`."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.nn.Parameter],
        owners: Sequence[Sequence[tuple[torch.nn.Module, str]]],
        link: HostLink,
        arrivals: Arrivals,
    ) -> None:
        self._device = parameters[0].device
        self._stream, self._lock = new_stream(self._device), threading.Lock()
        records = [record for device in layout.devices for record in device.records]
        longest = max((record.length for record in records), default=0)
        self._pool = PinnedPool(CHUNKS, 4 * longest)
        self._factors = fingerprint_factors(longest, self._device)
        self._flat: list[torch.Tensor] = [parameter.data for parameter in parameters]
        self._arrived: list[torch.cuda.Event | None] = [None] * len(parameters)
        pieces = [sum(len(own.pieces) for own in device.records) for device in layout.devices]
        self._digests = [
            torch.zeros(count, dtype=torch.int64, device=self._device) for count in pieces
        ]
        self._is_edited = [np.zeros(count, np.bool_) for count in pieces]
        super().__init__(layout, parameters, owners, link, arrivals)

    def follow(self) -> None:
        """See `HostWeights.follow`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def show(self, index: int) -> None:
        """See `HostWeights.show`."""
        arrived = self._arrived[index]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)

    def show_all(self) -> None:
        """See `HostWeights.show_all`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def take_fingerprints(self) -> None:
        """See `HostWeights.take_fingerprints`."""
        self._digests = self._all_fingerprints()

    def find_edits(self, active: npt.NDArray[np.bool_]) -> list[frozenset[int]]:
        """See `HostWeights.find_edits`; edits of active parameters are found here too."""
        for index, parameter in enumerate(self._parameters):
            if parameter.data_ptr() != self._pointers[index] or not parameter.is_contiguous():
                self._bind(index)
        new = self._all_fingerprints()
        differ = [a != b for a, b in zip(new, self._digests, strict=True)]
        self._is_edited = [own.cpu().numpy() for own in differ]
        edited: list[set[int]] = [set() for _ in self._layout.devices]
        for index in np.flatnonzero(~active).tolist():
            for device, number, _, _ in self._pieces_of[index]:
                if self._is_edited[device][number]:
                    edited[device].add(bisect_right(self._first_piece[device], number) - 1)
        return [frozenset(numbers) for numbers in edited]

    def fetch(self, record: Record, index: int, piece: Piece) -> Words:
        """See `HostWeights.fetch`."""
        with torch.cuda.stream(self._stream):
            words = words_of(self._piece(piece.parameter, piece.start, piece.length).cpu())
        return self._link.carry("weights_to_device", words)

    def fetch_edited(self, device: int, record: Record, index: int, piece: Piece) -> Words | None:
        """See `HostWeights.fetch_edited`."""
        number = self._first_piece[device][record.index] + index
        if not self._is_edited[device][number]:
            return None
        self._is_edited[device][number] = False
        with self._lock, torch.cuda.stream(self._stream):
            own = self._piece(piece.parameter, piece.start, piece.length)
            self._digests[device][number] = fingerprint(own, self._factors)
        return self.fetch(record, index, piece)

    def deliver(self, device: int, record: Record, index: int, piece: Piece, words: Words) -> None:
        """See `HostWeights.deliver`."""
        number = self._first_piece[device][record.index] + index
        self._link.carry("weights_to_host", words)
        chunk = self._pool.take()
        staged = chunk[: words.nbytes]
        staged.numpy()[:] = words.view(np.uint8)
        own = self._piece(piece.parameter, piece.start, piece.length)
        with self._lock, torch.cuda.stream(self._stream):
            own.view(torch.uint8).copy_(staged, non_blocking=True)
            copied = mark(self._stream)
            self._digests[device][number] = fingerprint(own, self._factors)
            self._arrived[piece.parameter] = copied
        self._pool.put(chunk, copied)
        self._arrivals.arrived(piece.parameter)

    def _piece(self, parameter: int, start: int, length: int) -> torch.Tensor:
        return self._flat[parameter][start : start + length]

    def _all_fingerprints(self) -> list[torch.Tensor]:
        """By device, those of all pieces as they are now."""
        found = [torch.zeros_like(own) for own in self._digests]
        for index, pieces in enumerate(self._pieces_of):
            for device, number, start, length in pieces:
                own = self._piece(index, start, length)
                found[device][number] = fingerprint(own, self._factors)
        return found

    def _bind(self, index: int) -> None:
        parameter = self._parameters[index]
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        # Not detach(): saved tensors that others hold must not look changed by a delivery. Not
        # view(): a single element may have any stride.
        self._flat[index] = parameter.data.as_strided((parameter.numel(),), (1,))
        self._pointers[index] = parameter.data_ptr()
