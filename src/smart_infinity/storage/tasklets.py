"""State records on their way through the transfer handler, and the buffers that they lie in."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from smart_infinity.layout import Layout, Record
from smart_infinity.storage.buffers import ByteArray, reserve


@dataclass(slots=True)
class Timings:
    """Seconds of one walk, summed over a device's workers, and the bytes its storage moved."""

    waiting: float = 0.0
    reading: float = 0.0
    computing: float = 0.0
    writing: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0


class Words:
    """Room for the words of one record, which go to or come from the host; 16 bits or fp32."""

    def __init__(self, longest: int) -> None:
        self.words16: npt.NDArray[np.uint16] = reserve(2 * longest).view(np.uint16)
        self.words32: npt.NDArray[np.float32] = reserve(4 * longest).view(np.float32)


class Buffer:
    """Room for one state record.

    Attributes:
        bytes: the record.
        words: of the worker that computes on it, for that long.
        cached: the record that it belongs to, of a state cache; None of a buffer that anyone uses.
        is_valid: whether it holds the newest state of that record.
        unsaved: that record and the checksum of its state, if it is nowhere else.
    """

    words: Words

    def __init__(self, layout: Layout, longest: int, cached: int | None = None) -> None:
        self.bytes: ByteArray = reserve(layout.record_nbytes(longest))
        self.cached, self.is_valid = cached, False
        self.unsaved: tuple[Record, int] | None = None

    @property
    def words16(self) -> npt.NDArray[np.uint16]:
        """16-bit words, by element of the record."""
        return self.words.words16

    @property
    def words32(self) -> npt.NDArray[np.float32]:
        """fp32 words, by element of the record."""
        return self.words.words32


def buffer_nbytes(layout: Layout, longest: int) -> int:
    """Bytes of a buffer and of a worker's words, for records of up to ``longest`` elements."""
    return layout.record_nbytes(longest) + 6 * longest


Places = npt.NDArray[np.uint8]  # of each state record of a device, which of its two places

# (record, its [master | moments...] as fp32, its buffer) -> the new state's checksum, or None where
# the state in the buffer is as it was
Compute = Callable[[Record, npt.NDArray[np.float32], Buffer], int | None]


class Stage(IntEnum):
    """Where a tasklet is."""

    WAITING = 0  # to be read
    READING = 1
    LOADED = 2  # its current state is in a buffer
    COMPUTING = 3
    COMPUTED = 4  # its new state is in a buffer, to be written
    WRITING = 5
    DONE = 6


@dataclass(eq=False, slots=True)
class Tasklet:
    """One state record of a walk. With a buffer from `READING` to `WRITING`."""

    record: Record
    position: int
    is_ready: bool  # to be computed
    stage: Stage = Stage.WAITING
    buffer: Buffer | None = None
    checksum: int = 0
    is_dropped: bool = False  # while it was read

    @property
    def is_cached(self) -> bool:
        """Whether its buffer is its own."""
        return self.buffer is not None and self.buffer.cached is not None


class Walk:
    """Records on their way, and what is to be done with them. The handler's lock guards it.

    Attributes:
        tasklets: by record index.
        compute: what to do with each record.
        places: where records are read, or None where there is no state yet (it begins as zero).
        written: receives record index -> (new place, checksum) of each record written.
        may_write: writing is allowed.
        is_paused: nothing is computed for now.
        is_stopped: nothing more is begun.
        in_flight: transfers and computations under way.
        error: the first of them that failed.
    """

    def __init__(
        self,
        records: Sequence[Record],
        compute: Compute,
        places: Places | None,
        written: dict[int, tuple[int, int]],
        *,
        is_ready: bool,
        may_write: bool,
    ) -> None:
        self.tasklets: dict[int, Tasklet] = {}
        self.compute, self.places, self.written = compute, places, written
        self.may_write, self.is_paused, self.is_stopped = may_write, False, False
        self.in_flight = 0
        self.error: BaseException | None = None
        self.timings, self.begun = Timings(), time.perf_counter()
        self.computed: list[Tasklet] = []  # the first of them is written first
        # Heaps of (not ready, position, record) and (position, record); out-of-date entries stay.
        self._to_read: list[tuple[bool, int, int]] = []
        self._to_compute: list[tuple[int, int]] = []
        self.plan(records, is_ready=is_ready)

    @property
    def unfinished(self) -> int:
        """Tasklets that are not done."""
        return self._num_unfinished

    def plan(self, records: Sequence[Record], *, is_ready: bool) -> None:
        """Set which records are to be visited, in which order; those at hand keep their stage."""
        tasklets: dict[int, Tasklet] = {}
        for position, record in enumerate(records):
            own = self.tasklets.get(record.index)
            if own is None:
                own = Tasklet(record, position, is_ready)
            own.position, own.is_ready = position, own.is_ready or is_ready
            tasklets[record.index] = own
        self.tasklets, self._to_read, self._to_compute = tasklets, [], []
        self._num_unfinished = sum(own.stage is not Stage.DONE for own in tasklets.values())
        for own in tasklets.values():
            self.note(own)

    def note(self, tasklet: Tasklet) -> None:
        """A tasklet has come to a stage in which it can be taken up."""
        if tasklet.stage is Stage.WAITING:
            entry = (not tasklet.is_ready, tasklet.position, tasklet.record.index)
            heapq.heappush(self._to_read, entry)
        elif tasklet.stage is Stage.LOADED and tasklet.is_ready:
            heapq.heappush(self._to_compute, (tasklet.position, tasklet.record.index))

    def set_ready(self, indices: Collection[int]) -> None:
        """These records may be computed."""
        for index in indices:
            own = self.tasklets.get(index)
            if own is not None and not own.is_ready:
                own.is_ready = True
                self.note(own)

    def done(self, tasklet: Tasklet) -> None:
        """A tasklet has ended."""
        tasklet.stage, tasklet.buffer = Stage.DONE, None
        self._num_unfinished -= 1

    def next_to_read(self) -> Tasklet | None:
        """The first record that is to be read: ready ones come before others."""
        while self._to_read:
            late, position, index = self._to_read[0]
            own = self.tasklets.get(index)
            entry = (late, position, Stage.WAITING)
            if own is not None and entry == (not own.is_ready, own.position, own.stage):
                return own
            heapq.heappop(self._to_read)
        return None

    def next_to_compute(self) -> Tasklet | None:
        """The first record that is loaded and ready."""
        while not self.is_paused and self._to_compute:
            own = self.tasklets.get(self._to_compute[0][1])
            if own is not None and own.stage is Stage.LOADED and own.is_ready:
                return own
            heapq.heappop(self._to_compute)
        return None

    def last_ahead(self) -> Tasklet | None:
        """Of the records read ahead, the one that is wanted last."""
        ahead = [own for own in self.tasklets.values() if own.stage is Stage.LOADED]
        late = [own for own in ahead if not own.is_ready and not own.is_cached]
        return max(late, key=lambda own: own.position, default=None)
