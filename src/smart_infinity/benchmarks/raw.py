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

from smart_infinity.layout import RECORD_ELEMENTS
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.buffers import ByteArray, reserve

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
    """On every directory at once: read each block of one file, write it to another, sync.

    Args:
        directories: one for each device.
        block_sizes: by device.
        direct: by device, whether O_DIRECT works there.
    """

    def __init__(
        self,
        directories: Sequence[str],
        block_sizes: Sequence[Sequence[int]],
        direct: Sequence[bool],
    ) -> None:
        self._stack = ExitStack()
        self._longest = max((max(sizes, default=0) for sizes in block_sizes), default=0)
        self._pairs: list[tuple[ScratchFile, ScratchFile]] = []
        self._workers: list[Workers] = []
        try:
            for directory, sizes, is_direct in zip(directories, block_sizes, direct, strict=True):
                source, target = (self._scratch(directory, sizes, is_direct) for _ in range(2))
                self._pairs.append((source, target))
            self._drivers = ThreadPoolExecutor(len(self._pairs))
            self._stack.callback(self._drivers.shutdown)
        except BaseException:
            self._stack.close()
            raise

    def _scratch(self, directory: str, sizes: Sequence[int], direct: bool) -> ScratchFile:
        file = ScratchFile(directory, sizes, direct=direct)
        self._stack.callback(file.close)
        file.fill()
        return file

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
        """Copy everything once; returns the seconds it took."""
        begin = time.perf_counter()
        _finish(
            [
                self._drivers.submit(_copy, pair, own)
                for pair, own in zip(self._pairs, self._workers, strict=True)
            ]
        )
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the threads and free the files; a second call does nothing."""
        self._stack.close()

    def _make_workers(self, num_threads: int) -> list[Workers]:
        own = [Workers(num_threads, self._longest) for _ in self._pairs]
        for each in own:
            self._stack.callback(each.close)
        return own


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for every thread, so that no file is closed under one, and then raise."""
    wait(futures)
    for future in futures:
        future.result()


def _copy(pair: tuple[ScratchFile, ScratchFile], own: Workers) -> None:
    source, target = pair

    def task(index: int) -> Task:
        def move(buffer: ByteArray) -> None:
            source.read(index, buffer)
            target.write(index, buffer)

        return move

    own.run([task(index) for index in range(len(source))])
    target.sync()


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
