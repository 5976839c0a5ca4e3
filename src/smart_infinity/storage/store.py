"""The files of one device's state, and what makes a step of it durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from smart_infinity.errors import CorruptStateError, DeviceIOError
from smart_infinity.layout import PAGE_BYTES, Layout, Record
from smart_infinity.storage import slots
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.buffers import ByteArray, reserve
from smart_infinity.storage.buffers import checksum as checksum_of
from smart_infinity.storage.checksums import state_checksum
from smart_infinity.storage.ledger import (
    Ledger,
    LedgerContents,
    LedgerRecord,
    StepId,
    blank_record,
)


@dataclass(frozen=True, slots=True)
class Commit:
    """What a device makes durable with a step; see ``storage.ledger``."""

    step_id: StepId
    counts: npt.NDArray[np.int64]
    blob: bytes


class RecordReader:
    """Reads the state records of one step into a buffer of its own, and checks them.

    Args:
        layout: the layout.
        device: index of the device.
        files: the state files, by place.
        record: where each state record lies, and its checksum.
    """

    def __init__(
        self, layout: Layout, device: int, files: Sequence[BlockFile], record: LedgerRecord
    ) -> None:
        self.layout, self.plan, self.record = layout, layout.devices[device], record
        self._files = files
        longest = max((own.length for own in self.plan.records), default=0)
        self._buffer: ByteArray = reserve(layout.record_nbytes(longest))

    def read(self, record: Record) -> npt.NDArray[np.float32] | None:
        """A record as fp32 ``[tensors, length]``, until the next call; None if it is damaged."""
        data = self._buffer[: self.layout.record_nbytes(record.length)]
        place = int(self.record.places[record.index])
        if place >= len(self._files):
            return None
        file = self._files[place]
        offset = record.index * self.layout.record_stride
        if file.nbytes() < offset + data.size:
            return None
        file.read_into(data, offset)
        num_tensors = self.layout.num_state_tensors
        if state_checksum(data, record.length, num_tensors) != int(
            self.record.checksums[record.index]
        ):
            return None
        floats = data.view(np.float32)[: record.length * num_tensors]
        return floats.reshape(num_tensors, record.length)


class Store:
    """One device's state on storage.

    Args:
        directory: the device's directory; the caller holds its lock.
        layout: the plan of the whole set.
        device: which device of the plan this is.
        direct: whether O_DIRECT works here.
        mode: as in `BlockFile`: ``"r"`` where nothing may be changed.

    Attributes:
        files: the state files by place, once opened; only one after ``create(in_place=True)``.
        record: what is committed; there after `settle` or `commit`.
        in_place: steps overwrite the state that they read.
        held: a step whose state is in memory in part, until `commit_held`.
    """

    files: list[BlockFile]
    record: LedgerRecord

    def __init__(
        self, directory: str, layout: Layout, device: int, *, direct: bool, mode: str = "w"
    ) -> None:
        self.directory, self.layout, self.device = directory, layout, device
        self._direct, self._mode = direct, mode
        self.in_place, self._is_dirty = False, False
        self.held: Commit | None = None
        self.files = []
        self._blobs: list[BlockFile] = []
        self._ledger: Ledger | None = None

    @property
    def state_nbytes(self) -> int:
        """Size of one state file."""
        return self.layout.state_nbytes(self.device)

    # --- opening -----------------------------------------------------------------------------

    def create(self, *, in_place: bool) -> None:
        """Make and reserve all files; raises `DeviceIOError` where that fails."""
        self.in_place = in_place
        for name in slots.STATE[: 1 if in_place else 2]:
            self.files.append(self._open(name, direct=self._direct, mode="x"))
            self.files[-1].reserve(self.state_nbytes)
        self._ledger = Ledger(self._open(slots.LEDGER, mode="x"))
        num_records = len(self.layout.devices[self.device].records)
        num_parameters = len(self.layout.parameters)
        self._ledger.reserve(num_records, num_parameters)
        self._blobs = [self._open(name, mode="x") for name in slots.BLOB]
        self.record = blank_record(num_records, num_parameters, dirty=False)

    def open(self, record: LedgerRecord | None = None, *, in_place: bool | None = None) -> None:
        """Open the files that are there.

        Args:
            record: the step that is wanted, which says what state files must be whole.
            in_place: how steps will be made; None: as the files allow.

        Raises:
            CorruptStateError: a state file is missing or cut off; what is there is open then.
        """
        self._ledger = Ledger(self._open(slots.LEDGER))
        self._blobs = [self._open(name) for name in slots.BLOB]
        used = set() if record is None else set(record.places.tolist())
        for place, name in enumerate(slots.STATE):
            path = os.path.join(self.directory, name)
            size = os.path.getsize(path) if os.path.exists(path) else -1
            if size >= self.state_nbytes and size >= 0:
                self.files.append(self._open_state(name))
            elif place in used or place == 0:
                seen = "is missing" if size < 0 else f"is cut off: it has {size} bytes"
                raise CorruptStateError(
                    f"device {self.directory}: {name} {seen}. Expected {self.state_nbytes} bytes; "
                    "restore the directory from a copy, or begin anew with resume=False"
                )
        self.in_place = len(self.files) == 1 if in_place is None else in_place

    def reserve_second_place(self) -> None:
        """Make the second state file where steps will need it and it was never reserved."""
        if self.in_place or len(self.files) > 1:
            return
        file = self._open(slots.STATE[1], direct=self._direct, mode="x")
        try:
            file.reserve(self.state_nbytes)
            slots.sync_directory(self.directory)
        except DeviceIOError:
            file.close()
            os.unlink(file.path)
            raise
        self.files.append(file)

    def _open_state(self, name: str) -> BlockFile:
        try:
            return self._open(name, direct=self._direct)
        except DeviceIOError as error:
            # Whether O_DIRECT works is tried out by writing; who only reads tries it here.
            if error.errno != errno.EINVAL or self._mode != "r":
                raise
            return self._open(name)

    def ledger_contents(self) -> LedgerContents:
        """What the ledger holds; nothing where there is none."""
        if not os.path.exists(os.path.join(self.directory, slots.LEDGER)):
            return LedgerContents([], [])
        ledger = Ledger(self._open(slots.LEDGER, mode="r"))
        try:
            return ledger.read()
        finally:
            ledger.close()

    def settle(self, record: LedgerRecord) -> None:
        """Make ``record`` the only step, and continue from there; first of all writes."""
        assert self._ledger is not None, "open() comes first"
        self._ledger.settle(record)
        self.record = record

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        for file in (*self.files, *self._blobs):
            file.close()
        if self._ledger is not None:
            self._ledger.close()
        self.files, self._blobs, self._ledger = [], [], None

    # --- committing ---------------------------------------------------------------------------

    def reserve_blob(self, nbytes: int) -> None:
        """Make room for what the host commits, which may grow by some digits.

        So a full disk is found out now, and not in a step.
        """
        for file in self._blobs:
            file.reserve(2 * nbytes + PAGE_BYTES)

    def mark_dirty(self, step_id: StepId) -> None:
        """Say durably that the current state is about to be overwritten by a step."""
        self.held = None
        if self._is_dirty:
            return
        branch, step, attempt = step_id
        assert self._ledger is not None
        self._is_dirty = True
        self._ledger.write(
            replace(self.record, branch=branch, step=step, attempt=attempt, dirty=True)
        )

    def commit(self, commit: Commit, written: Mapping[int, tuple[int, int]]) -> None:
        """Make a step complete on this device: data, sync, ledger, sync.

        Args:
            commit: the host's part.
            written: state record -> (its place now, checksum) for each one that was written.
        """
        for place in {place for place, _ in written.values()}:
            self.files[place].sync()
        record = self._after(commit, written, self._write_blob(commit.blob))
        assert self._ledger is not None
        self._ledger.write(record)
        self.record, self._is_dirty = record, False

    def hold(self, commit: Commit, written: Mapping[int, tuple[int, int]]) -> None:
        """Go on from a step without making it complete: some of its state is in memory only."""
        self.record = self._after(commit, written, self.record.blob_place)
        self.held = commit

    def commit_held(self, written: Mapping[int, tuple[int, int]]) -> None:
        """Make the step that is held complete; ``written`` is what was missing of it."""
        if self.held is not None:
            self.files[0].sync()
            self.commit(self.held, written)
            self.held = None

    def _after(
        self, commit: Commit, written: Mapping[int, tuple[int, int]], blob_place: int
    ) -> LedgerRecord:
        """What the ledger says after a step."""
        places, checksums = self.record.places.copy(), self.record.checksums.copy()
        for index, (place, checksum) in written.items():
            places[index], checksums[index] = place, checksum
        branch, step, attempt = commit.step_id
        return LedgerRecord(
            branch,
            step,
            attempt,
            0,
            False,
            places,
            checksums,
            commit.counts,
            blob_place,
            len(commit.blob),
            checksum_of(np.frombuffer(commit.blob, np.uint8)),
        )

    def amend(self, blob: bytes) -> None:
        """Replace the host's part of the committed step."""
        if self.held is not None:
            self.held = replace(self.held, blob=blob)
            return
        record = replace(
            self.record,
            amendment=self.record.amendment + 1,
            blob_place=self._write_blob(blob),
            blob_nbytes=len(blob),
            blob_checksum=checksum_of(np.frombuffer(blob, np.uint8)),
        )
        assert self._ledger is not None
        self._ledger.amend(record)
        self.record = record

    def _write_blob(self, blob: bytes) -> int:
        """To the place that the committed step does not use."""
        place = 1 - self.record.blob_place
        self._blobs[place].write_from(np.frombuffer(blob, np.uint8), 0)
        self._blobs[place].sync()
        return place

    # --- reading ------------------------------------------------------------------------------

    def read_blob(self, record: LedgerRecord) -> bytes:
        """What the host committed with a step. Raises `CorruptStateError`."""
        file = self._blobs[record.blob_place]
        blob = np.zeros(min(record.blob_nbytes, file.nbytes()), np.uint8)
        file.read_into(blob, 0)
        if blob.size < record.blob_nbytes or checksum_of(blob) != record.blob_checksum:
            raise self.corrupt(slots.BLOB[record.blob_place], record.step)
        return blob.tobytes()

    def reader(self, record: LedgerRecord) -> RecordReader:
        """A reader of the state records of a step."""
        return RecordReader(self.layout, self.device, self.files, record)

    def require(self, index: int, checksum: int, written: tuple[int, int] | None = None) -> None:
        """Refuse a state record whose checksum is not that which was committed.

        Args:
            index: the record's.
            checksum: of what was read.
            written: its place and checksum, if it was written by a step not committed yet.
        """
        place, expected = written or (self.record.places[index], self.record.checksums[index])
        if checksum != int(expected):
            what = f"state record {index} in {slots.STATE[int(place)]}"
            raise self.corrupt(what, self.record.step)

    def corrupt(self, what: str, step: int) -> CorruptStateError:
        """The error for bytes that differ from those committed."""
        return CorruptStateError(
            f"device {self.directory}: {what} differs from what step {step} committed. Expected "
            "the bytes that were written; go back to a snapshot with smart-infinity restore, "
            "restore the directory from a copy, or load weights into the model and begin anew "
            "with resume=False"
        )

    def _open(self, name: str, *, direct: bool = False, mode: str | None = None) -> BlockFile:
        path = os.path.join(self.directory, name)
        return BlockFile(self.directory, path, direct=direct, mode=mode or self._mode)
