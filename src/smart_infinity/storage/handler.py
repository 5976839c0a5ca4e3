"""The transfer handler: a device's pipeline read -> compute -> write over fixed buffers.

There is one worker thread for each buffer. A worker takes the next tasklet (one state record),
reads it from its current place, computes in memory, and writes it to its other place. The workers
are at different stages at any moment, so reading, computing and writing overlap, and memory is
fixed. Two limits keep them at different stages. Transfers at once: those that begin together end
together, and then every worker would compute while the storage waits. Computations at once, over
all devices: moving bytes takes a core too. Within a tasklet the updated weights leave during
`compute` (*urgent*: the next forward needs them), before the state is written back (*lazy*).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smart_infinity.layout import Layout, Record
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.buffers import ByteArray, reserve


@dataclass(slots=True)
class Timings:
    """Seconds of one pass, summed over a device's workers, and the bytes its storage moved."""

    waiting: float = 0.0
    reading: float = 0.0
    computing: float = 0.0
    writing: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0

    def add(self, other: Timings) -> None:
        """Add another worker's share."""
        self.waiting += other.waiting
        self.reading += other.reading
        self.computing += other.computing
        self.writing += other.writing
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written


class Buffer:
    """A worker's memory: one state record, and the words that go to or come from the host."""

    def __init__(self, layout: Layout, longest: int) -> None:
        self.bytes: ByteArray = reserve(layout.record_nbytes(longest))
        self.words16: npt.NDArray[np.uint16] = reserve(2 * longest).view(np.uint16)
        self.words32: npt.NDArray[np.float32] = reserve(4 * longest).view(np.float32)


def buffer_nbytes(layout: Layout, longest: int) -> int:
    """Bytes of one buffer for records of up to ``longest`` elements."""
    return layout.record_nbytes(longest) + 6 * longest


# (record, its [master | moments...] as fp32, its buffer) -> the new state's checksum, or None where
# it stays as it was
Compute = Callable[[Record, npt.NDArray[np.float32], Buffer], int | None]


class TransferHandler:
    """Moves state records through a fixed pool of buffers.

    Args:
        layout: the layout; records have its sizes.
        files: the state files, by place.
        num_workers: buffers, and threads; more than half of them may transfer at once.
        longest: elements of the device's longest record.
        computing: how many workers may compute at once; devices share it.
        name: for thread names.
        in_place: write each record where it was read, instead of to its other place.
    """

    def __init__(
        self,
        layout: Layout,
        files: Sequence[BlockFile],
        num_workers: int,
        longest: int,
        computing: threading.Semaphore,
        name: str,
        *,
        in_place: bool = False,
    ) -> None:
        self._layout, self._files, self._in_place = layout, files, in_place
        self._computing = computing
        self._transferring = threading.Semaphore(num_workers // 2 + 1)
        self._buffers = [Buffer(layout, longest) for _ in range(num_workers)]
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix=f"smart-infinity {name}")

    def run(
        self,
        records: Sequence[Record],
        compute: Compute,
        places: npt.NDArray[np.uint8] | None,
        written: dict[int, tuple[int, int]],
    ) -> Timings:
        """Run ``compute`` over ``records`` and return the time it took, by stage.

        Args:
            records: in the order in which their weights are wanted.
            places: the current place of every record of the device, or None where there is no
                current state yet and nothing is to be read (records then go to place 0).
            written: receives record index -> (new place, checksum) of each record written.
        """
        queue = iter(records)
        lock = threading.Lock()
        stop = threading.Event()

        def take() -> Iterator[Record]:
            while not stop.is_set():
                with lock:
                    record = next(queue, None)
                if record is None:
                    return
                yield record

        def work(buffer: Buffer) -> Timings:
            spent = Timings()
            try:
                for record in take():
                    self._tasklet(record, buffer, compute, places, written, spent)
            except BaseException:
                stop.set()
                raise
            return spent

        begin = time.perf_counter()
        futures = [self._pool.submit(work, buffer) for buffer in self._buffers]
        total = Timings()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        for future in futures:
            total.add(future.result())
        wall = time.perf_counter() - begin
        busy = total.reading + total.computing + total.writing
        total.waiting = max(0.0, wall * len(self._buffers) - busy)
        return total

    def _tasklet(
        self,
        record: Record,
        buffer: Buffer,
        compute: Compute,
        places: npt.NDArray[np.uint8] | None,
        written: dict[int, tuple[int, int]],
        spent: Timings,
    ) -> None:
        nbytes = self._layout.record_nbytes(record.length)
        offset = record.index * self._layout.record_stride
        used = record.length * self._layout.num_state_tensors
        data = buffer.bytes[:nbytes]
        floats = data.view(np.float32)
        place = -1
        if places is None:
            floats[used:] = 0
        else:
            place = int(places[record.index])
            with self._transferring:
                begin = time.perf_counter()
                self._files[place].read_into(data, offset)
                spent.reading += time.perf_counter() - begin
            spent.bytes_read += nbytes
        with self._computing:
            begin = time.perf_counter()
            checksum = compute(record, floats[:used], buffer)
            spent.computing += time.perf_counter() - begin
        if checksum is not None:
            other = 0 if places is None else place if self._in_place else 1 - place
            with self._transferring:
                begin = time.perf_counter()
                self._files[other].write_from(data, offset)
                spent.writing += time.perf_counter() - begin
            written[record.index] = (other, checksum)
            spent.bytes_written += nbytes

    def close(self) -> None:
        """Wait for the workers and end them."""
        self._pool.shutdown(wait=True)
