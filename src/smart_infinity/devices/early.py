"""What a device does for a step before `step()`: reading ahead, and updates during backward.

A record whose gradients are all complete is updated with the hyper-parameters that are expected;
its new weights wait in device memory. The step compares what was used with what it says, and has
the rest done again from the current state, which is untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from smart_infinity.devices.base import Words
from smart_infinity.devices.memory import LandingZone
from smart_infinity.devices.tables import records_of_parameters
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE, ITEMSIZE
from smart_infinity.layout import DevicePlan, Layout, Piece, Record
from smart_infinity.storage.buffers import reserve
from smart_infinity.storage.handler import TransferHandler
from smart_infinity.storage.tasklets import Buffer, Compute, Places, Walk


def early_words_nbytes(layout: Layout, plan: DevicePlan) -> int:
    """Bytes of the new weights of a device."""
    dtypes = (layout.parameters[run.parameter].dtype for run in plan.runs)
    sizes = (ITEMSIZE[FORMAT_OF_DTYPE[dtype]] for dtype in dtypes)
    return sum(size * run.length for size, run in zip(sizes, plan.runs, strict=True))


class EarlyWords:
    """Device memory for new weights that wait for `step()`, by element of the device.

    Pages cost memory once they are touched, so of a model in 16 bits only half is used.
    """

    def __init__(self, layout: Layout, plan: DevicePlan) -> None:
        self._is_float32 = [spec.dtype == "float32" for spec in layout.parameters]
        self._runs = plan.runs
        self._words16 = reserve(2 * plan.num_elements, huge_pages=False).view(np.uint16)
        self._words32 = reserve(4 * plan.num_elements, huge_pages=False).view(np.float32)

    def keep(self, record: Record, buffer: Buffer) -> None:
        """Take over the words that were computed for a record."""
        for piece in record.pieces:
            place = slice(piece.record_offset, piece.record_offset + piece.length)
            source = buffer.words32 if self._is_float32[piece.parameter] else buffer.words16
            self.of(piece)[:] = source[place]

    def of(self, piece: Piece) -> Words:
        """The words of a piece."""
        run = self._runs[piece.run]
        begin = run.device_offset + piece.start - run.start
        words: Words = self._words32 if self._is_float32[piece.parameter] else self._words16
        return words[begin : begin + piece.length]


class Early:
    """One early walk: what was expected of the step, and what was used for it.

    Attributes:
        walk: of the handler.
        table: the expected one; None as long as records are only read ahead.
        written: see `Walk`.
        previous: what the step before wrote, which may not be committed yet.
    """

    walk: Walk

    def __init__(
        self,
        plan: DevicePlan,
        gradients: LandingZone,
        previous: dict[int, tuple[int, int]],
    ) -> None:
        self.table: npt.NDArray[np.float32] | None = None
        self.previous = previous
        self.written: dict[int, tuple[int, int]] = {}
        self._gradients = gradients
        self._versions: dict[int, npt.NDArray[np.int64]] = {}
        self._incomplete = [len({p.parameter for p in record.pieces}) for record in plan.records]

    def complete(self, records: Iterable[int]) -> list[int]:
        """A parameter in these records has its gradient; returns the records that have all."""
        found = []
        for index in records:
            self._incomplete[index] -= 1
            if self._incomplete[index] == 0:
                found.append(index)
        return found

    def versions(self, record: Record) -> npt.NDArray[np.int64]:
        """Versions of the gradients of a record as they are now."""
        return self._gradients.versions[[piece.run for piece in record.pieces]]

    def used(self, record: Record, versions: npt.NDArray[np.int64]) -> None:
        """A record was updated from these versions of its gradients."""
        self._versions[record.index] = versions

    def stands(self, record: Record, table: npt.NDArray[np.float32]) -> bool:
        """Whether the update of a record is that which the step's table asks for."""
        versions = self._versions.get(record.index)
        if versions is None or self.table is None:
            return False
        rows = sorted({piece.parameter for piece in record.pieces})
        same_table = self.table[rows].tobytes() == table[rows].tobytes()
        return same_table and np.array_equal(versions, self.versions(record))


class EarlyWork:
    """A device's early walk, if there is one, and whether it may write.

    Args:
        layout: the plan of the whole set.
        plan: the device's.
        handler: the device's.
        may_write: early states may be written at all: they do not go where the current ones are.
    """

    def __init__(
        self, layout: Layout, plan: DevicePlan, handler: TransferHandler, *, may_write: bool
    ) -> None:
        self._plan, self._handler = plan, handler
        self._records_of = records_of_parameters(layout, plan)
        self._can_write, self._may_write = may_write, may_write
        self._lock = threading.Lock()
        self._early: Early | None = None

    def begin(self, own: Early, compute: Compute, places: Places, *, backwards: bool) -> None:
        """Begin the walk; records are read as weights are wanted, or the other way round."""
        records = self._plan.records[::-1] if backwards else self._plan.records
        with self._lock:
            own.walk = self._handler.begin(
                records, compute, places, own.written, is_ready=False, may_write=self._may_write
            )
            self._early = own

    def expect(self, table: npt.NDArray[np.float32]) -> None:
        """See `Device.expect`."""
        if self._early is not None:
            self._early.table = table

    def complete(self, parameter: int) -> None:
        """See `Device.gradient_complete`."""
        early = self._early
        if early is not None and early.table is not None:
            self._handler.set_ready(early.walk, early.complete(self._records_of[parameter]))

    def take(self) -> Early | None:
        """The walk, for the step that has come; nothing that follows it may be written now."""
        with self._lock:
            early, self._early, self._may_write = self._early, None, False
        return early

    def allow_writes(self) -> None:
        """See `Device.allow_writes`."""
        with self._lock:
            self._may_write = self._can_write
            if self._early is not None and self._can_write:
                self._handler.allow_writes(self._early.walk)

    def drop(self) -> None:
        """See `Device.drop_early`."""
        with self._lock:
            early, self._early = self._early, None
        if early is not None:
            self._handler.stop(early.walk)
