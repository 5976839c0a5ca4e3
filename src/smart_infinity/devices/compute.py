"""A device's compute engine (SNIA: CSE): what is done with one state record in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from smart_infinity.devices.base import HostPort, Words
from smart_infinity.devices.memory import LandingZone, word_sources
from smart_infinity.devices.tables import block_tables, piece_tables
from smart_infinity.kernels import OPTIMIZERS, encode_record, load_masters, merge_edits
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.layout import DevicePlan, Layout, Piece, Record
from smart_infinity.storage.checksums import StateChecksum, state_checksum
from smart_infinity.storage.tasklets import Buffer

Floats = npt.NDArray[np.float32]
Edits = list[tuple[Piece, Words]]


class ComputeEngine:
    """Computes on the records of one device.

    Args:
        layout: the plan of the whole set.
        plan: the device's.
    """

    def __init__(self, layout: Layout, plan: DevicePlan) -> None:
        self._layout = layout
        self._kernel = OPTIMIZERS[layout.optimizer].update
        self._pieces = piece_tables(layout, plan)
        self._blocks = block_tables(self._pieces, plan)

    def initialize(
        self,
        record: Record,
        state: Floats,
        buffer: Buffer,
        host: HostPort,
        formats: Sequence[int],
        moments: Sequence[Sequence[float]],
    ) -> int:
        """Make a first state from the host's weights; returns its checksum."""
        tensors = state.reshape(self._layout.num_state_tensors, record.length)
        for index, piece in enumerate(record.pieces):
            words = host.fetch_weights(record, index, piece)
            place = slice(piece.record_offset, piece.record_offset + piece.length)
            form = formats[piece.parameter]
            load_masters(form, tensors[0, place], *word_sources(form, words))
            tensors[1:, place] = np.array(moments[piece.parameter], np.float32)[:, None]
        return self.checksum(record, buffer)

    def update(
        self,
        record: Record,
        state: Floats,
        buffer: Buffer,
        gradients: LandingZone,
        table: Floats,
        edits: Edits,
        check: Callable[[int], None] | None,
    ) -> int:
        """The optimizer on one record; returns the checksum of its new state.

        Args:
            record: the record.
            state: its tensors; the new words are left in the buffer.
            buffer: where it lies.
            gradients: the device's.
            table: see ``kernels.frame``.
            edits: words that the user has changed, which come first.
            check: is given the checksum of the state as it was, and raises if it is damaged.
        """
        num_tensors = self._layout.num_state_tensors
        tensors = state.reshape(num_tensors, record.length)
        before, after = StateChecksum(num_tensors), StateChecksum(num_tensors)
        if edits and check is not None:
            check(self.checksum(record, buffer))
        self._merge(edits, state)
        for begin, end, pieces in self._blocks[record.index]:
            if check is not None and not edits:
                before.update(tensors[:, begin:end])
            self._kernel(
                state,
                record.length,
                gradients.grads16,
                gradients.grads32,
                gradients.formats,
                pieces,
                table,
                buffer.words16,
                buffer.words32,
            )
            after.update(tensors[:, begin:end])
        padding = buffer.bytes[state.nbytes : self._layout.record_nbytes(record.length)]
        if check is not None and not edits:
            check(before.digest(padding))
        return after.digest(padding)

    def encode(self, record: Record, state: Floats, buffer: Buffer) -> None:
        """Make a record's words from its masters."""
        encode_record(state, self._pieces[record.index], buffer.words16, buffer.words32)

    def find_edits(self, record: Record, host: HostPort) -> Edits:
        """The pieces whose words the user has changed since they were delivered."""
        fetched = [
            (piece, host.edited_weights(record, index, piece))
            for index, piece in enumerate(record.pieces)
        ]
        return [(piece, words) for piece, words in fetched if words is not None]

    def deliver(
        self,
        record: Record,
        buffer: Buffer,
        host: HostPort,
        active: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Send a record's words to the host: all, or those of the active parameters."""
        for index, piece in enumerate(record.pieces):
            if active is not None and not active[piece.parameter]:
                continue
            place = slice(piece.record_offset, piece.record_offset + piece.length)
            is_float32 = self._layout.parameters[piece.parameter].dtype == "float32"
            words: Words = buffer.words32[place] if is_float32 else buffer.words16[place]
            host.deliver_weights(record, index, piece, words)

    def checksum(self, record: Record, buffer: Buffer) -> int:
        """Of the record in a buffer."""
        data = buffer.bytes[: self._layout.record_nbytes(record.length)]
        return state_checksum(data, record.length, self._layout.num_state_tensors)

    def _merge(self, edits: Edits, state: Floats) -> None:
        for piece, words in edits:
            form = FORMAT_OF_DTYPE[self._layout.parameters[piece.parameter].dtype]
            masters = state[piece.record_offset : piece.record_offset + piece.length]
            merge_edits(form, masters, *word_sources(form, words))
