"""A process is killed in the middle of `offload()`, at every operation: it can simply be repeated.

A child is forked, and ends in the place of its n-th system call: what it wrote before is there.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images import Image, Run, read_image, write_image
from smart_infinity.errors import CorruptStateError, StateMismatchError

CALLS = (
    "pwritev",
    "rename",
    "fsync",
    "fdatasync",
    "posix_fallocate",
    "unlink",
    "copy_file_range",
)
DEVICES = 2
EMPTY: Image = {f"device{index}/mine": b"" for index in range(DEVICES)}


# Every fifth operation, or in a long run every one.
each_stride = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])


pytestmark = pytest.mark.usefixtures("small_records")


def kill_at(nth: int) -> None:
    """End this process in the place of the n-th of all calls, of all threads together."""
    lock, calls = threading.Lock(), 0

    def counted(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    for name in CALLS:
        real = getattr(os, name)
        setattr(os, name, lambda *args, _real=real, **options: counted(_real, *args, **options))


def survives(nth: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that is killed at its n-th operation; whether it ended before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            kill_at(nth)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, f"operation {nth}: the child raised"
    return True


def killed(nth: int, stride: int) -> str:
    return f"{(nth - 1) // stride} of {nth - 1} operations"


@each_stride
@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("resume", [True, None])
def test_offload_is_killed_at_any_operation(
    resume: bool | None, durability: str, stride: int, root: Path
) -> None:
    with Run(write_image(root / "case", EMPTY)) as run:
        run.train(range(2))
        expected = run.known()
    for nth in range(1, 1000, stride):
        devices = write_image(root / "case", EMPTY)
        is_over = survives(nth, lambda own=devices: Run(own, durability=durability).close())
        with Run(devices, resume=resume, durability=durability) as run:
            assert run.optimizer.steps == 0, nth
            if nth % 4 == 0 or is_over:
                run.train(range(2))
                assert run.known() == expected, nth
        if is_over:
            break
    print(f"\noffload() killed at {killed(nth, stride)}, then resume={resume}: all began anew")
    assert 50 < nth < 999


@each_stride
def test_a_resume_is_killed_at_any_operation(stride: int, root: Path) -> None:
    """Also one that mends: the second copies of superblock and ledger are damaged."""
    with Run.new(root / "case", DEVICES) as run:
        run.train(range(3))
        run.optimizer.snapshot("kept")
        expected = run.known()
    image = read_image(root / "case")
    for name in ("superblock.copy.json", "layout.json"):
        image[f"device0/{name}"] = b"damaged"
    ledger = bytearray(image["device1/ledger"])
    ledger[100] ^= 1
    image["device1/ledger"] = bytes(ledger)
    for nth in range(1, 1000, stride):
        devices = write_image(root / "case", image)
        is_over = survives(nth, lambda own=devices: Run(own, resume=True).close())
        with Run(devices, resume=True) as run:
            assert run.known() == expected, nth
        if is_over:
            break
    print(f"\na resume killed at {killed(nth, stride)}: all continued")
    assert 10 < nth < 999


@each_stride
def test_discarding_a_state_is_killed_at_any_operation(stride: int, root: Path) -> None:
    """Until all is discarded the old state is whole, or it is said that it is not."""
    with Run.new(root / "case", DEVICES) as run:
        run.train(range(3))
        expected = run.known()
    image = read_image(root / "case")
    outcomes: Counter[str] = Counter()
    for nth in range(1, 1000, stride):
        devices = write_image(root / "case", image)
        is_over = survives(nth, lambda own=devices: Run(own, resume=False).close())
        try:
            with Run(devices, resume=True) as run:
                if run.optimizer.steps:
                    assert run.known() == expected, nth
                outcomes["old" if run.optimizer.steps else "fresh"] += 1
        except (StateMismatchError, CorruptStateError):
            outcomes["refused"] += 1
        with Run(devices, resume=False) as run:
            assert run.optimizer.steps == 0, nth
        if is_over:
            break
    print(f"\noffload(resume=False) killed at {killed(nth, stride)}: {dict(outcomes)}")
    assert {"old", "fresh", "refused"} >= set(outcomes) >= {"old", "fresh"}
    assert nth < 999


@each_stride
def test_a_restore_is_killed_at_any_operation(stride: int, root: Path) -> None:
    """Going back to a snapshot: done on all devices or on none."""
    with Run.new(root / "case", DEVICES) as run:
        run.train(range(2))
        run.optimizer.snapshot("kept")
        kept = run.known()
        run.train(range(2, 4))
        newest = run.known()
    image = read_image(root / "case")
    outcomes: Counter[str] = Counter()

    def go_back(devices: list[Path]) -> None:
        with Run(devices, resume=True) as run:
            run.optimizer.restore("kept")

    for nth in range(1, 1000, stride):
        devices = write_image(root / "case", image)
        is_over = survives(nth, lambda own=devices: go_back(own))
        with Run(devices, resume=True) as run:
            known = run.known()
            assert known in (kept, newest), nth
            outcomes["back" if known == kept else "newest"] += 1
            assert [own.name for own in run.optimizer.snapshots()] == ["kept"], nth
            run.optimizer.restore("kept")
            assert run.known() == kept, nth
        if is_over:
            break
    print(f"\na restore killed at {killed(nth, stride)}: {dict(outcomes)}")
    assert {"back", "newest"} == set(outcomes)


@each_stride
def test_a_snapshot_is_killed_at_any_operation(stride: int, root: Path) -> None:
    """Whole on all devices, or not there; its name can be used again."""
    with Run.new(root / "case", DEVICES) as run:
        run.train(range(2))
        known = run.known()
    image = read_image(root / "case")
    outcomes: Counter[str] = Counter()

    def keep(devices: list[Path]) -> None:
        with Run(devices, resume=True) as run:
            run.optimizer.snapshot("kept")

    for nth in range(1, 1000, stride):
        devices = write_image(root / "case", image)
        is_over = survives(nth, lambda own=devices: keep(own))
        with Run(devices, resume=True) as run:
            assert run.known() == known, nth
            names = [own.name for own in run.optimizer.snapshots()]
            outcomes["there" if names else "not there"] += 1
            if not names:
                run.optimizer.snapshot("kept")
            run.train([2])
            run.optimizer.restore("kept")
            assert run.known() == known, nth
        if is_over:
            break
    print(f"\na snapshot killed at {killed(nth, stride)}: {dict(outcomes)}")
    assert {"there", "not there"} == set(outcomes)
