"""What a set's ledgers say after a crash at any instant: the right step, or a refusal."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledgers import PARAMETERS, RECORDS, THEM, Drive, assert_same, contents, open_ledger, record
from smart_infinity.errors import CorruptStateError
from smart_infinity.storage.ledger import Ledger, LedgerContents, LedgerRecord, newest_common

many = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# --- out of place --------------------------------------------------------------------------------


@st.composite
def crashes(draw: st.DrawFn) -> list[tuple[list[int], int, list[int], int]]:
    """Per life of the trainer, until it is killed, for 3 devices.

    Returns:
        How many steps each committed; on how many settling was done; on which of them the last
        step was amended; on how many going back to a snapshot was done (0: nobody tried).
    """
    lives = []
    for _ in range(draw(st.integers(1, 4))):
        whole = draw(st.integers(0, 3))
        extra = draw(st.lists(st.integers(0, 1), min_size=3, max_size=3))
        amended = draw(st.lists(st.integers(0, 2), max_size=2))
        settled = draw(st.sampled_from([0, 1, 2, 3, 3, 3]))
        lives.append(([whole + one for one in extra], settled, amended, draw(st.integers(0, 3))))
    return lives


@many
@given(crashes())
def test_no_chain_of_crashes_mixes_two_attempts_or_branches(
    tmp_path: Path, lives: list[tuple[list[int], int, list[int], int]]
) -> None:
    """Each life recovers, settles, and commits; a device may be one step ahead when it is killed.

    A crash may also come in the middle of settling, of an amendment, and of going back.
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
    complete = (0, 0, b"0" * 16)
    for number, (commits, settled, amended, gone_back) in enumerate(lives, start=1):
        attempt = bytes([number]) * 16
        found = newest_common([ledger.read() for ledger in ledgers])
        assert {own.step_id for own in found} == {complete}
        branch, begun, _ = complete
        for ledger, own in zip(ledgers[:settled], found, strict=False):
            ledger.settle(own)
        if settled < len(ledgers):
            continue  # killed while settling
        for device, count in enumerate(commits):
            for step in range(begun + 1, begun + 1 + count):
                ledgers[device].write(record(step, attempt, branch=branch))
        if min(commits):
            complete = (branch, begun + min(commits), attempt)
        if min(commits) < max(commits):
            continue  # killed in the middle of a step
        for device in amended:
            newest = ledgers[device].read().records[0]
            ledgers[device].amend(replace(newest, amendment=newest.amendment + 1))
        if gone_back and not amended:
            target = record(max(0, complete[1] - 2), attempt[::-1], branch=complete[0] + 1)
            for ledger in ledgers[:gone_back]:
                ledger.write(target)
            if gone_back == 3:
                complete = target.step_id
    for ledger in ledgers:
        ledger.close()


# --- in place ------------------------------------------------------------------------------------


def mark_of(before: LedgerRecord, after: LedgerRecord) -> LedgerRecord:
    """As `Store.mark_dirty` makes it: the old step's record with the new step's name."""
    return replace(before, branch=after.branch, step=after.step, attempt=after.attempt, dirty=True)


def make_step(ledger: Ledger, before: LedgerRecord, after: LedgerRecord) -> None:
    ledger.write(mark_of(before, after))
    ledger.write(after)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = open_ledger(tmp_path)
    ledger.reserve(RECORDS, PARAMETERS)
    return ledger


def test_a_mark_is_newer_than_the_step_before_and_older_than_its_own(ledger: Ledger) -> None:
    ledger.write(record(0))
    for step in range(1, 6):
        before, after = record(step - 1), record(step)
        ledger.write(mark_of(before, after))
        found = ledger.read()
        assert_same(found.records, [mark_of(before, after), before])
        with pytest.raises(CorruptStateError):
            newest_common([found])
        ledger.write(after)
        found = ledger.read()
        assert_same(found.records, [after, mark_of(before, after)])
        assert_same(newest_common([found]), [after])


def test_marks_and_steps_alternate_between_the_pairs_after_settling_too(tmp_path: Path) -> None:
    with Drive(tmp_path, RECORDS) as drive:
        drive.ledger.write(record(0))
        make_step(drive.ledger, record(0), record(1))
        drive.ledger.settle(record(1))
        for step in range(2, 5):
            begun = len(drive.log)
            make_step(drive.ledger, record(step - 1), record(step))
            written = [offset for offset, _ in drive.log[begun:]]
            stride = drive.stride
            assert written == [0, 2 * stride, None, stride, 3 * stride, None]


def test_an_amendment_leaves_the_mark_and_the_next_mark_leaves_the_amendment(
    ledger: Ledger,
) -> None:
    ledger.write(record(0))
    make_step(ledger, record(0), record(1))
    amended = record(1, amendment=1)
    ledger.amend(amended)
    assert_same(ledger.read().records, [amended, mark_of(record(0), record(1))])
    ledger.write(mark_of(amended, record(2)))
    assert_same(ledger.read().records, [mark_of(amended, record(2)), amended])


