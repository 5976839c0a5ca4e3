"""Copies of whole steps on a device, made by the device: nothing crosses the host's link.

snapshots/<name>/   a snapshot; `.<name>` while it is being made
    snapshot.json   whose it is, and when it was made
    state           every state record, at the offset it has in a state file
    record          a ledger record whose places are all 0
    blob            what the host committed with the step
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    DeviceIOError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.layout import FORMAT_VERSION, PAGE_BYTES
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.buffers import checksum as checksum_of
from smart_infinity.storage.ledger import LedgerRecord, decode_record
from smart_infinity.storage.slots import (
    SNAPSHOTS,
    STATE,
    free_nbytes,
    sync_directory,
    write_durably,
)
from smart_infinity.storage.store import Commit, RecordReader, Store
from smart_infinity.storage.superblock import decode_document, encode_document

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ABOUT, _STATE, _RECORD, _BLOB = "snapshot.json", "state", "record", "blob"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot says about itself on one device.

    Attributes:
        identity: the same random text on all devices of the set.
        step, attempt: of the committed step; see `LedgerRecord`. Together they say what it holds.
        created: when it was made, as ISO 8601 in UTC.
    """

    format_version: int
    name: str
    identity: str
    set_uuid: str
    device_index: int
    layout_hash: str
    step: int
    attempt: str
    created: str


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a directory everywhere. Raises `StateMismatchError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise StateMismatchError(
            f"the snapshot's name is {name!r}. Expected 1 to 100 letters, digits, dots, dashes "
            "and underscores, the first of them a letter or a digit"
        )


class Snapshots:
    """The snapshots of one device.

    Args:
        store: the device's files, opened; only for `copy`, `check`, `load` and `finish`.
        set_uuid: the set that the device belongs to.
    """

    def __init__(self, store: Store, set_uuid: str) -> None:
        self.store, self.set_uuid = store, set_uuid
        self.directory = store.directory
        self._root = os.path.join(store.directory, SNAPSHOTS)

    def whole(self) -> list[Snapshot]:
        """All whole snapshots of this set, oldest first."""
        found = [self._about(name) for name in self._names()]
        mine = [about for about in found if about is not None and about.set_uuid == self.set_uuid]
        return sorted(mine, key=lambda about: about.created)

    def remove(self, name: str) -> None:
        """Remove a snapshot, whole or half-made; nothing happens where there is none."""
        hidden = os.path.join(self._root, "." + name)
        shutil.rmtree(hidden, ignore_errors=True)
        path = os.path.join(self._root, name)
        try:
            os.rename(path, hidden)  # in one go it is no snapshot any more
        except FileNotFoundError:
            return
        except OSError as error:
            raise DeviceIOError(self.directory, path, "rename", None, error.errno or 0) from error
        shutil.rmtree(hidden, ignore_errors=True)

    def remove_half_made(self) -> None:
        """Clear away what a crash left."""
        if os.path.isdir(self._root):
            for name in os.listdir(self._root):
                if name.startswith("."):
                    shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)

    def damaged(self) -> list[str]:
        """Names of snapshots that do not even say what they are."""
        return sorted(name for name in self._names() if self._about(name) is None)

    # --- making ------------------------------------------------------------------------------

    def needed_nbytes(self) -> int:
        """Disk space that a copy of the committed step takes."""
        return self.store.state_nbytes + self.store.record.blob_nbytes + 16 * PAGE_BYTES

    def require_room(self, name: str, needed: int) -> None:
        """Refuse a name that is taken, and a file system without ``needed`` free bytes."""
        if os.path.exists(os.path.join(self._root, name)):
            raise StateExistsError(
                f"device {self.directory} has a snapshot {name!r} already. Expected a new name; "
                "or remove the old one first"
            )
        free = free_nbytes(self.directory)
        if free < needed:
            raise DeviceFullError(
                f"device {self.directory}: the snapshot {name!r} needs {needed} bytes on this file "
                f"system and {free} are free. Remove a snapshot, or free some space; nothing was "
                "left behind"
            )

    def copy(self, name: str, identity: str, created: str) -> None:
        """Copy the committed step to a hidden directory; `publish` makes it a snapshot."""
        store, record = self.store, self.store.record
        path = os.path.join(self._root, "." + name)
        about = Snapshot(
            FORMAT_VERSION,
            name,
            identity,
            self.set_uuid,
            store.device,
            store.layout.hash(),
            record.step,
            record.attempt.hex(),
            created,
        )
        try:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
            blob = store.read_blob(record)
            plain = replace(record, places=np.zeros_like(record.places), blob_place=0)
            with self._files(os.path.join(path, _STATE), "x") as (sources, target):
                for own in store.layout.devices[store.device].records:
                    offset = own.index * store.layout.record_stride
                    nbytes = store.layout.record_nbytes(own.length)
                    sources[int(record.places[own.index])].copy_to(target, nbytes, offset, offset)
                target.sync()
            data = encode_document(asdict(about))
            write_durably(self.directory, os.path.join(path, _RECORD), plain.encode())
            write_durably(self.directory, os.path.join(path, _BLOB), blob)
            write_durably(self.directory, os.path.join(path, _ABOUT), data)
        except BaseException as error:
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, DeviceIOError) or not isinstance(error, OSError):
                raise
            raise DeviceIOError(self.directory, path, "write", None, error.errno or 0) from error

    def publish(self, name: str) -> None:
        """Give a copy its name; from here on it is a snapshot."""
        path = os.path.join(self._root, name)
        try:
            os.rename(os.path.join(self._root, "." + name), path)
            sync_directory(self._root)
            sync_directory(self.directory)
        except OSError as error:
            raise DeviceIOError(self.directory, path, "rename", None, error.errno or 0) from error

    # --- going back --------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Read a whole snapshot.

        Raises `StateMismatchError`, `CorruptStateError`, or `DeviceIOError`.
        """
        for problem in self.problems(name):
            raise CorruptStateError(
                f"device {self.directory}: snapshot {name!r}: {problem}. Expected what was "
                "copied; choose another snapshot. Nothing was changed"
            )

    def problems(self, name: str) -> Iterator[str]:
        """What is wrong with a snapshot, read whole; see `check`."""
        about = self._about(name)
        if about is None:
            raise StateMismatchError(
                f"device {self.directory} has no snapshot {name!r}. It has "
                f"{[own.name for own in self.whole()]}"
            )
        store = self.store
        if (about.set_uuid, about.layout_hash, about.device_index) != (
            self.set_uuid,
            store.layout.hash(),
            store.device,
        ):
            raise StateMismatchError(
                f"device {self.directory}: snapshot {name!r} is of device {about.device_index} of "
                f"set {about.set_uuid}. Expected device {store.device} of set {self.set_uuid}, "
                "since a snapshot can be restored into its own set only"
            )
        try:
            if not self._is_whole(self._read(name, _BLOB), self._record(name)):
                yield "its blob is damaged"
            with self.reader(name) as reader:
                for own in reader.plan.records:
                    if reader.read(own) is None:
                        yield f"its state record {own.index} is damaged or cut off"
        except CorruptStateError as error:
            yield str(error)

    def read_blob(self, name: str) -> bytes:
        """What the host committed with a snapshot's step. Raises `CorruptStateError`."""
        blob = self._read(name, _BLOB)
        if not self._is_whole(blob, self._record(name)):
            raise CorruptStateError(f"device {self.directory}: snapshot {name!r}: damaged blob")
        return blob

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[RecordReader]:
        """A reader of the state records of a snapshot."""
        path = os.path.join(self._root, name, _STATE)
        file = BlockFile(self.directory, path, direct=False, mode="r")
        try:
            yield RecordReader(self.store.layout, self.store.device, [file], self._record(name))
        finally:
            file.close()

    def load(self, name: str, branch: int) -> None:
        """Copy a checked snapshot to the places that the committed step does not use.

        In place where there is no other; the ledger then says since before that the state is torn.
        """
        store = self.store
        record = self._record(name)
        places = self._free_places()
        if store.in_place:
            store.mark_dirty((branch, record.step, record.attempt))
        with self._files(os.path.join(self._root, name, _STATE), "r") as (targets, source):
            for own in store.layout.devices[store.device].records:
                offset = own.index * store.layout.record_stride
                nbytes = store.layout.record_nbytes(own.length)
                source.copy_to(targets[int(places[own.index])], nbytes, offset, offset)

    def finish(self, name: str, branch: int) -> None:
        """Commit what `load` has copied, as the same step of a later branch."""
        record = self._record(name)
        written = {
            index: (int(place), int(checksum))
            for index, (place, checksum) in enumerate(
                zip(self._free_places(), record.checksums, strict=True)
            )
        }
        step_id = branch, record.step, record.attempt
        self.store.commit(Commit(step_id, record.counts, self._read(name, _BLOB)), written)

    def _free_places(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        places = self.store.record.places
        return places if self.store.in_place else (1 - places).astype(np.uint8)

    # --- helpers -----------------------------------------------------------------------------

    @staticmethod
    def _is_whole(blob: bytes, record: LedgerRecord) -> bool:
        return checksum_of(np.frombuffer(blob, np.uint8)) == record.blob_checksum

    def _names(self) -> list[str]:
        if not os.path.isdir(self._root):
            return []
        return [name for name in os.listdir(self._root) if not name.startswith(".")]

    def _about(self, name: str) -> Snapshot | None:
        try:
            with open(os.path.join(self._root, name, _ABOUT), "rb") as file:
                content = decode_document(file.read())
            return None if content is None else Snapshot(**content)
        except (OSError, TypeError):
            return None

    def _read(self, name: str, part: str) -> bytes:
        path = os.path.join(self._root, name, part)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise DeviceIOError(self.directory, path, "read", None, error.errno or 0) from error

    def _record(self, name: str) -> LedgerRecord:
        record = decode_record(self._read(name, _RECORD))
        if record is None:
            raise CorruptStateError("its record is damaged")
        return record

    @contextlib.contextmanager
    def _files(self, path: str, mode: str) -> Iterator[tuple[list[BlockFile], BlockFile]]:
        """The state files and a snapshot's, through the page cache: copying wants it so."""
        other = "r" if mode == "x" else "w"
        opened: list[BlockFile] = []
        try:
            for name in STATE[: len(self.store.files)]:
                file = os.path.join(self.directory, name)
                opened.append(BlockFile(self.directory, file, direct=False, mode=other))
            opened.append(BlockFile(self.directory, path, direct=False, mode=mode))
            yield opened[:-1], opened[-1]
        finally:
            for each in opened:
                each.close()
