"""The ledger: which step is complete on a device, and where each state record then lies.

The file has four places: two pairs, each of two copies. Successive records go to alternate pairs,
after the step's data and its ``fdatasync``, and are then synced themselves; so the record before
is whole at every instant, and each record has a second copy.

A record is a fixed header, arrays sized by the layout, and the xxh3 checksum of all of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import xxhash

from smart_infinity.errors import CorruptStateError
from smart_infinity.layout import FORMAT_VERSION, PAGE_BYTES
from smart_infinity.storage.blockfile import BlockFile

_MAGIC = b"SmartInf"
# magic, version, dirty, branch, step, attempt, amendment, records, parameters,
# blob place, blob bytes, blob checksum
_HEADER = struct.Struct("<8sIIQQ16sQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_PLACES = ((0, 2), (1, 3))  # of the copies of each pair

StepId = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One committed step of one device.

    Attributes:
        branch: how often the set went back to a snapshot; a later branch is newer at any step.
        step: committed optimizer steps; 0 is the state as `offload()` wrote it.
        attempt: 16 random bytes per process, so that the same step of an abandoned run differs.
        amendment: how often the host's part was replaced since the step was committed.
        dirty: the step is being made in place, and the state is torn until a clean record of it.
        places: uint8 per state record, the current place (0 or 1).
        checksums: uint64 per state record, xxh3 of its bytes as written.
        counts: int64 per parameter, its own step count.
        blob_place, blob_nbytes, blob_checksum: where the host's part of the commit lies.
    """

    branch: int
    step: int
    attempt: bytes
    amendment: int
    dirty: bool
    places: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.int64]
    blob_place: int
    blob_nbytes: int
    blob_checksum: int

    @property
    def step_id(self) -> StepId:
        """What makes two devices' records the same step; in order of age."""
        return self.branch, self.step, self.attempt

    @property
    def age(self) -> tuple[int, int, bool, int]:
        """Orders the records of one device; the mark of a step in progress is older than it."""
        return self.branch, self.step, not self.dirty, self.amendment

    def encode(self) -> bytes:
        """The record's bytes."""
        head = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.dirty,
            self.branch,
            self.step,
            self.attempt,
            self.amendment,
            self.places.size,
            self.counts.size,
            self.blob_place,
            self.blob_nbytes,
            self.blob_checksum,
        )
        body = head + self.places.tobytes() + self.checksums.tobytes() + self.counts.tobytes()
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def blank_record(num_records: int, num_parameters: int, *, dirty: bool) -> LedgerRecord:
    """The record of a device on which nothing is committed."""
    places = np.zeros(num_records, np.uint8)
    checksums = np.zeros(num_records, np.uint64)
    counts = np.zeros(num_parameters, np.int64)
    return LedgerRecord(0, 0, bytes(16), 0, dirty, places, checksums, counts, 1, 0, 0)


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """What a ledger holds: distinct whole records, newest first, and what is wrong with it."""

    records: list[LedgerRecord]
    damage: list[str]

    def clean(self) -> list[LedgerRecord]:
        """The records of completed steps whose state is not overwritten in place since."""
        return list(takewhile(lambda record: not record.dirty, self.records))


