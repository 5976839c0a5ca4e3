"""Slots and the ledger: what a directory says about itself, through torn writes and rivals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import processes
from smart_infinity.errors import (
    CorruptStateError,
    DeviceBusyError,
    DeviceIOError,
    DeviceSpecError,
    StateMismatchError,
)
from smart_infinity.layout import FORMAT_VERSION, PAGE_BYTES
from smart_infinity.storage import slots
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.ledger import Ledger, LedgerRecord, newest_common

RECORDS, PARAMETERS = 5, 3
US, THEM = b"u" * 16, b"t" * 16


def record(
    step: int, attempt: bytes = US, num_records: int = RECORDS, num_parameters: int = PARAMETERS
) -> LedgerRecord:
    rng = np.random.default_rng(step)
    return LedgerRecord(
        step,
        attempt,
        rng.integers(0, 2, num_records, np.uint8),
        rng.integers(0, 1 << 64, num_records, np.uint64),
        np.full(num_parameters, step, np.int64),
        step % 2,
        17 * step,
        int(rng.integers(0, 1 << 63)),
    )


def assert_same(actual: LedgerRecord, expected: LedgerRecord) -> None:
    assert actual.encode() == expected.encode()


def open_ledger(directory: Path) -> Ledger:
    return Ledger(BlockFile(str(directory), str(directory / "ledger"), direct=False))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger(tmp_path)
    ledger.reserve(RECORDS, PARAMETERS)
    yield ledger
    ledger.close()


def steps_of(ledger: Ledger) -> list[int]:
    return [found.step for found in ledger.read()]


# --- the ledger ----------------------------------------------------------------------------------


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    step=st.integers(0, 2**40),
    attempt=st.binary(min_size=16, max_size=16),
    num_records=st.integers(0, 3000),
    num_parameters=st.integers(0, 3000),
)
def test_what_is_written_is_read(
    tmp_path: Path, step: int, attempt: bytes, num_records: int, num_parameters: int
) -> None:
    (tmp_path / "ledger").unlink(missing_ok=True)
    ledger = open_ledger(tmp_path)
    ledger.reserve(num_records, num_parameters)
    assert ledger.read() == []
    written = record(step, attempt, num_records, num_parameters)
    ledger.write(written)
    (found,) = ledger.read()
    assert_same(found, written)
    ledger.close()


def test_an_empty_file_holds_no_step(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    assert ledger.read() == []
    ledger.close()


def test_the_last_two_steps_are_kept(ledger: Ledger) -> None:
    seen = []
    for step in range(7):
        ledger.write(record(step))
        seen.append(steps_of(ledger))
    assert seen == [[0], [1, 0], [2, 1], [3, 2], [4, 3], [5, 4], [6, 5]]


def test_settling_leaves_one_record_only(ledger: Ledger) -> None:
    ledger.write(record(4))
    ledger.write(record(5, THEM))
    ledger.settle(record(4))
    (found,) = ledger.read()
    assert_same(found, record(4))
    # The next step of the new attempt does not bring the abandoned one back.
    ledger.write(record(5, US))
    assert [found.step_id for found in ledger.read()] == [(5, US), (4, US)]


def places(path: Path) -> list[tuple[int, int]]:
    stride = path.stat().st_size // 4
    assert stride % PAGE_BYTES == 0
    return [(i * stride, (i + 1) * stride) for i in range(4)]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    length=st.integers(0, len(record(9).encode())), junk=st.integers(0, 255), copy=st.integers(0, 1)
)
def test_a_torn_write_of_one_copy_loses_nothing(
    tmp_path: Path, length: int, junk: int, copy: int
) -> None:
    """A crash while step 9 is written: any prefix of one copy, over what was there before."""
    path = tmp_path / "ledger"
    path.unlink(missing_ok=True)
    ledger = open_ledger(tmp_path)
    ledger.reserve(RECORDS, PARAMETERS)
    for step in (7, 8):
        ledger.write(record(step))
    new = record(9).encode()
    torn = bytearray(path.read_bytes())
    begin = places(path)[1 + 2 * copy][0]
    torn[begin : begin + length] = new[:length]
    if length < len(new):
        torn[begin + length] ^= junk  # and a byte of rubbish where the write stopped
    path.write_bytes(torn)
    found = ledger.read()
    # Step 8 is whole at every instant; step 9 is there once all its bytes are.
    if length == len(new):
        assert [r.step for r in found] == [9, 8, 7]
    else:
        assert [r.step for r in found] == [8, 7]
    assert_same(next(r for r in found if r.step == 8), record(8))
    ledger.close()


@pytest.mark.parametrize("copy", [0, 1])
def test_every_flipped_byte_of_a_copy_is_noticed(ledger: Ledger, tmp_path: Path, copy: int) -> None:
    path = tmp_path / "ledger"
    ledger.write(record(6))
    clean = path.read_bytes()
    begins = [places(path)[2 * i][0] for i in (0, 1)]
    size = len(record(6).encode())
    for at in range(size):
        damaged = bytearray(clean)
        damaged[begins[copy] + at] ^= 0x10
        path.write_bytes(damaged)
        (found,) = ledger.read()
        assert_same(found, record(6))  # from the other copy
        damaged[begins[1 - copy] + size - 1 - at] ^= 0x80
        path.write_bytes(damaged)
        assert ledger.read() == []


def test_both_copies_damaged_fall_back_to_the_step_before(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for step in (7, 8):
        ledger.write(record(step))
    damaged = bytearray(path.read_bytes())
    for place in (0, 2):
        damaged[places(path)[place][0] + 30] ^= 1
    path.write_bytes(damaged)
    assert steps_of(ledger) == [7]


def test_a_record_that_claims_to_be_longer_than_its_place_is_refused(
    ledger: Ledger, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    long = record(3, num_records=5000).encode()
    path.write_bytes(long[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))
    assert ledger.read() == []


# --- the newest step of a set --------------------------------------------------------------------


def test_nothing_of_value() -> None:
    assert newest_common([[]]) is None
    assert newest_common([[record(0)], []]) is None
    assert newest_common([[record(0)], [record(0, THEM)]]) is None


def test_the_newest_step_that_every_device_has() -> None:
    common = newest_common([[record(6), record(5)], [record(5), record(4)], [record(6), record(5)]])
    assert common is not None
    assert [found.step_id for found in common] == [(5, US)] * 3


def test_the_same_step_of_an_abandoned_attempt_is_another_step() -> None:
    # Device 0 committed step 6 of an attempt that died; device 1 holds step 6 of the next one.
    common = newest_common([[record(6, THEM), record(5)], [record(6, US), record(5)]])
    assert common is not None
    assert [found.step_id for found in common] == [(5, US)] * 2


def test_no_common_step_is_an_error_that_names_what_was_found() -> None:
    with pytest.raises(CorruptStateError, match=r"\[\[9, 8\], \[6, 5\]\]"):
        newest_common([[record(9), record(8)], [record(6), record(5)]])
    with pytest.raises(CorruptStateError):
        newest_common([[record(3)], []])
    with pytest.raises(CorruptStateError):
        newest_common([[record(3, US)], [record(3, THEM)]])


ids = st.tuples(st.integers(0, 4), st.sampled_from([US, THEM]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(ids, max_size=3), min_size=1, max_size=5))
def test_newest_common_over_any_ledgers(held: list[set[tuple[int, bytes]]]) -> None:
    ledgers = [[record(*step_id) for step_id in own] for own in held]
    shared = set.intersection(*held)
    if not any(step for own in held for step, _ in own):
        assert newest_common(ledgers) is None
    elif not shared:
        with pytest.raises(CorruptStateError):
            newest_common(ledgers)
    else:
        found = newest_common(ledgers)
        assert found is not None
        assert len({one.step_id for one in found}) == 1
        assert found[0].step_id in shared
        assert found[0].step == max(step for step, _ in shared)


@st.composite
def crashes(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Per life of the trainer: how many steps each of 3 devices committed before the kill."""
    lives = []
    for _ in range(draw(st.integers(1, 4))):
        whole = draw(st.integers(0, 3))
        extra = draw(st.lists(st.integers(0, 1), min_size=3, max_size=3))
        lives.append(([whole + one for one in extra], draw(st.integers(0, 3))))
    return lives


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(crashes())
def test_no_chain_of_crashes_mixes_two_attempts(
    tmp_path: Path, lives: list[tuple[list[int], int]]
) -> None:
    """Each life recovers, settles, and commits; a device may be one step ahead when it is killed.

    A crash may also come in the middle of settling, after some of the devices.
    """
    ledgers = []
    for device in range(3):
        directory = tmp_path / str(device)
        directory.mkdir(exist_ok=True)
        (directory / "ledger").unlink(missing_ok=True)
        ledger = open_ledger(directory)
        ledger.reserve(RECORDS, PARAMETERS)
        ledger.write(record(0, b"0" * 16))
        ledgers.append(ledger)
    complete = (0, b"0" * 16)
    for number, (commits, settled) in enumerate(lives, start=1):
        attempt = bytes([number]) * 16
        found = newest_common([ledger.read() for ledger in ledgers])
        begun = complete if found is None else found[0].step_id
        assert begun == complete
        for ledger in ledgers[:settled]:
            ledger.settle(record(*begun))
        if settled < len(ledgers):
            continue  # killed while settling
        for device, count in enumerate(commits):
            for step in range(begun[0] + 1, begun[0] + 1 + count):
                ledgers[device].write(record(step, attempt))
        if min(commits):
            complete = (begun[0] + min(commits), attempt)
    for ledger in ledgers:
        ledger.close()


