"""Snapshots of a whole set: on every device or on none, and the room that they need."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from smart_infinity import snapshots as of_set
from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    DeviceIOError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.storage import blockfile, snapshots
from smart_infinity.storage.ledger import newest_common
from smart_infinity.storage.snapshots import Snapshots, check_name
from stores import THEM, US, Kept, flip, layout_of, tree

PARTS = ["blob", "record", "snapshot.json", "state"]


@pytest.fixture(params=[False, True], ids=["beside", "in_place"])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Kept]]:
    """A set of three at step 2."""
    layout = layout_of(3)
    three = [
        Kept(tmp_path / str(device), in_place=request.param, layout=layout, device=device)
        for device in range(3)
    ]
    for own in three:
        own.write(1)
        own.write(2, indices=range(0, 7, 2))
    yield three
    for own in three:
        own.store.close()


def keepers(three: list[Kept]) -> list[Snapshots]:
    return [own.snapshots for own in three]


def listed(three: list[Kept]) -> list[str]:
    return [own.name for own in of_set.complete(keepers(three))]


def left_behind(three: list[Kept]) -> list[str]:
    roots = [own.path / "snapshots" for own in three]
    return [name for root in roots if root.exists() for name in os.listdir(root)]


# --- names and room ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "step-12", "A.b_c-d", "0", "x" * 100])
def test_good_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "_a", "a/b", "a b", "a\n", "ä", "x" * 101, "a\0", 3, None]
)
def test_bad_names_are_refused(name: object) -> None:
    with pytest.raises(StateMismatchError, match="1 to 100 letters"):
        check_name(name)  # type: ignore[arg-type]


def test_a_snapshot_takes_no_more_than_it_says(three: list[Kept]) -> None:
    of_set.take(keepers(three), "one")
    used = sum(os.stat(three[0].path / "snapshots/one" / p).st_blocks * 512 for p in PARTS)
    assert three[0].store.state_nbytes < used <= three[0].snapshots.needed_nbytes()


def test_without_room_a_snapshot_is_refused(
    three: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = three[0].snapshots.needed_nbytes()
    monkeypatch.setattr(snapshots, "free_nbytes", lambda directory: needed - 1)
    with pytest.raises(DeviceFullError, match=f"needs {needed} .* and {needed - 1} are") as caught:
        three[0].snapshots.require_room("one", needed)
    assert str(three[0].path) in str(caught.value)
    three[0].snapshots.require_room("one", needed - 1)
    assert not (three[0].path / "snapshots").exists()


def test_a_name_that_is_taken_is_refused(three: list[Kept]) -> None:
    of_set.take(keepers(three), "one")
    with pytest.raises(StateExistsError, match="'one' already"):
        three[0].snapshots.require_room("one", 0)
    three[0].snapshots.copy("one", "other", "later")
    with pytest.raises(DeviceIOError, match="rename"):
        three[0].snapshots.publish("one")
    three[0].snapshots.check("one")


def test_devices_on_one_file_system_need_room_for_all(
    three: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(own.snapshots.needed_nbytes() for own in three)
    monkeypatch.setattr(snapshots, "free_nbytes", lambda directory: needed - 1)
    with pytest.raises(DeviceFullError, match=str(needed)) as caught:
        of_set.take(keepers(three), "one")
    assert "nothing was left behind" in str(caught.value)
    assert left_behind(three) == []
    monkeypatch.setattr(snapshots, "free_nbytes", lambda directory: needed)
    of_set.take(keepers(three), "one")
    assert listed(three) == ["one"]


# --- on every device or on none ------------------------------------------------------------------


def test_taken_listed_found_checked_removed(three: list[Kept]) -> None:
    for name in ("b", "a", "c"):
        of_set.take(keepers(three), name)
    assert listed(three) == ["b", "a", "c"]
    found = of_set.find(keepers(three), "a")
    assert (found.name, found.step, found.attempt) == ("a", 2, US.hex())
    assert len({own.snapshots.whole()[1].identity for own in three}) == 1
    of_set.check(keepers(three), "a")
    of_set.remove(keepers(three), "b")
    assert listed(three) == ["a", "c"]
    with pytest.raises(StateMismatchError, match=r"no snapshot 'b'.*'a \(step 2\)', 'c"):
        of_set.find(keepers(three), "b")
    with pytest.raises(StateExistsError):
        of_set.take(keepers(three), "a")


@pytest.mark.parametrize("stage", ["copy", "publish"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [DeviceIOError("d", "p", "write", 0, 5), KeyboardInterrupt()])
def test_what_fails_on_one_device_is_left_on_none(
    three: list[Kept],
    stage: str,
    failing: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = [tree(own.path) for own in three]

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(three[failing].snapshots, stage, fail)
        with pytest.raises(type(error)):
            of_set.take(keepers(three), "one")
    assert left_behind(three) == []
    assert [tree(own.path) for own in three] == before
    of_set.take(keepers(three), "one")


def test_a_step_whose_blob_is_damaged_is_not_kept(three: list[Kept]) -> None:
    flip(three[1].path / f"blob.{three[1].store.record.blob_place}", 3)
    with pytest.raises(CorruptStateError, match="blob"):
        of_set.take(keepers(three), "one")
    assert left_behind(three) == []


def test_a_snapshot_on_some_devices_is_none_and_its_name_is_free(three: list[Kept]) -> None:
    """Killed between publishing on the devices."""
    for own in three[:2]:
        own.snapshots.copy("one", "torn", "2026-01-01")
        own.snapshots.publish("one")
    three[2].snapshots.copy("one", "torn", "2026-01-01")
    assert listed(three) == []
    with pytest.raises(StateMismatchError, match="whole on every device"):
        of_set.check(keepers(three), "one")
    of_set.take(keepers(three), "one")
    of_set.check(keepers(three), "one")


def test_equal_names_of_different_snapshots_are_none(three: list[Kept]) -> None:
    for number, own in enumerate(three):
        own.snapshots.copy("one", str(number > 0), "2026-01-01")
        own.snapshots.publish("one")
    assert listed(three) == []


def test_damage_on_any_device_is_found_by_a_check(three: list[Kept]) -> None:
    of_set.take(keepers(three), "one")
    flip(three[2].path / "snapshots/one/state", 0)
    with pytest.raises(CorruptStateError, match="state record 0") as caught:
        of_set.check(keepers(three), "one")
    assert str(three[2].path) in str(caught.value)


# --- going back ----------------------------------------------------------------------------------


def test_a_set_goes_back_together(three: list[Kept]) -> None:
    of_set.take(keepers(three), "two")
    expected = [dict(own.expected) for own in three]
    for own in three:
        own.write(3)
        own.write(4)
    of_set.restore(keepers(three), "two", 0)
    records = newest_common([own.store.ledger_contents() for own in three])
    assert len({own.step_id for own in records}) == 1
    assert records[0].step_id[:2] == (1, 2)
    for own, held in zip(three, expected, strict=True):
        own.assert_holds(expected=held)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("stage", ["load", "finish"])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_crash_between_devices_keeps_the_old_step_or_stays_refused(
    three: list[Kept], stage: str, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_set.take(keepers(three), "two")
    at_two = [dict(own.expected) for own in three]
    for own in three:
        own.write(3, indices=range(5))

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        for own in three[done:]:
            patch.setattr(own.snapshots, stage, die)
        with pytest.raises(Killed):
            of_set.restore(keepers(three), "two", 0)
    in_place = three[0].store.in_place
    ledgers = [own.store.ledger_contents() for own in three]
    if in_place and not (stage == "load" and done == 0):
        with pytest.raises(CorruptStateError, match="middle of step 2"):
            newest_common(ledgers)
        for own, ledger in zip(three, ledgers, strict=True):
            own.store.settle(ledger.records[0])
    else:
        records = newest_common(ledgers)
        assert {own.step_id for own in records} == {(0, 3, US)}
        for own, record in zip(three, records, strict=True):
            own.assert_holds(record)
            own.store.settle(record)
    newest = max(record.branch for ledger in ledgers for record in ledger.records)
    of_set.restore(keepers(three), "two", newest)
    records = newest_common([own.store.ledger_contents() for own in three])
    for own, record, held in zip(three, records, at_two, strict=True):
        own.assert_holds(record, held)


def test_a_failed_copy_keeps_the_old_step_or_stays_refused(
    three: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any copy that fails, on whichever device it is."""
    of_set.take(keepers(three), "two")
    for own in three:
        own.write(3)
    real, lock = os.copy_file_range, threading.Lock()
    for failing in range(0, 21, 4):
        calls = iter(range(1000))

        def fail(*arguments: int, failing: int = failing, calls=calls) -> int:
            with lock:
                number = next(calls)
            if number == failing:
                raise OSError(5, "Input/output error")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(blockfile.os, "copy_file_range", fail)
            with pytest.raises(DeviceIOError, match="copy of"):
                of_set.restore(keepers(three), "two", failing)
        ledgers = [own.store.ledger_contents() for own in three]
        if three[0].store.in_place:
            with pytest.raises(CorruptStateError, match="middle of step 2"):
                newest_common(ledgers)
        else:
            for own, record in zip(three, newest_common(ledgers), strict=True):
                own.assert_holds(record)


def test_a_later_attempt_may_take_the_same_branch_after_settling(three: list[Kept]) -> None:
    """Out of place a restore that was cut short is given up, branch and all."""
    if three[0].store.in_place:
        pytest.skip("in place the later branch is remembered")
    of_set.take(keepers(three), "two")
    for own in three:
        own.write(3)
    for own in three:
        own.snapshots.load("two", 1)
    three[0].snapshots.finish("two", 1)
    for own, record in zip(
        three, newest_common([own.store.ledger_contents() for own in three]), strict=True
    ):
        own.store.settle(record)
        assert len(own.store.ledger_contents().records) == 1
    of_set.restore(keepers(three), "two", 0)
    records = newest_common([own.store.ledger_contents() for own in three])
    assert records[0].step_id[:2] == (1, 2)
    assert records[0].attempt != THEM