def record_nbytes(num_records: int, num_parameters: int) -> int:
    """Size of an encoded record."""
    return _HEADER.size + 9 * num_records + 8 * num_parameters + _CHECKSUM.size


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def decode_record(data: bytes) -> LedgerRecord | None:
    """The record at the start of ``data``, or None if it is not whole."""
    if len(data) < _HEADER.size:
        return None
    magic, version, dirty, branch, step, attempt, amendment, records, parameters, *blob = (
        _HEADER.unpack_from(data)
    )
    if (magic, version) != (_MAGIC, FORMAT_VERSION):
        return None
    size = record_nbytes(records, parameters)
    if size > len(data):
        return None
    body = data[: size - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(data, len(body))[0] != xxhash.xxh3_64_intdigest(body):
        return None
    at = _HEADER.size
    places = np.frombuffer(data, np.uint8, records, at).copy()
    at += records
    checksums = np.frombuffer(data, np.uint64, records, at).copy()
    at += 8 * records
    counts = np.frombuffer(data, np.int64, parameters, at).copy()
    return LedgerRecord(
        branch, step, attempt, amendment, bool(dirty), places, checksums, counts, *blob
    )


class Ledger:
    """The ledger file of one device.

    Writing begins with `reserve` for a new ledger, or with `settle` for one that was found.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._next = 0  # the pair that the next record goes to

    def reserve(self, num_records: int, num_parameters: int) -> None:
        """Make room for records of a layout."""
        self._file.reserve(4 * _padded(record_nbytes(num_records, num_parameters)))

    def write(self, record: LedgerRecord) -> None:
        """Make a step complete on this device: both copies, then one sync."""
        for place in _PLACES[self._next]:
            self._write_at(place, record)
        self._file.sync()
        self._next = 1 - self._next

    def amend(self, record: LedgerRecord) -> None:
        """Replace the newest record, one copy after the other, so that one is always whole."""
        for place in _PLACES[1 - self._next]:
            self._write_at(place, record)
            self._file.sync()

    def settle(self, record: LedgerRecord) -> None:
        """Make ``record`` the only one, before anything of a later step is written.

        Without this, the record of an abandoned step could later be taken for the same step of
        another attempt, with half of its state overwritten.
        """
        for place in range(4):
            self._write_at(place, record)
        self._file.sync()
        self._next = 0

    def read(self) -> LedgerContents:
        """All that is there; a file that was cut still gives what is whole in it."""
        buffer = np.empty(self._file.nbytes(), np.uint8)
        self._file.read_into(buffer, 0)
        data = buffer.tobytes()
        found: dict[tuple[StepId, bool], LedgerRecord] = {}
        whole: set[int] = set()
        stride = 0
        for offset in range(0, len(data), PAGE_BYTES):
            record = decode_record(data[offset:]) if data.startswith(_MAGIC, offset) else None
            if record is not None:
                whole.add(offset)
                stride = _padded(record_nbytes(record.places.size, record.counts.size))
                key = record.step_id, record.dirty
                if key not in found or found[key].amendment < record.amendment:
                    found[key] = record
        # Only before the first step is one of the pairs still unused.
        all_used = any(own.step or own.branch or own.dirty for own in found.values())
        damage = []
        for place in range(4) if stride else ():
            offset = place * stride
            own = data[offset : offset + stride]
            if offset not in whole and (len(own) < stride or any(own) or all_used):
                seen = "cut off" if len(own) < stride else "damaged" if any(own) else "empty"
                damage.append(f"copy {place // 2} of pair {place % 2} in the ledger is {seen}")
        records = sorted(found.values(), key=lambda record: record.age, reverse=True)
        return LedgerContents(records, damage)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_at(self, place: int, record: LedgerRecord) -> None:
        data = np.frombuffer(record.encode(), np.uint8)
        self._file.write_from(data, place * _padded(data.size))


def newest_common(ledgers: Sequence[LedgerContents]) -> list[LedgerRecord]:
    """The newest step that is complete on every device: its record for each device.

    Raises:
        CorruptStateError: a device was in the middle of a step in place, or no step is common.
    """
    for number, contents in enumerate(ledgers):
        if contents.records and contents.records[0].dirty:
            raise CorruptStateError(
                f"device {number} was in the middle of step {contents.records[0].step} when its "
                "run ended, or of going back to it, and its former state is overwritten (as "
                'durability="none" does). Expected a step that was '
                "completed: go back to a snapshot with smart-infinity restore, or begin anew with "
                "resume=False"
            )
    by_device = [{record.step_id: record for record in own.clean()} for own in ledgers]
    common = set(by_device[0]).intersection(*by_device[1:])
    if not common:
        steps = [[record.step for record in own.clean()] for own in ledgers]
        raise CorruptStateError(
            f"no step is complete on every device: the ledgers hold steps {steps}, in order of "
            "the devices. Expected one step common to all; check that every directory belongs to "
            "this run and that none was replaced. If the run ended in the middle of a step with "
            'durability="none", go back to a snapshot with smart-infinity restore'
        )
    newest = max(common)
    return [records[newest] for records in by_device]