# --- superblock and layout -----------------------------------------------------------------------

SUPERBLOCK = slots.Superblock(FORMAT_VERSION, "some-uuid", 1, 3, "some-hash", "adamw")


def test_superblock_and_layout_round_trip(tmp_path: Path) -> None:
    assert slots.read_superblock(str(tmp_path)) is None
    slots.write_superblock(str(tmp_path), SUPERBLOCK, {"units": [1, 2]})
    assert slots.read_superblock(str(tmp_path)) == SUPERBLOCK
    assert slots.read_layout(str(tmp_path)) == {"units": [1, 2]}
    assert sorted(os.listdir(tmp_path)) == ["layout.json", "superblock.json"]
    slots.write_superblock(str(tmp_path), replace(SUPERBLOCK, device_index=2), {})
    assert slots.read_superblock(str(tmp_path)) == replace(SUPERBLOCK, device_index=2)


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    slots.write_superblock(str(tmp_path), replace(SUPERBLOCK, format_version=99), {})
    with pytest.raises(StateMismatchError, match="version 99") as caught:
        slots.read_superblock(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "resume=False" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"format_version": 1}',
        b'{"format_version": 1, "surprise": 2}',
        json.dumps({"format_version": FORMAT_VERSION, "set_uuid": "x" * 9}).encode()[:-5],
    ],
)
def test_a_damaged_superblock_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "superblock.json").write_bytes(content)
    with pytest.raises(StateMismatchError, match=r"superblock\.json is damaged") as caught:
        slots.read_superblock(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_missing_or_damaged_layout_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"layout\.json .*missing"):
        slots.read_layout(str(tmp_path))
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(StateMismatchError, match=r"layout\.json is damaged"):
        slots.read_layout(str(tmp_path))


