"""The kernel-held lock of a device's directory."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref

from smart_infinity.errors import DeviceBusyError, DeviceSpecError
from smart_infinity.storage.slots import LOCK

_open_locks: weakref.WeakSet[DeviceLock] = weakref.WeakSet()


class DeviceLock:
    """The lock of a directory; raises `DeviceBusyError` if somebody holds it.

    Args:
        directory: the device's directory.
        writable: whether to make the lock's file where it is missing; without, a directory on a
            read-only file system can be locked too.
    """

    def __init__(self, directory: str, *, writable: bool = True) -> None:
        path = os.path.join(directory, LOCK)
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if not writable and error.errno == errno.ENOENT:
                raise DeviceSpecError(
                    f"device {directory} has no lock file, so it was never a device. Expected the "
                    "directory of an offloaded run"
                ) from error
            raise DeviceSpecError(
                f"device {directory}: cannot open its lock file: {error.strerror}. Expected a "
                "directory that this process may use"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise DeviceBusyError(
                f"device {directory} is in use: {path} is locked by another optimizer, in this or "
                "another process. Close that one, or give this run a directory of its own"
            ) from error
        # Also drops the lock when the owner is garbage collected without close().
        self._closer = weakref.finalize(self, os.close, fd)
        # At exit the kernel does it: after what may still be written then.
        self._closer.atexit = False
        _open_locks.add(self)

    def release(self) -> None:
        """Drop the lock; a second call does nothing."""
        self._closer()


def _close_in_child() -> None:
    # A descriptor inherited by a forked worker would keep the lock alive after the trainer died.
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)
