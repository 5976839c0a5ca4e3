"""Each operation of a run fails in turn, or does half of its work: finished, or loud; never wrong.

The run: three steps on two devices with a scheduler that is registered, and a snapshot after the
second. What is not simply finished raises, and `offload(..., resume=True)` then continues.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from images import (
    Known,
    Run,
    devices_of,
    in_memory,
    read_image,
    read_ledger,
    use_small_records,
    write_image,
)
from smart_infinity.errors import CorruptStateError, DeviceFullError, DeviceIOError
from smart_infinity.tools.verify import verify

DEVICES, STEPS = 2, 3


pytestmark = pytest.mark.usefixtures("small_records")


class Undisturbed:
    """The states of the run: at its beginning, and after each step and scheduler's call."""

    def __init__(self, root: Path) -> None:
        with Run.new(root, DEVICES) as run:
            self.known = [run.known()]
            for seed in range(STEPS):
                run.train([seed])
                self.known.append(run.known())


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[Known]]:
    with pytest.MonkeyPatch.context() as patch, in_memory() as path:
        use_small_records(patch)
        yield Undisturbed(path / "undisturbed").known


# --- faults ------------------------------------------------------------------------------------

CALLS = ("preadv", "pwritev", "fdatasync", "copy_file_range", "fsync", "rename")
NAMES = {
    "preadv": {"read"},
    "pwritev": {"write"},
    "fdatasync": {"sync"},
    "copy_file_range": {"copy"},
    "fsync": {"write", "sync", "rename"},
    "rename": {"write", "rename", "remove"},
}
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR}
SHORT = "short"


def faults_of(call: str) -> list[str]:
    reading = ["EIO", "EINTR"]
    return {"preadv": [*reading, SHORT], "pwritev": [*ERRORS, SHORT]}.get(
        call, [*ERRORS, SHORT] if call == "copy_file_range" else list(ERRORS)
    )


