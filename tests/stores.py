"""Stores with a known content, driven as a device drives them, but without torch and kernels."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from smart_infinity.layout import Layout, ParameterSpec, plan_layout
from smart_infinity.storage.blockfile import direct_io_refusal
from smart_infinity.storage.buffers import reserve
from smart_infinity.storage.checksums import state_checksum
from smart_infinity.storage.ledger import LedgerRecord
from smart_infinity.storage.snapshots import Snapshots
from smart_infinity.storage.store import Commit, Store

US, THEM = b"u" * 16, b"t" * 16
SET = "the-set"


def layout_of(num_devices: int = 1, numel: int = 20_500) -> Layout:
    """21 records of 1000 elements over the devices, the last of each device shorter."""
    specs = [ParameterSpec("w", (numel,), "float32")]
    return plan_layout(specs, "adamw", ("exp_avg", "exp_avg_sq"), num_devices, 1000)


class Kept:
    """A store, and what should be in it: record -> the step that wrote it last."""

    def __init__(
        self,
        directory: Path,
        *,
        in_place: bool = False,
        layout: Layout | None = None,
        device: int = 0,
        is_new: bool = True,
        mode: str = "w",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.layout = layout or layout_of()
        self.path, self.device = directory, device
        direct = direct_io_refusal(str(directory)) is None
        self.store = Store(str(directory), self.layout, device, direct=direct, mode=mode)
        self.snapshots = Snapshots(self.store, SET)
        self.records = self.layout.devices[device].records
        self.expected: dict[int, int] = {}
        if is_new:
            self.store.create(in_place=in_place)
            self.write(0)

    def payload(self, index: int, step: int) -> np.ndarray:
        """The bytes of a record as a step writes them."""
        length = self.records[index].length
        buffer = reserve(self.layout.record_nbytes(length))
        rng = np.random.default_rng([step, index, self.device])
        buffer.view(np.float32)[: 3 * length] = rng.random(3 * length, np.float32)
        return buffer

    def write(
        self,
        step: int,
        attempt: bytes = US,
        indices: Collection[int] | None = None,
        *,
        branch: int = 0,
        commit: bool = True,
    ) -> None:
        """Make a step that touches these records, or all."""
        step_id = branch, step, attempt
        if self.store.in_place and self.expected:
            self.store.mark_dirty(step_id)
        written: dict[int, tuple[int, int]] = {}
        for own in self.records:
            if indices is not None and own.index not in indices:
                continue
            place = int(self.store.record.places[own.index])
            if self.expected and not self.store.in_place:
                place = 1 - place
            data = self.payload(own.index, step)
            self.store.files[place].write_from(data, own.index * self.layout.record_stride)
            written[own.index] = place, state_checksum(data, own.length, 3)
        if commit:
            self.store.commit(Commit(step_id, self.counts(step), self.blob(step)), written)
            self.expected.update(dict.fromkeys(written, step))

    def counts(self, step: int) -> np.ndarray:
        """The step counts that a step commits."""
        return np.full(len(self.layout.parameters), step, np.int64)

    def blob(self, step: int) -> bytes:
        """What the host commits with a step: of a length that varies."""
        return f"blob of step {step}".encode() * (1 + step % 3 * 400)

    def assert_holds(
        self, record: LedgerRecord | None = None, expected: dict[int, int] | None = None
    ) -> None:
        """Whether the state of the committed step, or another, is as it was written."""
        record = record or self.store.record
        expected = self.expected if expected is None else expected
        reader = self.store.reader(record)
        assert sorted(expected) == [own.index for own in self.records]
        for own in self.records:
            found = reader.read(own)
            assert found is not None, f"record {own.index} is damaged"
            data = self.payload(own.index, expected[own.index]).view(np.float32)
            np.testing.assert_array_equal(found.reshape(-1), data[: 3 * own.length])
        step = max(expected.values(), default=record.step)
        np.testing.assert_array_equal(record.counts, self.counts(step))
        assert self.store.read_blob(record) == self.blob(step)

    def reopened(self, *, in_place: bool | None = None, settle: bool = True) -> Kept:
        """The same store after its process has ended."""
        self.store.close()
        other = Kept(self.path, layout=self.layout, device=self.device, is_new=False)
        other.expected = dict(self.expected)
        found = other.store.ledger_contents().clean()
        record = found[0] if found else None
        other.store.open(record, in_place=in_place)
        if settle:
            assert record is not None
            other.store.reserve_second_place()
            other.store.settle(record)
        return other


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def tree(directory: Path) -> dict[str, bytes]:
    """All files below a directory and their bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
