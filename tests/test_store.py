"""A device's files: made, committed, reopened, damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from smart_infinity.errors import CorruptStateError, DeviceIOError
from smart_infinity.storage import blockfile, slots
from smart_infinity.storage.blockfile import observing
from smart_infinity.storage.store import Store
from stores import THEM, Kept, flip, layout_of, tree


@pytest.fixture(params=[False, True], ids=["beside", "in_place"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path, in_place=request.param)
    yield kept
    kept.store.close()


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.store.close()


# --- steps ---------------------------------------------------------------------------------------


def test_all_files_are_made_and_reserved_at_once(kept: Kept) -> None:
    states = ["state.0"] if kept.store.in_place else ["state.0", "state.1"]
    assert sorted(os.listdir(kept.path)) == ["blob.0", "blob.1", "ledger", *states]
    for name in states:
        status = os.stat(kept.path / name)
        assert status.st_size == kept.store.state_nbytes == kept.layout.state_nbytes(0)
        assert status.st_blocks * 512 >= status.st_size
    kept.store.reserve_blob(5000)
    for name in slots.BLOB:
        assert os.stat(kept.path / name).st_blocks * 512 >= 10_000


def test_each_step_is_what_was_written_and_the_one_before_is_still_there(kept: Kept) -> None:
    for step, indices in enumerate([None, range(0, 21, 2), [], [20], None], start=1):
        before, record = dict(kept.expected), kept.store.record
        kept.write(step, indices=indices)
        assert kept.store.record.step_id == (0, step, b"u" * 16)
        if indices != []:
            kept.assert_holds()
        if not kept.store.in_place and step > 1 and before[0] == record.step:
            kept.assert_holds(record, before)
        newest = kept.store.ledger_contents().records[0]
        assert newest.encode() == kept.store.record.encode()
    assert (kept.path / "state.1").exists() != kept.store.in_place


def test_a_step_is_durable_before_the_ledger_says_so(kept: Kept) -> None:
    """Every file that was written is synced between its last write and the ledger's first."""
    log: list[tuple[str, bool]] = []
    with observing(lambda path, offset, _: log.append((os.path.basename(path), offset is None))):
        kept.write(1)
    commits = [at for at, (name, _) in enumerate(log) if name == "ledger"]
    first = commits[3] if kept.store.in_place else commits[0]  # after the mark: two copies, a sync
    assert log[commits[-1]] == ("ledger", True)
    if kept.store.in_place:
        assert log[:3] == [("ledger", False), ("ledger", False), ("ledger", True)]
    for name in {name for name, _ in log} - {"ledger"}:
        own = [at for at, (other, _) in enumerate(log) if other == name]
        assert log[own[-1]] == (name, True)
        assert own[-1] < first


def test_an_uncommitted_step_leaves_the_last_one_whole(beside: Kept) -> None:
    beside.write(1)
    beside.write(2, THEM, commit=False)
    again = beside.reopened()
    again.assert_holds()
    assert again.store.record.step == 1
    again.write(2)
    again.assert_holds()
    again.store.close()


def test_an_uncommitted_step_in_place_is_marked(tmp_path: Path) -> None:
    kept = Kept(tmp_path, in_place=True)
    kept.write(1)
    kept.write(2, commit=False)
    newest, before = kept.store.ledger_contents().records
    assert (newest.step, newest.dirty, before.step, before.dirty) == (2, True, 1, False)
    kept.store.close()


def test_amending_replaces_the_blob_only(kept: Kept) -> None:
    kept.write(1)
    step = kept.store.record
    for number, blob in enumerate([b"a" * 5000, b"b", b"c" * 70], start=1):
        kept.store.amend(blob)
        record = kept.store.record
        assert (record.amendment, record.step_id) == (number, step.step_id)
        assert kept.store.read_blob(record) == blob
        np.testing.assert_array_equal(record.checksums, step.checksums)
        np.testing.assert_array_equal(record.places, step.places)
    again = kept.reopened()
    assert again.store.read_blob(again.store.record) == b"c" * 70
    again.write(2)
    assert again.store.record.amendment == 0
    newest, before = again.store.ledger_contents().clean()[0], record
    assert again.store.read_blob(newest) == again.blob(2)
    assert again.store.read_blob(before) == b"c" * 70
    again.store.close()