def half(call: str, real: Callable[..., Any], args: tuple) -> int:
    """Do half of a transfer."""
    if call == "copy_file_range":
        source, target, count, *offsets = args
        return real(source, target, max(1, count // 2), *offsets)
    fd, (buffer,), offset = args
    return real(fd, [memoryview(buffer)[: len(buffer) // 2]], offset)


class Fault:
    """The n-th call of one of the system's functions, of all threads together, goes wrong once."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, fault: str, nth: int) -> None:
        self.call, self.fault, self.nth, self.calls = call, fault, nth, 0
        self.real, self.lock = getattr(os, call), threading.Lock()
        patch.setattr(os, call, self)

    def __call__(self, *args: Any) -> Any:
        with self.lock:
            self.calls += 1
            now = self.calls == self.nth
        if not now:
            return self.real(*args)
        if self.fault == SHORT:
            return half(self.call, self.real, args)
        number = ERRORS[self.fault]
        raise OSError(number, os.strerror(number))

    @property
    def is_over(self) -> bool:
        return self.calls >= self.nth


# --- the campaign ------------------------------------------------------------------------------


def one_case(
    call: str, fault: str, nth: int, root: Path, undisturbed: list[Known]
) -> tuple[str, int]:
    """Run with a fault and go on to the end; returns what came of it, and the number of calls."""
    devices = write_image(root, first_image)
    raised: OSError | None = None
    durable = 0
    run = Run(devices)
    with pytest.MonkeyPatch.context() as patch:
        at = Fault(patch, call, fault, nth)
        try:
            for seed in range(STEPS):
                run.step(seed)
                durable = run.optimizer.committed_step
                run.scheduler.step()
                if seed == 1:
                    snapshot(run, "kept")
        except OSError as error:
            raised = error
    about = f"{call} {nth}: {fault}"
    if raised is None:
        assert run.known() == undisturbed[STEPS], about
        assert [own.name for own in run.optimizer.snapshots()] == ["kept"], about
        run.close()
        assert verify(devices).problems == [], about
        return ("not reached" if not at.is_over else "finished"), at.calls
    assert at.is_over, f"{about}: {raised!r}"
    assert isinstance(raised, DeviceIOError | DeviceFullError), f"{about}: {raised!r}"
    if isinstance(raised, DeviceIOError):
        assert raised.device in map(str, devices), about
        assert Path(raised.device) in Path(raised.path).parents, about
        assert raised.operation in NAMES[call], about
        # Less than a page is no progress in direct mode: the end of the file, or of the disk.
        expected = {0, errno.ENOSPC} if fault == SHORT else {ERRORS[fault]}
        assert raised.errno in expected, about
        assert raised.path in str(raised), about
    run.close()
    with Run(devices, resume=True) as run:
        steps = run.optimizer.steps
        assert steps in (durable, durable + 1), f"{about}: {steps}, and {durable} was committed"
        own, known = undisturbed[steps], run.known()
        assert (known.weights, known.masters_and_moments) == (own.weights, own.masters_and_moments)
        if run.scheduler.last_epoch < steps:  # it broke between a step and its scheduler's call
            assert run.scheduler.last_epoch == steps - 1, about
            run.scheduler.step()
        assert run.known() == own, about
        for seed in range(steps, STEPS):
            run.train([seed])
        if "kept" not in [own.name for own in run.optimizer.snapshots()]:
            snapshot(run, "kept")
        assert run.known() == undisturbed[STEPS], about
    assert verify(devices).problems == [], about
    return "raised", at.calls


def snapshot(run: Run, name: str) -> None:
    run.optimizer.snapshot(name)


first_image = {f"device{index}/mine": b"" for index in range(DEVICES)}


def campaign(call: str, root: Path, undisturbed: list[Known], *, every_fault: bool) -> None:
    draw = random.Random(call)
    outcomes: Counter[str] = Counter()
    nth, is_over = 0, False
    while not is_over:
        nth += 1
        kinds = faults_of(call)
        for fault in kinds if every_fault else [kinds[(nth + draw.randrange(2)) % len(kinds)]]:
            outcome, _ = one_case(call, fault, nth, root / "case", undisturbed)
            is_over |= outcome == "not reached"
            outcomes[f"{fault}: {outcome}"] += 1
    print(f"\n{call}: {nth - 1} calls, {outcomes.total()} cases, {dict(sorted(outcomes.items()))}")
    assert nth > 4, "some calls were made to fail"
    assert any("raised" in outcome for outcome in outcomes)
    assert SHORT not in kinds or f"{SHORT}: finished" in outcomes


@pytest.mark.parametrize("call", CALLS)
def test_any_operation_fails(call: str, root: Path, undisturbed: list[Known]) -> None:
    campaign(call, root, undisturbed, every_fault=False)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_any_operation_fails_in_every_way(call: str, root: Path, undisturbed: list[Known]) -> None:
    campaign(call, root, undisturbed, every_fault=True)


# --- a snapshot that fails leaves the run as it was --------------------------------------------


@pytest.mark.parametrize("call", ["copy_file_range", "fsync", "rename", "fdatasync"])
def test_a_failed_snapshot_does_not_end_the_run(
    call: str, root: Path, undisturbed: list[Known]
) -> None:
    failures = 0
    for nth in range(1, 100):
        with Run(write_image(root / "case", first_image)) as run:
            run.train(range(2))
            with pytest.MonkeyPatch.context() as patch:
                at = Fault(patch, call, "EIO", nth)
                try:
                    snapshot(run, "kept")
                except DeviceIOError:
                    failures += 1
            about = f"{call} {nth} of {at.calls}"
            names = [own.name for own in run.optimizer.snapshots()]
            if at.is_over and names:
                assert verify_snapshot(run) == [], about
            assert run.known() == undisturbed[2], about
            run.train([2])
            assert run.known() == undisturbed[STEPS], about
            if not names:
                snapshot(run, "kept")
        if not at.is_over:
            break
    assert failures >= 2
    assert nth < 99


def verify_snapshot(run: Run) -> list[str]:
    keepers = run.optimizer._keepers()
    return [problem for keeper in keepers for problem in keeper.problems("kept")]


# --- bits that flip while a run goes on --------------------------------------------------------


def flip_current(devices: list[Path], device: int, record: int, stride: int) -> str:
    ledger = read_ledger(devices[device]).records[0]
    name = f"state.{ledger.places[record]}"
    content = np.memmap(devices[device] / name, np.uint8, "r+")
    content[record * stride + 17] ^= 8
    content.flush()
    return name


@pytest.mark.parametrize(("device", "record"), [(0, 0), (0, 2), (1, 1)])
def test_verify_read_finds_a_flip_in_the_next_step(device: int, record: int, root: Path) -> None:
    run = Run.new(root, DEVICES, verify="read")
    run.train(range(2))
    stride = run.optimizer._engine.layout.record_stride
    name = flip_current(devices_of(root), device, record, stride)
    with pytest.raises(
        CorruptStateError, match=rf"device{device}: state record {record} in {name}"
    ):
        run.step(2)
    run.close()
    with pytest.raises(
        CorruptStateError, match=rf"device{device}: state record {record} in {name}"
    ):
        Run(devices_of(root), resume=True)


@pytest.mark.parametrize("verify_when", ["read", "resume"])
def test_a_flip_is_refused_by_the_next_resume(verify_when: str, root: Path) -> None:
    run = Run.new(root, DEVICES, verify=verify_when)
    run.train(range(2))
    stride = run.optimizer._engine.layout.record_stride
    run.close()
    name = flip_current(devices_of(root), 1, 1, stride)
    before = read_image(root)
    assert any("state record 1" in problem for _, problem in verify(devices_of(root)).problems)
    assert read_image(root) == before
    with pytest.raises(CorruptStateError, match=rf"device1: state record 1 in {name}"):
        Run(devices_of(root), resume=True, verify=verify_when)


def test_verify_resume_does_not_look_in_a_step(root: Path) -> None:
    """As documented: between resumes it trusts the drive, and takes over what that returns."""
    with Run.new(root, DEVICES, verify="resume") as run:
        run.train(range(2))
        flip_current(devices_of(root), 1, 1, run.optimizer._engine.layout.record_stride)
        run.train([2])
    with Run(devices_of(root), resume=True) as run:
        assert run.optimizer.steps == 3
