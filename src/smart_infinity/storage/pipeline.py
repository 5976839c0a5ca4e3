"""How the transfer handler chooses what to do next, and does it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence

import numpy as np

from smart_infinity.layout import Layout, Record
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.tasklets import Buffer, Compute, Stage, Tasklet, Walk, Words
from smart_infinity.trace import Trace

_STAGE_NAMES = {Stage.READING: "read", Stage.COMPUTING: "compute", Stage.WRITING: "write"}


class Pipeline:
    """What the threads of a transfer handler share; see there for the arguments.

    Attributes:
        change: guards everything, and tells of every change.
        walks: under way, the oldest first.
        num_threads: that have not ended.
    """

    def __init__(
        self,
        layout: Layout,
        files: Sequence[BlockFile],
        buffers: Sequence[Buffer],
        num_workers: int,
        computing: threading.Semaphore,
        name: str,
        trace: Trace | None,
        *,
        in_place: bool,
    ) -> None:
        self._name, self._trace = name, trace
        self._layout, self._files, self._in_place = layout, files, in_place
        self.num_workers, self._computing = num_workers, computing
        self.change = threading.Condition()
        self.walks: list[Walk] = []  # oldest first
        self._free = [buffer for buffer in buffers if buffer.cached is None]
        self._cache = {buffer.cached: buffer for buffer in buffers if buffer.cached is not None}
        self._max_transfers = num_workers // 2 + 1
        self._max_computations = max(1, num_workers - self._max_transfers)
        self._num_transfers = self._num_computations = 0
        self.num_threads, self._is_ending = num_workers, False

    # --- what can be done next ------------------------------------------------------------------

    def work(self, words: Words) -> None:
        """What every worker thread does; ``words`` are its own."""
        with self.change:
            while not self._is_ending:
                chosen = self._choose()
                if chosen is None:
                    self.change.wait()
                    continue
                walk, tasklet = chosen
                walk.in_flight += 1
                assert tasklet.buffer is not None
                tasklet.buffer.words = words
                self.change.release()
                seconds, checksum, error = 0.0, None, None
                try:
                    seconds, checksum = self._perform(walk, tasklet)
                except BaseException as failure:
                    error = failure
                self.change.acquire()
                walk.in_flight -= 1
                self._note(walk, tasklet, seconds, checksum, error)
                del walk, tasklet, chosen, error  # an idle thread keeps nothing alive
                self.change.notify_all()
            self.num_threads -= 1
            self.change.notify_all()

    def _choose(self) -> tuple[Walk, Tasklet] | None:
        walks = [walk for walk in self.walks if not walk.is_stopped]
        to_read = [(walk, own) for walk in walks if (own := self._next_to_load(walk)) is not None]
        if self._num_computations < self._max_computations:
            for walk in walks:
                tasklet = walk.next_to_compute()
                if tasklet is not None:
                    tasklet.stage = Stage.COMPUTING
                    assert tasklet.buffer is not None
                    tasklet.buffer.is_valid = False  # until it is written, or read again
                    self._num_computations += 1
                    return walk, tasklet
        if self._num_transfers == self._max_transfers:
            return None
        urgent = [own for own in to_read if own[1].is_ready]
        lazy = [(walk, walk.computed[0]) for walk in walks if walk.may_write and walk.computed]
        for walk, tasklet in (*urgent, *lazy, *to_read):
            if tasklet.stage is Stage.COMPUTED:
                walk.computed.pop(0)
                tasklet.stage = Stage.WRITING
            elif self._take_buffer(walk, tasklet):
                tasklet.stage = Stage.READING
            else:
                continue
            self._num_transfers += 1
            return walk, tasklet
        return None

    def _next_to_load(self, walk: Walk) -> Tasklet | None:
        """The walk's next record to be read, if it can be; those that need no reading are loaded.

        They are in the cache, or there is no state yet.
        """
        while (tasklet := walk.next_to_read()) is not None:
            if self._is_busy(walk, tasklet.record.index):
                return None
            cached = self._cache.get(tasklet.record.index)
            if walk.places is not None and not (cached and cached.is_valid):
                return tasklet
            if not self._take_buffer(walk, tasklet):
                return None
            tasklet.stage = Stage.LOADED
            walk.note(tasklet)
        return None

    def _is_busy(self, walk: Walk, index: int) -> bool:
        """Whether an older walk still has to write this record."""
        for older in self.walks:
            if older is walk:
                return False
            own = older.tasklets.get(index)
            if own is not None and own.stage is not Stage.DONE:
                return True
        return False

    def _take_buffer(self, walk: Walk, tasklet: Tasklet) -> bool:
        """Give it its own or a free buffer; if it is ready, also one that was filled too early."""
        tasklet.buffer = self._cache.get(tasklet.record.index)
        if tasklet.buffer is not None:
            return True
        if not self._free and tasklet.is_ready:
            late = walk.last_ahead()
            if late is not None:
                self._unload(late)
                walk.note(late)
        if self._free:
            tasklet.buffer = self._free.pop()
        return tasklet.buffer is not None

    # --- doing it ---------------------------------------------------------------------------------

    def _perform(self, walk: Walk, tasklet: Tasklet) -> tuple[float, int | None]:
        """Read, compute or write, without the lock; returns seconds, and what computing gave."""
        record, buffer = tasklet.record, tasklet.buffer
        assert buffer is not None
        data = buffer.bytes[: self._layout.record_nbytes(record.length)]
        offset = record.index * self._layout.record_stride
        checksum: int | None = None
        if tasklet.stage is Stage.COMPUTING:
            floats, used = data.view(np.float32), record.length * self._layout.num_state_tensors
            if walk.places is None:
                floats[used:] = 0
            with self._computing:
                begin = time.perf_counter()
                checksum = walk.compute(record, floats[:used], buffer)
        elif tasklet.stage is Stage.READING:
            assert walk.places is not None
            begin = time.perf_counter()
            self._files[walk.places[record.index]].read_into(data, offset)
        else:
            begin = time.perf_counter()
            self._files[self._target(walk, record)].write_from(data, offset)
        end = time.perf_counter()
        if self._trace is not None:
            what = f"record {record.index}"
            self._trace.add(self._name, _STAGE_NAMES[tasklet.stage], what, begin, end)
        return end - begin, checksum

    def _target(self, walk: Walk, record: Record) -> int:
        """The place where a walk writes a record."""
        if walk.places is None:
            return 0
        place = int(walk.places[record.index])
        return place if self._in_place else 1 - place

    def _note(
        self,
        walk: Walk,
        tasklet: Tasklet,
        seconds: float,
        checksum: int | None,
        error: BaseException | None,
    ) -> None:
        """Something is done: the tasklet goes on to its next stage."""
        stage, spent = tasklet.stage, walk.timings
        record, buffer = tasklet.record, tasklet.buffer
        assert buffer is not None
        if stage is Stage.COMPUTING:
            self._num_computations -= 1
        else:
            self._num_transfers -= 1
        if error is not None:
            walk.error, walk.is_stopped = walk.error or error, True
            self._put_back(buffer)
            walk.done(tasklet)
        elif stage is Stage.READING:
            spent.reading += seconds
            spent.bytes_read += self._layout.record_nbytes(record.length)
            tasklet.stage, buffer.is_valid = Stage.LOADED, True
            if tasklet.is_dropped or walk.is_stopped:
                self._unload(tasklet)
            walk.note(tasklet)
        elif stage is Stage.COMPUTING:
            spent.computing += seconds
            if checksum is None:
                buffer.is_valid = True
                self._put_back(buffer)
                walk.done(tasklet)
            elif walk.places is not None and not self.can_undo(record.index):
                buffer.is_valid, buffer.unsaved = True, (record, checksum)
                walk.written[record.index] = self._target(walk, record), checksum
                walk.done(tasklet)
            else:
                tasklet.stage, tasklet.checksum = Stage.COMPUTED, checksum
                walk.computed.append(tasklet)
        else:
            spent.writing += seconds
            spent.bytes_written += self._layout.record_nbytes(record.length)
            walk.written[record.index] = self._target(walk, record), tasklet.checksum
            buffer.is_valid = True
            self._put_back(buffer)
            walk.done(tasklet)

    # --- buffers and walks ------------------------------------------------------------------------

    def _put_back(self, buffer: Buffer) -> None:
        if buffer.cached is None:
            self._free.append(buffer)

    def _undo(self, walk: Walk, tasklet: Tasklet) -> None:
        """What was computed of a tasklet counts for nothing."""
        index, cached = tasklet.record.index, self._cache.get(tasklet.record.index)
        is_computed = tasklet.stage in (Stage.COMPUTED, Stage.WRITING) or index in walk.written
        if cached is not None and is_computed:
            cached.is_valid = False
        walk.written.pop(index, None)
        self._unload(tasklet)

    def forget(self) -> None:
        """See `TransferHandler.forget`."""
        for buffer in self._cache.values():
            buffer.is_valid, buffer.unsaved = False, None

    def save(self) -> dict[int, tuple[int, int]]:
        """See `TransferHandler.save`."""
        saved: dict[int, tuple[int, int]] = {}
        for buffer in self._cache.values():
            if buffer.unsaved is not None:
                record, checksum = buffer.unsaved
                data = buffer.bytes[: self._layout.record_nbytes(record.length)]
                self._files[0].write_from(data, record.index * self._layout.record_stride)
                saved[record.index], buffer.unsaved = (0, checksum), None
        return saved

    def can_undo(self, index: int) -> bool:
        """Whether a record's state stays somewhere when it is computed on."""
        return not (self._in_place and index in self._cache)

    def _unload(self, tasklet: Tasklet) -> None:
        """Take its buffer from a tasklet: its record is to be read again, if at all."""
        if tasklet.buffer is not None:
            self._put_back(tasklet.buffer)
        tasklet.stage, tasklet.buffer = Stage.WAITING, None

    def plan_anew(
        self, walk: Walk, records: Sequence[Record], kept: Collection[int], compute: Compute
    ) -> None:
        """See `TransferHandler.plan_anew`."""
        wanted = {record.index for record in records}
        void = [
            own
            for own in walk.tasklets.values()
            if own.stage > Stage.COMPUTING and own.record.index not in kept
        ]
        walk.computed = [own for own in walk.computed if own not in void]
        self.change.wait_for(lambda: all(own.stage is not Stage.WRITING for own in void))
        for own in void:
            self._undo(walk, own)
        for index, own in walk.tasklets.items():
            own.is_dropped = index not in wanted
            if own.is_dropped and own.stage is Stage.LOADED:
                self._unload(own)
        walk.compute, walk.is_paused, walk.begun = compute, False, time.perf_counter()
        walk.plan(records, is_ready=True)
        self.change.notify_all()

    def has_ended(self, walk: Walk) -> bool:
        """Whether nothing more will happen in a walk."""
        return walk.in_flight == 0 and (walk.is_stopped or not walk.unfinished)

    def remove(self, walk: Walk) -> None:
        """Take a walk that has ended out; of one that was stopped, undo what it did."""
        if walk not in self.walks:
            return
        self.walks.remove(walk)
        if walk.is_stopped:
            for own in walk.tasklets.values():
                self._undo(walk, own)
        self.change.notify_all()

    def end(self, pid: int) -> bool:
        """Let the threads end; returns False in a forked child, which has none."""
        if os.getpid() != pid:
            return False
        with self.change:
            self._is_ending = True
            self.change.notify_all()
        return True
