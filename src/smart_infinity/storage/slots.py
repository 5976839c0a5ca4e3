"""A device's directory: lock, superblock, layout, and the two places of every state record.

superblock.json   format version, set UUID, device index and count, layout hash, optimizer
layout.json       names, shapes, dtypes, units, records
state.0, state.1  the two places of every state record
ledger            which place is current, per record, for the last two steps (see ledger.py)
blob.0, blob.1    what the host commits with a step
lock              held with flock while the device is open; the kernel drops it on death
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import weakref
from dataclasses import asdict, dataclass
from typing import Any

from smart_infinity.errors import (
    DeviceBusyError,
    DeviceIOError,
    DeviceSpecError,
    StateMismatchError,
)
from smart_infinity.layout import FORMAT_VERSION

SUPERBLOCK, LAYOUT, LEDGER, LOCK = "superblock.json", "layout.json", "ledger", "lock"
STATE = ("state.0", "state.1")
BLOB = ("blob.0", "blob.1")
# In the order of removal: what makes the rest a state goes first.
OUR_FILES = (SUPERBLOCK, LEDGER, LAYOUT, *STATE, *BLOB)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a directory says about itself."""

    format_version: int
    set_uuid: str
    device_index: int
    num_devices: int
    layout_hash: str
    optimizer: str


_open_locks: weakref.WeakSet[DeviceLock] = weakref.WeakSet()


class DeviceLock:
    """The kernel-held lock of a directory; raises `DeviceBusyError` if somebody holds it."""

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, LOCK)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DeviceSpecError(
                f"device {directory}: cannot create its lock file: {error.strerror}. Expected a "
                "directory that this process may write to"
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
        _open_locks.add(self)

    def release(self) -> None:
        """Drop the lock; a second call does nothing."""
        self._closer()


def _close_in_child() -> None:
    # A descriptor inherited by a forked worker would keep the lock alive after the trainer died.
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


def require_directory(directory: str) -> None:
    """Refuse a device that is not an existing, writable directory."""
    if not os.path.isdir(directory):
        seen = "is not a directory" if os.path.exists(directory) else "does not exist"
        raise DeviceSpecError(
            f"device {directory} {seen}. Expected an existing directory on the drive to use; "
            "create it first"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DeviceSpecError(
            f"device {directory} is not writable for this process. Expected a directory that it "
            "may write to; change its owner or mode"
        )


def write_durably(path: str, data: bytes) -> None:
    """Write a small file atomically: temporary file, fsync, rename, fsync of the directory."""
    temporary = path + ".tmp"
    directory = os.path.dirname(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise DeviceIOError(directory, path, "write", None, error.errno or 0) from error


def write_superblock(directory: str, superblock: Superblock, layout: dict[str, Any]) -> None:
    """Write layout and then superblock, so that a superblock never speaks of a missing layout."""
    write_durably(os.path.join(directory, LAYOUT), _to_json(layout))
    write_durably(os.path.join(directory, SUPERBLOCK), _to_json(asdict(superblock)))


def read_superblock(directory: str) -> Superblock | None:
    """The directory's superblock, or None where there is none."""
    content = _read_json(directory, SUPERBLOCK)
    if content is None:
        return None
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise StateMismatchError(
            f"device {directory}: its state has format version {version}, this release of "
            f"smart-infinity reads version {FORMAT_VERSION}. Use the release that wrote it, or "
            "discard the state with offload(..., resume=False)"
        )
    try:
        return Superblock(**content)
    except TypeError as error:
        raise _damaged(directory, SUPERBLOCK, str(error)) from error


def read_layout(directory: str) -> dict[str, Any]:
    """The directory's layout, as ``Layout.to_json`` wrote it."""
    content = _read_json(directory, LAYOUT)
    if content is None:
        raise _damaged(directory, LAYOUT, "the file is missing")
    return content


def discard(directory: str) -> None:
    """Remove the files of a state, and nothing else: a mount root also holds ``lost+found``."""
    for name in OUR_FILES:
        for path in (os.path.join(directory, name), os.path.join(directory, name + ".tmp")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _read_json(directory: str, name: str) -> dict[str, Any] | None:
    path = os.path.join(directory, name)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DeviceIOError(directory, path, "read", None, error.errno or 0) from error
    except ValueError as error:
        raise _damaged(directory, name, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(directory, name, "not a JSON object")
    return content


def _damaged(directory: str, name: str, detail: str) -> StateMismatchError:
    return StateMismatchError(
        f"device {directory}: {name} is damaged or not of this program ({detail}). Expected the "
        "file that offload() wrote; restore it, or discard the state with resume=False"
    )