def test_an_unreadable_superblock_is_a_device_error(tmp_path: Path) -> None:
    (tmp_path / "superblock.json").mkdir()
    with pytest.raises(DeviceIOError, match=r"superblock\.json") as caught:
        slots.read_superblock(str(tmp_path))
    assert caught.value.operation == "read"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_durable_write_keeps_the_old_file(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.write_superblock(str(tmp_path), SUPERBLOCK, {})

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(slots.os, call, fail)
        with pytest.raises(DeviceIOError, match="errno 5"):
            slots.write_superblock(str(tmp_path), replace(SUPERBLOCK, device_index=2), {"a": 1})
    assert slots.read_superblock(str(tmp_path)) == SUPERBLOCK
    assert slots.read_layout(str(tmp_path)) == {}
    assert sorted(os.listdir(tmp_path)) == ["layout.json", "superblock.json"]


def test_discard_removes_only_our_files(tmp_path: Path) -> None:
    foreign = ["lost+found/inode", "state.2", "blob", "notes.txt", "superblock.json.bak", "lock"]
    (tmp_path / "lost+found").mkdir()
    ours = [*slots.OUR_FILES, "superblock.json.tmp", "layout.json.tmp"]
    for name in [*foreign, *ours]:
        (tmp_path / name).write_text(name)
    for _ in range(2):
        slots.discard(str(tmp_path))
        left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        assert left == sorted(foreign)
    for name in foreign:
        assert (tmp_path / name).read_text() == name


# --- the lock ------------------------------------------------------------------------------------

HOLD = """
import os
from smart_infinity.storage.slots import DeviceLock
lock = DeviceLock(sys.argv[1])
print("held", flush=True)
"""


def assert_busy(directory: Path) -> None:
    with pytest.raises(DeviceBusyError, match="in use") as caught:
        slots.DeviceLock(str(directory))
    assert str(directory) in str(caught.value)


def assert_free(directory: Path) -> None:
    slots.DeviceLock(str(directory)).release()


def test_a_second_lock_in_this_process_is_refused(tmp_path: Path) -> None:
    lock = slots.DeviceLock(str(tmp_path))
    assert_busy(tmp_path)
    lock.release()
    lock.release()
    assert_free(tmp_path)


def test_a_lock_that_is_forgotten_is_dropped(tmp_path: Path) -> None:
    lock = slots.DeviceLock(str(tmp_path))
    del lock
    assert_free(tmp_path)


def test_another_process_is_refused_and_kill_9_frees(tmp_path: Path) -> None:
    with processes.start(HOLD + "sys.stdin.read()", tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert_busy(tmp_path)
        holder.kill()
        assert holder.wait() == -signal.SIGKILL
        assert_free(tmp_path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A DataLoader worker outlives the trainer that was killed."""
    script = """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    print("child", flush=True)
    os.read(reading, 1)  # until the test closes stdin, long after the trainer died
    sys.stdin.read()
    print("child lived on", flush=True)
    os._exit(0)
sys.stdout.flush()
os.close(reading)
os.kill(os.getpid(), 9)
"""
    with processes.start(HOLD + script, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.wait() == -signal.SIGKILL
        assert sorted([holder.stdout.readline(), holder.stdout.readline()]) == ["child\n", "held\n"]
        assert_free(tmp_path)  # and the child still runs:
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.stdout.readline() == "child lived on\n"


def test_a_child_that_ends_does_not_free_the_parents_lock(tmp_path: Path) -> None:
    script = """
child = os.fork()
if child == 0:
    sys.exit(0)  # with all its finalizers
assert os.waitpid(child, 0)[1] == 0
print("waited", flush=True)
sys.stdin.read()
"""
    with processes.start(HOLD + script, tmp_path) as holder:
        assert holder.stdout is not None
        assert [holder.stdout.readline(), holder.stdout.readline()] == ["held\n", "waited\n"]
        assert_busy(tmp_path)
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait() == 0
        assert_free(tmp_path)


def test_a_directory_without_a_place_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(DeviceSpecError, match="cannot create its lock file"):
        slots.DeviceLock(str(tmp_path / "absent"))
