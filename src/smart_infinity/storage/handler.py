"""The transfer handler: a device's pipeline read -> compute -> write over fixed buffers.

A *walk* takes state records through it, each as a tasklet: read from its current place into a
buffer, computed on in memory, written to its other place. Worker threads take up whatever can be
done next, so that the three overlap, in this order: computing, which sends updated weights on
their way (*urgent*: the next forward needs them); reading, while there are free buffers; writing
(*lazy*). Two limits keep the workers at different stages. Transfers at once: those that begin
together end together, and then every worker would compute while the storage waits. Computations
at once, over all devices: moving bytes takes a core too.

A walk can begin before all is known of it: its records are read ahead into free buffers, computed
when they are said to be ready, and written when writing is allowed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Collection, Sequence

from smart_infinity.layout import Layout, Record
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.pipeline import Pipeline
from smart_infinity.storage.tasklets import Buffer, Compute, Places, Stage, Timings, Walk, Words
from smart_infinity.trace import Trace


class TransferHandler:
    """Moves state records through a fixed pool of buffers.

    Args:
        layout: the layout; records have its sizes.
        files: the state files, by place.
        num_workers: threads; more than half of them may transfer at once.
        num_buffers: records in memory at once.
        num_cached: of the first records, which have a buffer of their own and stay in it.
        longest: elements of the device's longest record.
        computing: how many workers may compute at once; devices share it.
        name: of the device, for threads and in the trace.
        trace: takes what is read, computed and written, or None.
        in_place: write each record where it was read, instead of to its other place. Cached ones
            are not written then, before `save`.
    """

    def __init__(
        self,
        layout: Layout,
        files: Sequence[BlockFile],
        num_workers: int,
        num_buffers: int,
        num_cached: int,
        longest: int,
        computing: threading.Semaphore,
        name: str,
        trace: Trace | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        buffers = [Buffer(layout, longest) for _ in range(num_buffers)]
        buffers += [Buffer(layout, longest, cached=index) for index in range(num_cached)]
        self._pipeline = Pipeline(
            layout, files, buffers, num_workers, computing, name, trace, in_place=in_place
        )
        # Threads hold the pipeline and not the handler: one that is dropped ends them. They are
        # daemons, since they have to serve until a step that is under way at exit has ended.
        for number in range(num_workers):
            threading.Thread(
                target=self._pipeline.work,
                args=[Words(longest)],
                name=f"smart-infinity {name} {number}",
                daemon=True,
            ).start()
        self._closer = weakref.finalize(self, self._pipeline.end, os.getpid())
        self._closer.atexit = False

    def begin(
        self,
        records: Sequence[Record],
        compute: Compute,
        places: Places | None,
        written: dict[int, tuple[int, int]],
        *,
        is_ready: bool,
        may_write: bool,
    ) -> Walk:
        """Begin a walk; see `run`, and `Walk` for the rest."""
        walk = Walk(records, compute, places, written, is_ready=is_ready, may_write=may_write)
        with self._pipeline.change:
            self._pipeline.walks.append(walk)
            self._pipeline.change.notify_all()
        return walk

    def set_ready(self, walk: Walk, indices: Collection[int]) -> None:
        """These records may be computed, but for those of which nothing could be undone."""
        with self._pipeline.change:
            walk.set_ready([index for index in indices if self._pipeline.can_undo(index)])
            self._pipeline.change.notify_all()

    def allow_writes(self, walk: Walk) -> None:
        """What the walk has computed may be written."""
        with self._pipeline.change:
            walk.may_write = True
            self._pipeline.change.notify_all()

    def pause(self, walk: Walk) -> set[int]:
        """Compute no further; returns the records that have been computed."""
        with self._pipeline.change:
            walk.is_paused = True
            own = walk.tasklets.values()
            self._pipeline.change.wait_for(
                lambda: all(tasklet.stage is not Stage.COMPUTING for tasklet in own)
            )
            return {t.record.index for t in own if t.stage > Stage.COMPUTING}

    def plan_anew(
        self, walk: Walk, records: Sequence[Record], kept: Collection[int], compute: Compute
    ) -> None:
        """After `pause`: go on with these records, all ready, by another function.

        Args:
            walk: the walk.
            records: in the order in which their weights are wanted.
            kept: of them, those whose computed state is to stay. Others that have been computed
                are read again: their current state is where it was.
            compute: what to do with the records from here on.
        """
        with self._pipeline.change:
            self._pipeline.plan_anew(walk, records, kept, compute)

    def wait(self, walk: Walk) -> Timings:
        """Wait for a walk's end and return the time it took, by stage; raises its first error."""
        pipeline = self._pipeline
        with pipeline.change:
            pipeline.change.wait_for(lambda: pipeline.has_ended(walk))
            pipeline.remove(walk)
        if walk.error is not None:
            raise walk.error
        spent = walk.timings
        wall = time.perf_counter() - walk.begun
        busy = spent.reading + spent.computing + spent.writing
        spent.waiting = max(0.0, wall * pipeline.num_workers - busy)
        return spent

    def stop(self, walk: Walk) -> None:
        """Give a walk up: what it has computed counts for nothing."""
        with self._pipeline.change:
            walk.is_stopped = True
            self._pipeline.change.wait_for(lambda: walk.in_flight == 0)
            self._pipeline.remove(walk)

    def run(
        self,
        records: Sequence[Record],
        compute: Compute,
        places: Places | None,
        written: dict[int, tuple[int, int]],
    ) -> Timings:
        """Run ``compute`` over ``records`` and return the time it took, by stage.

        Args:
            records: in the order in which their weights are wanted.
            compute: what to do with each.
            places: the current place of every record of the device, or None where there is no
                current state yet and nothing is to be read (records then go to place 0).
            written: receives record index -> (new place, checksum) of each record written.
        """
        walk = self.begin(records, compute, places, written, is_ready=True, may_write=True)
        try:
            return self.wait(walk)
        except BaseException:
            self.stop(walk)  # Ctrl-C has ended the waiting, but not the walk
            raise

    def save(self) -> dict[int, tuple[int, int]]:
        """Write what is in memory only; returns record index -> (place, checksum) of each record.

        Nothing else may be under way.
        """
        return self._pipeline.save()

    def forget(self) -> None:
        """The state on storage is another one now: what is in memory counts no longer."""
        with self._pipeline.change:
            self._pipeline.forget()

    def close(self) -> None:
        """End the workers, and wait until they have ended."""
        if self._closer():
            with self._pipeline.change:
                self._pipeline.change.wait_for(lambda: self._pipeline.num_threads == 0)
