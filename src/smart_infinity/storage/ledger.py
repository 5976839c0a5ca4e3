"""The ledger: which step is complete on a device, and where each state record then lies.

The file has four places, A0 A1 B0 B1. The record of step *s* is written to A(s mod 2) and
B(s mod 2), after the step's data and its ``fdatasync``, and then synced itself; so the record of
step *s - 1* is whole at every instant, and each record has a second copy.

A record is a fixed header, arrays sized by the layout, and the xxh3 checksum of all of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from smart_infinity.errors import CorruptStateError
from smart_infinity.layout import FORMAT_VERSION, PAGE_BYTES
from smart_infinity.storage.blockfile import BlockFile

_MAGIC = b"SmartInf"
# magic, version, step, attempt, records, parameters, blob place, blob bytes, blob checksum
_HEADER = struct.Struct("<8sIQ16sQQIQQ")
_CHECKSUM = struct.Struct("<Q")

StepId = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One committed step of one device.

    Attributes:
        step: committed optimizer steps; 0 is the state as `offload()` wrote it.
        attempt: 16 random bytes per process, so that the same step of an abandoned run differs.
        places: uint8 per state record, the current place (0 or 1).
        checksums: uint64 per state record, xxh3 of its bytes as written.
        counts: int64 per parameter, its own step count.
        blob_place, blob_nbytes, blob_checksum: where the host's part of the commit lies.
    """

    step: int
    attempt: bytes
    places: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.int64]
    blob_place: int
    blob_nbytes: int
    blob_checksum: int

    @property
    def step_id(self) -> StepId:
        """What makes two devices' records the same step."""
        return self.step, self.attempt

    def encode(self) -> bytes:
        """The record's bytes."""
        head = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.step,
            self.attempt,
            self.places.size,
            self.counts.size,
            self.blob_place,
            self.blob_nbytes,
            self.blob_checksum,
        )
        body = head + self.places.tobytes() + self.checksums.tobytes() + self.counts.tobytes()
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _record_nbytes(num_records: int, num_parameters: int) -> int:
    return _HEADER.size + 9 * num_records + 8 * num_parameters + _CHECKSUM.size


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _decode(data: bytes) -> LedgerRecord | None:
    """The record at the start of ``data``, or None if it is not whole."""
    if len(data) < _HEADER.size:
        return None
    magic, version, step, attempt, records, parameters, place, nbytes, checksum = (
        _HEADER.unpack_from(data)
    )
    if (magic, version) != (_MAGIC, FORMAT_VERSION):
        return None
    size = _record_nbytes(records, parameters)
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
    return LedgerRecord(step, attempt, places, checksums, counts, place, nbytes, checksum)


class Ledger:
    """The ledger file of one device.

    All records of a layout have the same size, so a record tells where its places are; reading
    looks at every page, so that a file that was cut or grew still gives what is whole in it.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    def reserve(self, num_records: int, num_parameters: int) -> None:
        """Make room for records of a layout."""
        self._file.reserve(4 * _padded(_record_nbytes(num_records, num_parameters)))

    def write(self, record: LedgerRecord) -> None:
        """Make a step complete on this device: both copies, then one sync."""
        self._write_at((record.step % 2, 2 + record.step % 2), record)

    def settle(self, record: LedgerRecord) -> None:
        """Make ``record`` the only one, before anything of a later step is written.

        Without this, the record of an abandoned step could later be taken for the same step of
        another attempt, with half of its state overwritten.
        """
        self._write_at(range(4), record)

    def read(self) -> list[LedgerRecord]:
        """All distinct whole records, newest first."""
        found: dict[StepId, LedgerRecord] = {}
        buffer = np.empty(self._file.nbytes(), np.uint8)
        self._file.read_into(buffer, 0)
        data = buffer.tobytes()
        for offset in range(0, len(data), PAGE_BYTES):
            if data.startswith(_MAGIC, offset):
                record = _decode(data[offset:])
                if record is not None:
                    found.setdefault(record.step_id, record)
        return sorted(found.values(), key=lambda record: record.step, reverse=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_at(self, places: Iterable[int], record: LedgerRecord) -> None:
        data = np.frombuffer(record.encode(), np.uint8)
        for place in places:
            self._file.write_from(data, place * _padded(data.size))
        self._file.sync()


def newest_common(ledgers: Sequence[Sequence[LedgerRecord]]) -> list[LedgerRecord] | None:
    """The newest step that is complete on every device: its record for each device.

    Returns None where no device holds a step of 1 or more: nothing of value is there. Raises
    `CorruptStateError` where steps exist but none is common.
    """
    steps = [[record.step for record in records] for records in ledgers]
    if not any(step >= 1 for own in steps for step in own):
        return None
    by_device = [{record.step_id: record for record in records} for records in ledgers]
    common = set(by_device[0]).intersection(*by_device[1:])
    if not common:
        raise CorruptStateError(
            f"no step is complete on every device: the ledgers hold steps {steps}, in order of "
            "the devices. Expected one step common to all; check that every directory belongs to "
            "this run and that none was replaced"
        )
    newest = max(common)
    return [records[newest] for records in by_device]
