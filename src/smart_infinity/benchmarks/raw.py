"""Storage without this library's engine: plain ``preadv`` and ``pwritev`` of whole blocks.

What the update phase is compared with, and what ``doctor`` measures. Files are opened, buffered
and synced as a device does it, or the comparison would flatter one side.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from smart_infinity.layout import RECORD_ELEMENTS, Layout, Record
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.buffers import ByteArray, reserve
from smart_infinity.storage.slots import STATE

BLOCK_NBYTES = 12 * RECORD_ELEMENTS  # a state record of Adam
THREADS_TO_TRY = (1, 2, 4)

Task = Callable[[ByteArray], None]


class Workers:
    """A fixed number of threads with a huge-page buffer each, as the transfer handler has."""

    def __init__(self, num_threads: int, buffer_nbytes: int) -> None:
        self.num_threads = num_threads
        self._buffers = [reserve(buffer_nbytes) for _ in range(num_threads)]
        for buffer in self._buffers:
            buffer[:] = 0  # take the page faults now, not in a measurement
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="smart-infinity raw")

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks; the first error of a thread is raised when all threads have ended."""
        queue, lock = iter(tasks), threading.Lock()

        def work(buffer: ByteArray) -> None:
            while True:
                with lock:
                    task = next(queue, None)
                if task is None:
                    return
                task(buffer)

        _finish([self._pool.submit(work, buffer) for buffer in self._buffers])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)


@contextmanager
def workers(num_threads: int, buffer_nbytes: int) -> Iterator[Workers]:
    """`Workers` for the length of a block."""
    own = Workers(num_threads, buffer_nbytes)
    try:
        yield own
    finally:
        own.close()


class ScratchFile:
    """A temporary file of whole blocks, allocated and without a name: it ends with the process.

    Args:
        directory: where; the file has no name there once this returns.
        block_sizes: in bytes, whole pages each.
        direct: open with O_DIRECT.
    """

    def __init__(self, directory: str, block_sizes: Sequence[int], *, direct: bool) -> None:
        self._sizes = list(block_sizes)
        self._offsets = [0, *np.cumsum(self._sizes, dtype=np.int64).tolist()]
        path = os.path.join(directory, f".smart-infinity-raw-{os.getpid()}-{id(self):x}")
        self._file = BlockFile(directory, path, direct=direct)
        try:
            os.unlink(path)
            self._file.reserve(self._offsets[-1])
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._sizes)

    def read(self, index: int, buffer: ByteArray) -> None:
        """Read a block into the buffer's beginning."""
        self._file.read_into(buffer[: self._sizes[index]], self._offsets[index])

    def write(self, index: int, buffer: ByteArray) -> None:
        """Write a block from the buffer's beginning."""
        self._file.write_from(buffer[: self._sizes[index]], self._offsets[index])

    def fill(self) -> None:
        """Write all of it once, with bytes that no drive can compress.

        The first write to allocated blocks is slower than later ones, because the file system
        has to note that they hold data now.
        """
        generator = np.random.default_rng(0)
        buffer = reserve(max(self._sizes, default=0))
        words = buffer.view(np.uint64)
        for index in range(len(self)):
            words[:] = generator.integers(0, 1 << 64, words.size, np.uint64)
            self.write(index, buffer)
        self.sync()

    def sync(self) -> None:
        """``fdatasync``."""
        self._file.sync()

    def close(self) -> None:
        """Close the descriptor, which frees the blocks."""
        self._file.close()


