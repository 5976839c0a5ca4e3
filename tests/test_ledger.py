"""The ledger: which step is complete, through torn writes, damage, and amendments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ledgers import PARAMETERS, RECORDS, THEM, US, Drive, assert_same, contents, open_ledger, record
from smart_infinity.errors import CorruptStateError
from smart_infinity.layout import PAGE_BYTES
from smart_infinity.storage.ledger import Ledger, newest_common, record_nbytes

many = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger(tmp_path)
    ledger.reserve(RECORDS, PARAMETERS)
    yield ledger
    ledger.close()


def steps_of(ledger: Ledger) -> list[int]:
    return [found.step for found in ledger.read().records]


def places(path: Path) -> list[tuple[int, int]]:
    stride = path.stat().st_size // 4
    assert stride % PAGE_BYTES == 0
    return [(i * stride, (i + 1) * stride) for i in range(4)]


# --- writing and reading -------------------------------------------------------------------------


@many
@given(
    step=st.integers(0, 2**40),
    attempt=st.binary(min_size=16, max_size=16),
    num_records=st.integers(0, 3000),
    num_parameters=st.integers(0, 3000),
    branch=st.integers(0, 2**40),
    amendment=st.integers(0, 2**40),
    dirty=st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path: Path,
    step: int,
    attempt: bytes,
    num_records: int,
    num_parameters: int,
    branch: int,
    amendment: int,
    dirty: bool,
) -> None:
    (tmp_path / "ledger").unlink(missing_ok=True)
    ledger = open_ledger(tmp_path)
    ledger.reserve(num_records, num_parameters)
    assert ledger.read() == contents()
    written = record(
        step, attempt, num_records, num_parameters, branch=branch, amendment=amendment, dirty=dirty
    )
    assert len(written.encode()) == record_nbytes(num_records, num_parameters)
    ledger.settle(written)
    found = ledger.read()
    assert_same(found.records, [written])
    assert found.damage == []
    assert found.clean() == ([] if dirty else found.records)
    ledger.close()


def test_an_empty_file_holds_no_step(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    assert ledger.read() == contents()
    ledger.close()


def test_the_last_two_steps_are_kept(ledger: Ledger) -> None:
    seen = []
    for step in range(7):
        ledger.write(record(step))
        seen.append(steps_of(ledger))
    assert seen == [[0], [1, 0], [2, 1], [3, 2], [4, 3], [5, 4], [6, 5]]
    assert ledger.read().damage == []


def test_successive_records_go_to_alternate_pairs(ledger: Ledger, tmp_path: Path) -> None:
    for step in range(5):
        before = (tmp_path / "ledger").read_bytes()
        ledger.write(record(step))
        after = (tmp_path / "ledger").read_bytes()
        same = [before[a:b] == after[a:b] for a, b in places(tmp_path / "ledger")]
        assert same == [step % 2 == 1, step % 2 == 0] * 2


def test_settling_leaves_one_record_only(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write(record(4))
    ledger.write(record(5, THEM))
    ledger.settle(record(4))
    assert_same(ledger.read().records, [record(4)])
    own = record(4).encode()
    data = (tmp_path / "ledger").read_bytes()
    assert all(data[a : a + len(own)] == own for a, _ in places(tmp_path / "ledger"))
    # The next step of the new attempt does not bring the abandoned one back.
    ledger.write(record(5, US))
    assert [found.step_id for found in ledger.read().records] == [(0, 5, US), (0, 4, US)]


# --- torn writes ---------------------------------------------------------------------------------


@many
@given(
    length=st.integers(0, len(record(9).encode())), junk=st.integers(0, 255), copy=st.integers(0, 1)
)
@example(length=172, junk=106, copy=0)
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
    begin = places(path)[2 * copy][0]  # step 8 went to the odd pair
    torn[begin : begin + length] = new[:length]
    if length < len(new):
        torn[begin + length] ^= junk  # and a byte of rubbish where the write stopped
    path.write_bytes(torn)
    found = ledger.read()
    # Step 8 is whole at every instant; step 9 is there once all its bytes are, and until both
    # copies are, step 7 has one.
    # (One byte of rubbish in 256 is the byte that was missing.)
    if torn[begin : begin + len(new)] == new:
        assert_same(found.records, [record(9), record(8), record(7)])
    else:
        assert_same(found.records, [record(8), record(7)])
    ledger.close()


@many
@given(
    st.lists(st.sampled_from(["write", "write", "amend", "settle"]), max_size=6),
    st.sampled_from(["write", "amend", "settle"]),
    st.integers(0, 8),
    st.integers(0, 2**32),
    st.sampled_from([RECORDS, 700]),
)
def test_power_lost_at_any_instant_keeps_the_committed_step(
    tmp_path: Path, before: list[str], last: str, instant: int, seed: int, num_records: int
) -> None:
    """Any sectors of what was not synced may be missing: the old step, the new one, no third."""
    with Drive(tmp_path, num_records) as drive:
        current = record(0, num_records=num_records)
        drive.ledger.write(current)

        def act(what: str) -> None:
            nonlocal current
            if what == "write":
                current = record(current.step + 1, num_records=num_records)
                drive.ledger.write(current)
            elif what == "amend":
                current = replace(current, amendment=current.amendment + 1, blob_checksum=seed)
                drive.ledger.amend(current)
            else:
                drive.ledger.settle(current)

        for what in before:
            act(what)
        old, begun = current, len(drive.log)
        act(last)
        found = drive.after_power_loss(min(begun + instant, len(drive.log)), seed)
        newest = found.records[0]
        if begun + instant >= len(drive.log):
            assert_same([newest], [current])
        else:
            assert newest.encode() in (old.encode(), current.encode())
        if last != "write":  # the step itself never moves, only its amendment does
            assert newest.step_id == old.step_id


def test_settling_over_a_torn_amendment_is_safe_too(tmp_path: Path) -> None:
    """Its two copies differ then, and the whole one must survive."""
    old, new = record(5, num_records=700), record(5, num_records=700, amendment=1)
    for copy in range(2):
        for seed in range(30):
            with Drive(tmp_path, 700) as drive:
                for one in (record(3, num_records=700), record(4, num_records=700), old):
                    drive.ledger.write(one)
                drive.overwrite(2 * copy, new)
                assert_same(drive.ledger.read().records[:1], [new])
                begun = len(drive.log)
                drive.ledger.settle(new)
                for instant in range(begun, len(drive.log) + 1):
                    found = drive.after_power_loss(instant, seed)
                    assert_same(found.records[:1], [new])


# --- amendments ----------------------------------------------------------------------------------


def test_an_amendment_replaces_the_newest_record_only(ledger: Ledger) -> None:
    for step in (6, 7):
        ledger.write(record(step))
    for amendment in (1, 2, 3):
        ledger.amend(record(7, amendment=amendment))
        assert_same(ledger.read().records, [record(7, amendment=amendment), record(6)])
    ledger.write(record(8))
    assert_same(ledger.read().records, [record(8), record(7, amendment=3)])
    ledger.write(record(9))
    assert_same(ledger.read().records, [record(9), record(8)])


def test_an_amendment_after_settling_survives_the_next_write(ledger: Ledger) -> None:
    ledger.write(record(6))
    ledger.settle(record(6))
    ledger.amend(record(6, amendment=1))
    assert_same(ledger.read().records, [record(6, amendment=1)])
    ledger.write(record(7))
    assert_same(ledger.read().records, [record(7), record(6, amendment=1)])


def test_each_copy_of_an_amendment_is_synced_before_the_other_is_written(tmp_path: Path) -> None:
    with Drive(tmp_path, RECORDS) as drive:
        drive.ledger.write(record(1))
        begun = len(drive.log)
        drive.ledger.amend(record(1, amendment=1))
        assert [offset is None for offset, _ in drive.log[begun:]] == [False, True, False, True]


def test_of_two_amendments_the_highest_is_read_wherever_it_lies(tmp_path: Path) -> None:
    for high in range(4):
        with Drive(tmp_path, RECORDS) as drive:
            drive.ledger.settle(record(5, amendment=3))
            drive.overwrite(high, record(5, amendment=4))
            assert_same(drive.ledger.read().records, [record(5, amendment=4)])


def test_devices_with_different_amendments_share_the_step() -> None:
    found = newest_common(
        [
            contents(record(5, amendment=2), record(4)),
            contents(record(5), record(4, amendment=7)),
            contents(record(6, THEM), record(5, amendment=1)),
        ]
    )
    assert_same(found, [record(5, amendment=2), record(5), record(5, amendment=1)])


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [0, 1])
def test_every_flipped_byte_of_a_copy_is_noticed(ledger: Ledger, tmp_path: Path, copy: int) -> None:
    path = tmp_path / "ledger"
    ledger.settle(record(6))
    ledger.write(record(7))
    clean = path.read_bytes()
    begins = [places(path)[2 * i][0] for i in (0, 1)]
    size = len(record(7).encode())
    for at in range(size):
        damaged = bytearray(clean)
        damaged[begins[copy] + at] ^= 0x10
        path.write_bytes(damaged)
        found = ledger.read()
        assert_same(found.records, [record(7), record(6)])  # from the other copy
        assert found.damage == [f"copy {copy} of pair 0 in the ledger is damaged"]
        damaged[begins[1 - copy] + size - 1 - at] ^= 0x80
        path.write_bytes(damaged)
        assert_same(ledger.read().records, [record(6)])


def test_damage_names_each_copy_and_pair(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for step in (7, 8):
        ledger.write(record(step))
    whole = path.read_bytes()
    for bad in range(1, 15):
        damaged = bytearray(whole)
        numbers = [place for place in range(4) if bad >> place & 1]
        for place in numbers:
            damaged[places(path)[place][0] + 30] ^= 1
        path.write_bytes(damaged)
        assert ledger.read().damage == [
            f"copy {place // 2} of pair {place % 2} in the ledger is damaged" for place in numbers
        ]


def test_both_copies_damaged_fall_back_to_the_step_before(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for step in (7, 8):
        ledger.write(record(step))
    damaged = bytearray(path.read_bytes())
    for place in (1, 3):
        damaged[places(path)[place][0] + 30] ^= 1
    path.write_bytes(damaged)
    assert steps_of(ledger) == [7]
    assert len(ledger.read().damage) == 2


def test_a_ledger_cut_anywhere_gives_what_is_left_of_it(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for step in (7, 8):
        ledger.write(record(step))
    whole, size, begins = path.read_bytes(), len(record(8).encode()), [a for a, _ in places(path)]
    lengths = {begin + extra for begin in begins for extra in (0, 1, 63, size - 1, size, size + 1)}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        left = [place for place in range(4) if begins[place] + size <= length]
        expected = [record(step) for step in (8, 7) if {8: 1, 7: 0}[step] in left]
        found = ledger.read()
        assert_same(found.records, expected)
        lost = [place for place in range(4) if place not in left] if left else []
        assert found.damage == [
            f"copy {place // 2} of pair {place % 2} in the ledger is cut off" for place in lost
        ]


def test_places_never_written_are_no_damage(ledger: Ledger) -> None:
    ledger.write(record(0))
    assert ledger.read().damage == []


def test_a_record_that_claims_to_be_longer_than_its_place_is_refused(
    ledger: Ledger, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    long = record(3, num_records=5000).encode()
    path.write_bytes(long[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))
    assert ledger.read().records == []


# --- the newest step of a set --------------------------------------------------------------------


def test_the_newest_step_that_every_device_has() -> None:
    common = newest_common(
        [
            contents(record(6), record(5)),
            contents(record(5), record(4)),
            contents(record(6), record(5)),
        ]
    )
    assert_same(common, [record(5)] * 3)


def test_the_same_step_of_an_abandoned_attempt_is_another_step() -> None:
    # Device 0 committed step 6 of an attempt that died; device 1 holds step 6 of the next one.
    common = newest_common(
        [contents(record(6, THEM), record(5)), contents(record(6, US), record(5))]
    )
    assert_same(common, [record(5)] * 2)


def test_no_common_step_is_an_error_that_names_what_was_found() -> None:
    with pytest.raises(CorruptStateError, match=r"\[\[9, 8\], \[6, 5\]\]"):
        newest_common([contents(record(9), record(8)), contents(record(6), record(5))])
    for ledgers in (
        [contents(record(3)), contents()],
        [contents(record(3, US)), contents(record(3, THEM))],
        [contents(record(3)), contents(record(3, branch=1))],
        [contents()],
    ):
        with pytest.raises(CorruptStateError, match="no step is complete on every device"):
            newest_common(ledgers)


def test_a_later_branch_wins_at_a_lower_step() -> None:
    held = [contents(record(2, branch=1), record(9)) for _ in range(2)]
    assert_same(newest_common(held), [record(2, branch=1)] * 2)


def test_a_crash_between_devices_that_go_back_keeps_the_old_state() -> None:
    gone, not_yet = contents(record(2, THEM, branch=1), record(9)), contents(record(9), record(8))
    for ledgers in ([gone, not_yet], [not_yet, gone], [not_yet, gone, not_yet]):
        assert_same(newest_common(ledgers), [record(9)] * len(ledgers))


ids = st.tuples(st.integers(0, 1), st.integers(0, 3), st.sampled_from([US, THEM]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(ids, max_size=3), min_size=1, max_size=5))
def test_newest_common_over_any_ledgers(held: list[set[tuple[int, int, bytes]]]) -> None:
    ledgers = [
        contents(*(record(step, attempt, branch=branch) for branch, step, attempt in own))
        for own in held
    ]
    shared = set.intersection(*held)
    if not shared:
        with pytest.raises(CorruptStateError):
            newest_common(ledgers)
    else:
        found = newest_common(ledgers)
        assert {one.step_id for one in found} == {max(shared)}
