"""One preallocated file, read and written in whole pages past the page cache where possible."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from smart_infinity.errors import DeviceIOError
from smart_infinity.layout import PAGE_BYTES
from smart_infinity.storage.buffers import reserve

Bytes = npt.NDArray[np.uint8]
# What old kernels and some file systems answer to copy_file_range.
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY}


def direct_io_refusal(directory: str) -> str | None:
    """Try O_DIRECT in a directory for real; returns None if it works, else the reason."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no O_DIRECT"
    page = reserve(PAGE_BYTES, huge_pages=False)
    handle, path = tempfile.mkstemp(prefix=".smart-infinity-", dir=directory)
    os.close(handle)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            if (
                os.pwritev(fd, [page.data], 0) != PAGE_BYTES
                or os.preadv(fd, [page.data], 0) != PAGE_BYTES
            ):
                return "a one-page transfer came back short"
        finally:
            os.close(fd)
    except OSError as error:
        return f"{os.strerror(error.errno or 0)} (errno {error.errno})"
    finally:
        os.unlink(path)
    return None


# (path, offset and bytes of a write) or (path, None, None) for a sync, each when it has succeeded.
Observer = Callable[[str, int | None, bytes | None], None]
_observers: list[Observer] = []


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of every write and sync of every file: to model the loss of power."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


class BlockFile:
    """A file of a device. Every failure raises `DeviceIOError` naming operation and offset.

    Args:
        device: the device's directory, for error messages.
        path: the file.
        direct: open with O_DIRECT; buffers, offsets and sizes must then be whole pages.
        mode: ``"r"`` to read, ``"w"`` to write too, ``"x"`` to make the file if it is absent.
    """

    def __init__(self, device: str, path: str, *, direct: bool, mode: str = "x") -> None:
        self.device, self.path, self.direct = device, path, direct
        flags = {"r": os.O_RDONLY, "w": os.O_RDWR, "x": os.O_RDWR | os.O_CREAT}[mode]
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o644)
        except OSError as error:
            raise self._error("open", None, error) from error
        # Also when the owner is garbage collected without close().
        self._closer = weakref.finalize(self, _close_quietly, self._fd)
        # At exit the kernel does it: after what may still be written then.
        self._closer.atexit = False

    def reserve(self, nbytes: int) -> None:
        """Allocate the file's blocks now, so that a full disk is refused before training."""
        if nbytes:
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                raise self._error("reserve", nbytes, error) from error

    def copy_to(self, target: BlockFile, nbytes: int, offset: int, target_offset: int) -> None:
        """Copy a range into another file without bringing it into this process.

        The file system shares the blocks where it can (reflinks). Neither file may be direct.
        """
        done = 0
        while done < nbytes:
            try:
                count = os.copy_file_range(
                    self._fd, target._fd, nbytes - done, offset + done, target_offset + done
                )
            except OSError as error:
                if error.errno not in _NO_COPY_RANGE:
                    raise self._error("copy", offset + done, error) from error
                self._copy_by_hand(target, nbytes - done, offset + done, target_offset + done)
                return
            if count == 0:
                detail = f"the file ends here, {nbytes - done} bytes short"
                raise DeviceIOError(self.device, self.path, "copy", offset + done, 0, detail)
            for observer in _observers:
                begin = target_offset + done
                observer(target.path, begin, os.pread(target._fd, count, begin))
            done += count

    def _copy_by_hand(
        self, target: BlockFile, nbytes: int, offset: int, target_offset: int
    ) -> None:
        buffer = np.empty(min(nbytes, 1 << 22), np.uint8)
        for done in range(0, nbytes, buffer.size):
            part = buffer[: min(buffer.size, nbytes - done)]
            self.read_into(part, offset + done)
            target.write_from(part, target_offset + done)

    def nbytes(self) -> int:
        """The file's present size."""
        return os.fstat(self._fd).st_size

    def read_into(self, target: Bytes, offset: int) -> None:
        """Fill ``target`` from ``offset``."""
        done = 0
        while done < target.size:
            try:
                count = os.preadv(self._fd, [target[done:].data], offset + done)
            except OSError as error:
                raise self._error("read", offset + done, error) from error
            whole = self._whole(count, target.size - done)
            if whole == 0:
                detail = f"the file ends here, {target.size - done - count} bytes short"
                raise DeviceIOError(self.device, self.path, "read", offset + done, 0, detail)
            done += whole

    def write_from(self, source: Bytes, offset: int) -> None:
        """Write all of ``source`` at ``offset``."""
        done = 0
        while done < source.size:
            try:
                count = os.pwritev(self._fd, [source[done:].data], offset + done)
            except OSError as error:
                raise self._error("write", offset + done, error) from error
            whole = self._whole(count, source.size - done)
            for observer in _observers:
                observer(self.path, offset + done, source[done : done + whole].tobytes())
            if whole == 0:
                detail = f"{count} bytes written"
                raise DeviceIOError(
                    self.device, self.path, "write", offset + done, errno.ENOSPC, detail
                )
            done += whole

    def sync(self) -> None:
        """Make everything written so far durable (``fdatasync``)."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._error("sync", None, error) from error
        for observer in _observers:
            observer(self.path, None, None)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self._fd = -1
        self._closer()

    def _whole(self, count: int, wanted: int) -> int:
        # After a short transfer in direct mode the next one must begin on a page again. Less than
        # a page is no progress: the end of the file or of the disk lies inside it.
        if not self.direct or count >= wanted:
            return count
        return count // PAGE_BYTES * PAGE_BYTES

    def _error(self, operation: str, offset: int | None, error: OSError) -> DeviceIOError:
        return DeviceIOError(self.device, self.path, operation, offset, error.errno or 0)