class RawCopy:
    """On every device at once: read each state record from one place, write it to the other, sync.

    Then the same back, as two steps do it, in the very blocks of the state. Two files of one size
    on one disk can differ in speed by a tenth and more, and blocks are written faster the shorter
    ago they were written: files of its own, or one way only, would flatter one side.

    Args:
        directories: of a set in which the current place of all records is 0. It stays as it is.
        layout: the set's.
        direct: by device, whether O_DIRECT works there.
    """

    def __init__(self, directories: Sequence[str], layout: Layout, direct: Sequence[bool]) -> None:
        self._stack = ExitStack()
        self._longest = layout.record_nbytes(RECORD_ELEMENTS)
        self._devices: list[_StatePlaces] = []
        self._workers: list[Workers] = []
        try:
            for index, (directory, is_direct) in enumerate(zip(directories, direct, strict=True)):
                self._devices.append(_StatePlaces(directory, layout, index, direct=is_direct))
                self._stack.callback(self._devices[-1].close)
            self._drivers = ThreadPoolExecutor(len(self._devices))
            self._stack.callback(self._drivers.shutdown)
        except BaseException:
            self._stack.close()
            raise

    def choose_threads(self) -> int:
        """Find the fastest number of threads per device, and keep it from here on."""
        candidates = {count: self._make_workers(count) for count in THREADS_TO_TRY}
        seconds: dict[int, float] = {}
        for _ in range(2):
            for count, own in candidates.items():
                self._workers = own
                seconds[count] = min(self.run(), seconds.get(count, float("inf")))
        best = min(seconds, key=lambda count: seconds[count])
        self._workers = candidates.pop(best)
        for unused in candidates.values():
            for each in unused:
                each.close()
        return best

    def run(self) -> float:
        """Copy everything there and back; returns the seconds of one way, their mean."""
        begin = time.perf_counter()
        for place in (0, 1):
            _finish(
                [
                    self._drivers.submit(device.copy, place, own)
                    for device, own in zip(self._devices, self._workers, strict=True)
                ]
            )
        return (time.perf_counter() - begin) / 2

    def close(self) -> None:
        """End the threads and close the files; a second call does nothing."""
        self._stack.close()

    def _make_workers(self, num_threads: int) -> list[Workers]:
        own = [Workers(num_threads, self._longest) for _ in self._devices]
        for each in own:
            self._stack.callback(each.close)
        return own


class _StatePlaces:
    """A device's two places of state, opened beside the device itself."""

    def __init__(self, directory: str, layout: Layout, index: int, *, direct: bool) -> None:
        self._layout, self._records = layout, layout.devices[index].records
        self._files = [
            BlockFile(directory, os.path.join(directory, name), direct=direct, mode="w")
            for name in STATE
        ]

    def copy(self, place: int, own: Workers) -> None:
        source, target = self._files[place], self._files[1 - place]

        def task(record: Record) -> Task:
            nbytes = self._layout.record_nbytes(record.length)
            offset = record.index * self._layout.record_stride

            def move(buffer: ByteArray) -> None:
                source.read_into(buffer[:nbytes], offset)
                target.write_from(buffer[:nbytes], offset)

            return move

        own.run([task(record) for record in self._records])
        target.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for every thread, so that no file is closed under one, and then raise."""
    wait(futures)
    for future in futures:
        future.result()


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes per second of one directory; ``mixed`` counts what was read and what was written."""

    read: float
    write: float
    mixed: float


def measure_bandwidth(directory: str, nbytes: int, *, direct: bool) -> Bandwidth:
    """Measure a directory on a temporary file of about ``nbytes`` that nobody sees."""
    block = min(BLOCK_NBYTES, nbytes // 2 // 4096 * 4096)
    count = nbytes // block // 2 * 2
    file = ScratchFile(directory, [block] * count, direct=direct)
    half = count // 2

    def mix(index: int) -> Task:
        def move(buffer: ByteArray) -> None:
            file.read(index, buffer)
            file.write(half + index, buffer)

        return move

    def read(index: int) -> Task:
        return lambda buffer: file.read(index, buffer)

    def write(index: int) -> Task:
        return lambda buffer: file.write(index, buffer)

    def rate(tasks: list[Task], moved: int, own: Workers) -> float:
        begin = time.perf_counter()
        own.run(tasks)
        file.sync()
        return moved / (time.perf_counter() - begin)

    try:
        file.fill()
        with workers(2, block) as own:
            total = block * count
            return Bandwidth(
                read=rate([read(index) for index in range(count)], total, own),
                write=rate([write(index) for index in range(count)], total, own),
                mixed=rate([mix(index) for index in range(half)], total, own),
            )
    finally:
        file.close()
