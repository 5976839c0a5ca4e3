"""Records by step, ledgers in files, and what the loss of power may leave of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smart_infinity.storage.blockfile import BlockFile, observing
from smart_infinity.storage.ledger import Ledger, LedgerContents, LedgerRecord

RECORDS, PARAMETERS = 5, 3
US, THEM = b"u" * 16, b"t" * 16
SECTOR = 512


def record(
    step: int,
    attempt: bytes = US,
    num_records: int = RECORDS,
    num_parameters: int = PARAMETERS,
    *,
    branch: int = 0,
    amendment: int = 0,
    dirty: bool = False,
) -> LedgerRecord:
    """A record that depends on its arguments only."""
    rng = np.random.default_rng([step, branch, amendment])
    return LedgerRecord(
        branch,
        step,
        attempt,
        amendment,
        dirty,
        rng.integers(0, 2, num_records, np.uint8),
        rng.integers(0, 1 << 64, num_records, np.uint64),
        np.full(num_parameters, step, np.int64),
        step % 2,
        17 * step,
        int(rng.integers(0, 1 << 63)),
    )


def contents(*records: LedgerRecord) -> LedgerContents:
    """As `Ledger.read` gives them."""
    return LedgerContents(sorted(records, key=lambda own: own.age, reverse=True), [])


def assert_same(actual: Sequence[LedgerRecord], expected: Sequence[LedgerRecord]) -> None:
    """Whether these are the same records, in the same order."""
    assert [own.encode() for own in actual] == [own.encode() for own in expected]


def open_ledger(directory: Path) -> Ledger:
    """The ledger of a directory, made if it is absent."""
    return Ledger(BlockFile(str(directory), str(directory / "ledger"), direct=False))


class Drive:
    """A new ledger on a drive that keeps account of what is durable.

    Attributes:
        log: (offset, bytes) of each write and (None, None) of each sync.
    """

    def __init__(self, directory: Path, num_records: int) -> None:
        self.path = directory / "ledger"
        self.path.unlink(missing_ok=True)
        self.ledger = open_ledger(directory)
        self.ledger.reserve(num_records, PARAMETERS)
        self.stride = self.path.stat().st_size // 4
        self.log: list[tuple[int | None, bytes | None]] = []
        self._observing = observing(self._observe)

    def _observe(self, path: str, offset: int | None, data: bytes | None) -> None:
        if path == os.fspath(self.path):
            self.log.append((offset, data))

    def overwrite(self, place: int, own: LedgerRecord) -> None:
        """Put a record at one of the four places, durably."""
        data = own.encode()
        with open(self.path, "r+b") as file:
            file.seek(place * self.stride)
            file.write(data)
        self.log += [(place * self.stride, data), (None, None)]

    def after_power_loss(self, instant: int, seed: int) -> LedgerContents:
        """What is read after a loss of power behind ``log[:instant]``.

        Of the writes since the last sync, each sector is durable or not, by the seed.
        """
        rng = np.random.default_rng(seed)
        log = self.log[:instant]
        synced = max((at for at, (offset, _) in enumerate(log) if offset is None), default=-1)
        image = bytearray(4 * self.stride)
        share = rng.random()  # also nearly all, and nearly none
        for at, (offset, data) in enumerate(log):
            if offset is None or data is None:
                continue
            for begin in range(0, len(data), SECTOR):
                if at < synced or rng.random() < share:
                    part = data[begin : begin + SECTOR]
                    image[offset + begin : offset + begin + len(part)] = part
        found = self.path.with_name("found")
        found.write_bytes(image)
        ledger = Ledger(BlockFile(str(found.parent), str(found), direct=False, mode="r"))
        try:
            return ledger.read()
        finally:
            ledger.close()

    def __enter__(self) -> Drive:
        self._observing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._observing.__exit__(None, None, None)
        self.ledger.close()
