"""One preallocated file, read and written in whole pages past the page cache where possible."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref

import numpy as np
import numpy.typing as npt

from smart_infinity.errors import DeviceIOError
from smart_infinity.layout import PAGE_BYTES
from smart_infinity.storage.buffers import reserve

Bytes = npt.NDArray[np.uint8]


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


def _close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


class BlockFile:
    """A file of a device. Every failure raises `DeviceIOError` naming operation and offset.

    Args:
        device: the device's directory, for error messages.
        path: the file; created if absent.
        direct: open with O_DIRECT; buffers, offsets and sizes must then be whole pages.
    """

    def __init__(self, device: str, path: str, *, direct: bool) -> None:
        self.device, self.path, self.direct = device, path, direct
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise self._error("open", None, error) from error
        # Also when the owner is garbage collected without close().
        self._closer = weakref.finalize(self, _close_quietly, self._fd)

    def reserve(self, nbytes: int) -> None:
        """Allocate the file's blocks now, so that a full disk is refused before training."""
        if nbytes:
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                raise self._error("reserve", nbytes, error) from error

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
