"""What lies in a device's directory, and the handling of it as a whole.

superblock.json   format version, set UUID, device index and count, layout hash, optimizer
layout.json       names, shapes, dtypes, units, records
*.copy.json       a second copy of each of the two
state.0, state.1  the two places of every state record; only the first with durability="none"
ledger            which place is current, per record, for the last two steps (see ledger.py)
blob.0, blob.1    what the host commits with a step
snapshots/        copies of whole steps by name (see snapshots.py)
lock              held with flock while the device is open; the kernel drops it on death
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator

from smart_infinity.errors import DeviceFullError, DeviceIOError, DeviceSpecError

SUPERBLOCK, LAYOUT, LEDGER, LOCK = "superblock.json", "layout.json", "ledger", "lock"
COPY_OF = {SUPERBLOCK: "superblock.copy.json", LAYOUT: "layout.copy.json"}
STATE = ("state.0", "state.1")
BLOB = ("blob.0", "blob.1")
SNAPSHOTS = "snapshots"
# In the order of removal: what makes the rest a state goes first.
OUR_FILES = (COPY_OF[SUPERBLOCK], SUPERBLOCK, LEDGER, LAYOUT, COPY_OF[LAYOUT], *STATE, *BLOB)


def require_directory(directory: str, *, writable: bool = True) -> None:
    """Refuse a device that is not an existing directory, writable if need be."""
    if not os.path.isdir(directory):
        seen = "is not a directory" if os.path.exists(directory) else "does not exist"
        raise DeviceSpecError(
            f"device {directory} {seen}. Expected an existing directory on the drive to use; "
            "create it first"
        )
    if not writable:
        return
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise DeviceSpecError(
            f"device {directory} lies on a read-only file system. Expected one that can be "
            "written; mount it for writing (mount -o remount,rw)"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DeviceSpecError(
            f"device {directory} is not writable for this process. Expected a directory that it "
            "may write to; change its owner or mode"
        )


def free_nbytes(directory: str) -> int:
    """Bytes that this process may still write on the directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def full(directory: str, needed: int, available: int) -> DeviceFullError:
    """The error for a state that does not fit."""
    return DeviceFullError(
        f"device {directory}: the state needs {needed} bytes here and the file system has "
        f"{available} free. Free some space, or add a device; nothing was left reserved"
    )


def disk_nbytes(directory: str) -> int:
    """Bytes that our files take on disk: what `discard` frees."""
    files = [os.path.join(directory, name) for name in OUR_FILES]
    for root, _, names_below in os.walk(os.path.join(directory, SNAPSHOTS)):
        files += [os.path.join(root, name) for name in names_below]
    return sum(512 * os.stat(file).st_blocks for file in files if os.path.exists(file))


def totals_by_file_system(amounts: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """For each (directory, bytes): the sum of its bytes and all before it on its file system."""
    totals: dict[int, int] = {}
    for directory, nbytes in amounts:
        file_system = os.stat(directory).st_dev
        totals[file_system] = totals.get(file_system, 0) + nbytes
        yield directory, totals[file_system]


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(device: str, path: str, data: bytes) -> None:
    """Write a small file atomically: temporary file, fsync, rename, fsync of the directory."""
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise DeviceIOError(device, path, "write", None, error.errno or 0) from error


def discard(directory: str) -> None:
    """Remove the files of a state, and nothing else: a mount root also holds ``lost+found``."""
    for name in OUR_FILES:
        for path in (os.path.join(directory, name), os.path.join(directory, name + ".tmp")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    # Snapshots can be restored into their own set only, and that is gone.
    shutil.rmtree(os.path.join(directory, SNAPSHOTS), ignore_errors=True)