def test_a_torn_step_is_refused_by_device_and_step() -> None:
    whole = contents(record(5), mark_of(record(4), record(5)))
    torn = contents(mark_of(record(4), record(5)), record(4))
    with pytest.raises(CorruptStateError, match="device 1 was in the middle of step 5") as caught:
        newest_common([whole, torn])
    for word in ('durability="none"', "snapshot", "smart-infinity restore", "resume=False"):
        assert word in str(caught.value)
    with pytest.raises(CorruptStateError, match="device 0 was in the middle of step 5"):
        newest_common([torn, whole])


def test_a_device_that_has_not_begun_the_step_of_the_others_is_refused() -> None:
    done, idle = contents(record(5), mark_of(record(4), record(5))), contents(record(4))
    with pytest.raises(CorruptStateError):
        newest_common([done, idle])


def test_going_back_in_place_is_refused_until_it_is_done(ledger: Ledger) -> None:
    """To a lower step: the branch makes its mark the newest record all the same."""
    ledger.write(record(8))
    target = record(2, THEM, branch=1)
    make_step(ledger, record(8), record(9))
    ledger.write(mark_of(record(9), target))
    with pytest.raises(CorruptStateError, match="middle of step 2"):
        newest_common([ledger.read()])
    ledger.write(target)
    assert_same(newest_common([ledger.read()]), [target])
    # And again to another, after a first try that was killed.
    ledger.write(mark_of(target, record(7, branch=2)))
    ledger.write(mark_of(target, record(3, branch=3)))
    ledger.write(record(3, branch=3))
    assert_same(newest_common([ledger.read()]), [record(3, branch=3)])


def test_a_mark_rules_out_every_older_step(tmp_path: Path) -> None:
    """Also when one copy of the step is written already, and the other still holds the old one.

    Device 0 had not begun the step when the power went, so the old step is the only common one,
    and on device 1 it is overwritten.
    """
    with Drive(tmp_path, RECORDS) as drive:
        drive.ledger.write(record(4))
        drive.ledger.write(mark_of(record(4), record(5)))
        drive.overwrite(0, record(5))
        done = drive.ledger.read()
    with pytest.raises(CorruptStateError):
        newest_common([contents(record(4)), done])
    assert_same(newest_common([done, done]), [record(5)] * 2)


STEP_EVENTS = 6  # two copies and a sync for the mark, and for the step


@many
@given(
    st.lists(st.sampled_from(["step", "step", "amend", "settle", "back"]), max_size=5),
    st.lists(st.tuples(st.integers(0, STEP_EVENTS), st.integers(0, 2**32)), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([RECORDS, 700]),
)
def test_power_lost_at_any_instant_in_place_gives_a_whole_step_or_a_refusal(
    tmp_path: Path,
    before: list[str],
    instants: list[tuple[int, int]],
    backwards: bool,
    num_records: int,
) -> None:
    """Each device is somewhere in the step, and of its unsynced sectors some are durable.

    The state itself is that of the old step until the mark is durable, and that of the new one
    from when the new record is being written.
    """
    with ExitStack() as stack:
        drives = []
        for device in range(len(instants)):
            directory = tmp_path / str(device)
            directory.mkdir(exist_ok=True)
            drives.append(stack.enter_context(Drive(directory, num_records)))
        current = record(0, num_records=num_records)
        for drive in drives:
            drive.ledger.write(current)

        def after(what: str) -> LedgerRecord:
            branch, step = current.branch, current.step + 1
            if what == "back":
                branch, step = branch + 1, step // 2
            return record(step, num_records=num_records, branch=branch)

        for what in before:
            following = after(what)
            if what == "amend":
                following = replace(current, amendment=current.amendment + 1)
            for drive in drives:
                if what == "amend":
                    drive.ledger.amend(following)
                elif what == "settle":
                    drive.ledger.settle(current)
                else:
                    make_step(drive.ledger, current, following)
            current = current if what == "settle" else following
        following = after("back" if backwards else "step")
        found: list[LedgerContents] = []
        for drive, (instant, seed) in zip(drives, instants, strict=True):
            begun = len(drive.log)
            make_step(drive.ledger, current, following)
            assert len(drive.log) == begun + STEP_EVENTS
            found.append(drive.after_power_loss(begun + instant, seed))
        at = [instant for instant, _ in instants]
        try:
            records = newest_common(found)
        except CorruptStateError:
            assert not all(instant == STEP_EVENTS for instant in at), "the step was complete"
            assert not all(instant == 0 for instant in at), "the step had not begun"
            return
        if records[0].step_id == current.step_id:
            assert_same(records, [current] * len(at))
            assert max(at) < 3, "the state of the old step was being overwritten"
        else:
            assert_same(records, [following] * len(at))
            assert min(at) > 3, "the state of the new step was not there yet"