def test_an_amendment_is_durable_in_its_own_file_first(beside: Kept) -> None:
    beside.write(1)
    used = slots.BLOB[beside.store.record.blob_place]
    log: list[tuple[str, bool]] = []
    with observing(lambda path, offset, _: log.append((os.path.basename(path), offset is None))):
        beside.store.amend(b"new")
    other = "blob.0" if used == "blob.1" else "blob.1"
    assert log == [(other, False), (other, True), *[("ledger", False), ("ledger", True)] * 2]


@pytest.mark.parametrize("failing", ["state", "blob", "ledger"])
def test_a_failed_sync_commits_nothing(
    beside: Kept, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        beside.write(step)
    record, ledger = beside.store.record, (beside.path / "ledger").read_bytes()
    place = {"state": 1 - record.places[0], "blob": 1 - record.blob_place}.get(failing)
    name = failing if place is None else f"{failing}.{place}"
    real, inode = os.fdatasync, os.stat(beside.path / name).st_ino

    def fail(fd: int) -> None:
        if os.fstat(fd).st_ino == inode:
            raise OSError(5, "Input/output error")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(blockfile.os, "fdatasync", fail)
        with pytest.raises(DeviceIOError, match=rf"sync of .*{name}"):
            beside.write(3)
    assert beside.store.record is record
    beside.assert_holds()
    if failing != "ledger":
        assert (beside.path / "ledger").read_bytes() == ledger
        beside.reopened().assert_holds()


def test_a_device_without_records_has_steps_too(tmp_path: Path) -> None:
    layout = layout_of(num_devices=16, numel=5000)
    idle = next(plan.index for plan in layout.devices if not plan.records)
    kept = Kept(tmp_path, layout=layout, device=idle)
    kept.write(1)
    again = kept.reopened()
    assert again.store.record.step == 1
    again.assert_holds()
    again.snapshots.copy("one", "identity", "now")
    again.snapshots.publish("one")
    again.write(2)
    again.snapshots.check("one")
    again.snapshots.load("one", 1)
    again.snapshots.finish("one", 1)
    assert again.store.read_blob(again.store.record) == again.blob(1)
    again.store.close()


def test_a_full_disk_is_found_out_when_files_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = Store(str(tmp_path), layout_of(), 0, direct=False)
    with pytest.raises(DeviceIOError, match="reserve") as caught:
        store.create(in_place=False)
    assert caught.value.operation == "reserve"
    store.close()
    store.close()


# --- opening -------------------------------------------------------------------------------------


def test_a_reopened_store_goes_on(kept: Kept) -> None:
    for step in (1, 2):
        kept.write(step)
    again = kept.reopened()
    assert again.store.in_place == kept.store.in_place
    again.assert_holds()
    again.write(3, THEM)
    again.assert_holds()
    again.store.close()


def test_a_missing_state_file_is_refused_by_name(kept: Kept) -> None:
    kept.write(1)
    kept.store.close()
    (kept.path / "state.0").unlink()
    with pytest.raises(CorruptStateError, match=r"state\.0 is missing") as caught:
        kept.reopened()
    assert str(kept.path) in str(caught.value)
    assert str(kept.store.state_nbytes) in str(caught.value)


def test_a_missing_second_place_is_refused_if_state_was_in_it(beside: Kept) -> None:
    beside.write(1, indices=[3])
    beside.store.close()
    (beside.path / "state.1").unlink()
    with pytest.raises(CorruptStateError, match=r"state\.1 is missing"):
        beside.reopened(in_place=False)
    assert not (beside.path / "state.1").exists()


@pytest.mark.parametrize("in_place", [False, True, None])
def test_a_second_place_without_state_is_reserved_where_it_is_needed(
    tmp_path: Path, in_place: bool | None
) -> None:
    kept = Kept(tmp_path, in_place=True)
    kept.write(1)
    again = kept.reopened(in_place=in_place)
    assert again.store.in_place == (in_place is not False)
    assert (tmp_path / "state.1").exists() == (in_place is False)
    again.write(2)
    again.assert_holds()
    again.store.close()


def test_a_second_place_for_which_there_is_no_room_leaves_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """durability="none", resumed with "step" on a full disk: it must go on with "none"."""
    kept = Kept(tmp_path, in_place=True)
    kept.write(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DeviceIOError, match="reserve"):
            kept.reopened(in_place=False)
    again = kept.reopened(in_place=True)
    again.assert_holds()
    again.store.close()


def test_a_second_place_that_a_crash_left_unreserved_is_no_damage(tmp_path: Path) -> None:
    """Killed between making the file and reserving it: no state is in it yet."""
    kept = Kept(tmp_path, in_place=True)
    kept.write(1)
    kept.store.close()
    (tmp_path / "state.1").touch()
    again = kept.reopened(in_place=False)
    again.assert_holds()
    again.write(2)
    again.assert_holds()
    again.store.close()


@pytest.mark.parametrize("name", slots.STATE)
def test_a_state_file_that_was_cut_is_refused_by_name(beside: Kept, name: str) -> None:
    beside.write(1, indices=range(10))
    beside.store.close()
    os.truncate(beside.path / name, beside.store.state_nbytes - 1)
    before = tree(beside.path)
    with pytest.raises(CorruptStateError, match=name) as caught:
        beside.reopened()
    assert str(beside.path) in str(caught.value)
    after = tree(beside.path)
    assert all(after[own] == data for own, data in before.items() if own != name)


@pytest.mark.parametrize("name", ["ledger", "blob.0", "blob.1"])
def test_another_missing_file_is_an_error_that_names_it(beside: Kept, name: str) -> None:
    beside.store.close()
    (beside.path / name).unlink()
    with pytest.raises((DeviceIOError, CorruptStateError), match=name):
        beside.reopened()


def test_without_a_ledger_there_are_no_steps(tmp_path: Path) -> None:
    store = Store(str(tmp_path), layout_of(), 0, direct=False)
    assert store.ledger_contents().records == []
    assert os.listdir(tmp_path) == []


def test_reading_only_changes_nothing(kept: Kept) -> None:
    kept.write(1)
    kept.store.close()
    before = tree(kept.path)
    again = Kept(kept.path, is_new=False, mode="r")
    again.store.open()
    again.expected = kept.expected
    again.assert_holds(again.store.ledger_contents().records[0])
    with pytest.raises(DeviceIOError):
        again.store.settle(again.store.ledger_contents().records[0])
    again.store.close()
    assert tree(kept.path) == before


def test_reading_only_does_without_direct_io_where_it_is_refused(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write(1)
    kept.store.close()
    real = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", refuse_direct)
    again = Kept(kept.path, is_new=False, mode="r")
    again.store = Store(str(kept.path), kept.layout, 0, direct=True, mode="r")
    again.store.open()
    again.expected = kept.expected
    again.assert_holds(again.store.ledger_contents().records[0])
    again.store.close()
    store = Store(str(kept.path), kept.layout, 0, direct=True)
    with pytest.raises(DeviceIOError, match="open"):
        store.open()
    store.close()


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 7, 20])
def test_a_reader_gives_nothing_of_a_damaged_record(kept: Kept, index: int) -> None:
    kept.write(1)
    record = kept.store.record
    path = kept.path / f"state.{record.places[index]}"
    offset = index * kept.layout.record_stride
    size = kept.layout.record_nbytes(kept.records[index].length)
    for at in (0, size // 2, size - 1):  # the padding too
        flip(path, offset + at)
        reader = kept.store.reader(record)
        damaged = [own.index for own in kept.records if reader.read(own) is None]
        assert damaged == [index]
        flip(path, offset + at)
    kept.assert_holds()


def test_a_reader_gives_nothing_of_what_was_cut_off(kept: Kept) -> None:
    kept.write(1)
    record = kept.store.record
    os.truncate(kept.path / f"state.{record.places[0]}", 7 * kept.layout.record_stride + 4096)
    reader = kept.store.reader(record)
    lost = [own.index for own in kept.records if reader.read(own) is None]
    assert lost == list(range(7, 21))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_blob_is_refused_by_name_and_step(kept: Kept, damage: str) -> None:
    kept.write(1)
    place = kept.store.record.blob_place
    path = kept.path / f"blob.{place}"
    if damage == "flipped":
        flip(path, len(kept.blob(1)) - 1)
    else:
        os.truncate(path, 0 if damage == "empty" else len(kept.blob(1)) - 1)
    with pytest.raises(
        CorruptStateError, match=rf"blob\.{place} differs from what step 1"
    ) as caught:
        kept.store.read_blob(kept.store.record)
    assert str(kept.path) in str(caught.value)
