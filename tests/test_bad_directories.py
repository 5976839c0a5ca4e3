"""Directories that are not what they should be: refused by name, by `offload` and by the tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from helpers import offload
from images import (
    Image,
    Known,
    Run,
    devices_of,
    in_memory,
    net,
    read_image,
    read_ledger,
    use_small_records,
    write_image,
)
from smart_infinity.cli import app
from smart_infinity.errors import (
    CorruptStateError,
    DeviceSpecError,
    SmartInfinityError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.tools.inspection import inspect_set
from smart_infinity.tools.sets import open_set
from smart_infinity.tools.verify import verify

DEVICES, STEPS = 2, 3


pytestmark = pytest.mark.usefixtures("small_records")


@pytest.fixture(scope="module")
def sets() -> Iterator[dict[str, tuple[Image, Known]]]:
    """Two sets of two devices at step 3, with a snapshot each."""
    with pytest.MonkeyPatch.context() as patch, in_memory() as path:
        use_small_records(patch)
        made = {}
        for name, seeds in (("ours", range(STEPS)), ("theirs", range(10, 10 + STEPS))):
            with Run.new(path / name, DEVICES) as run:
                run.train(seeds)
                run.optimizer.snapshot("kept")
                known = run.known()
            made[name] = read_image(path / name), known
        yield made


Sets = dict[str, tuple[Image, Known]]


@pytest.fixture
def ours(root: Path, sets: Sets) -> list[Path]:
    return write_image(root / "ours", sets["ours"][0])


@pytest.fixture
def theirs(root: Path, sets: Sets) -> list[Path]:
    return write_image(root / "theirs", sets["theirs"][0])


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """No content and no name changes; a lock's empty file may come to be."""

    def content() -> Image:
        return {name: data for name, data in read_image(root).items() if Path(name).name != "lock"}

    before = content()
    yield
    after = content()
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == []


def cli(*arguments: object) -> tuple[int, str]:
    """Exit status and what was written, in one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, SmartInfinityError), result.exception
        return 1, str(result.exception)
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def refused(devices: list[Path], message: str, root: Path, kind: type = StateMismatchError) -> None:
    """By `offload` and all tools, with a message, and without a change."""
    with unchanged(root):
        model = net()
        given = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(kind, match=message):
            offload(model, torch.optim.AdamW(model.parameters()), devices, resume=True)
        assert all(map(torch.equal, given, model.parameters()))
        for writable in (False, True):
            with pytest.raises(kind, match=message), open_set(devices, writable=writable):
                pass
        for call in (verify, inspect_set):
            with pytest.raises(kind, match=message):
                call(devices)
        for command in ("verify", "inspect"):
            status, output = cli(command, *devices)
            assert status == 1, output
            assert re.search(message, output), output


def works(devices: list[Path], known: Known, root: Path) -> None:
    """For all tools, and for `offload` at last."""
    with unchanged(root):
        with open_set(devices, writable=False) as found:
            assert found.require_records()[0].step == known.steps
        verdict = verify(devices)
        assert (verdict.step, verdict.problems) == (known.steps, [])
        assert inspect_set(devices)["health"] == "ok"
        assert cli("verify", *devices)[0] == cli("inspect", *devices)[0] == 0
    with Run(devices, resume=True) as run:
        assert run.known() == known


# --- which directories -------------------------------------------------------------------------


def test_another_order_works(ours: list[Path], sets: Sets, root: Path) -> None:
    works(ours[::-1], sets["ours"][1], root)


@pytest.mark.parametrize("missing", range(DEVICES))
def test_one_is_missing(missing: int, ours: list[Path], root: Path) -> None:
    del ours[missing]
    refused(ours, rf"lies on 2 devices and 1 were given; missing: device {missing}", root)


def test_one_from_another_set(ours: list[Path], theirs: list[Path], root: Path) -> None:
    message = rf"{theirs[1]} belongs to set [\w-]+ and {ours[0]} to [\w-]+"
    refused([ours[0], theirs[1]], message, root)
    refused([*ours, theirs[0]], rf"{theirs[0]} belongs to set", root)


def test_two_sets_at_once(ours: list[Path], theirs: list[Path], root: Path) -> None:
    refused([*ours, *theirs], rf"{theirs[0]} belongs to set", root)


def test_a_copy_of_a_directory(ours: list[Path], root: Path) -> None:
    copied = root / "copied/device0"
    shutil.copytree(ours[0], copied)
    message = rf"{ours[0]} and {copied} both say that they are device 0.*one is a copy"
    refused([ours[0], copied], message, root)
    refused([*ours, copied], message, root)


def test_a_moved_set_works(ours: list[Path], sets: Sets, root: Path) -> None:
    moved = [root / "elsewhere" / name for name in ("b", "a")]
    for source, target in zip(ours, moved, strict=True):
        shutil.copytree(source, target)
    shutil.rmtree(root / "ours")
    works(moved, sets["ours"][1], root)


def test_an_empty_directory_in_place_of_one(ours: list[Path], root: Path) -> None:
    empty = root / "empty/device1"
    empty.mkdir(parents=True)
    with unchanged(root):
        for call in (verify, inspect_set):
            with pytest.raises(SmartInfinityError, match=rf"{empty}"):
                call([ours[0], empty])
        with pytest.raises(StateMismatchError, match=rf"{empty} holds no state"):
            Run([ours[0], empty], resume=True)


def test_no_directory_at_all(ours: list[Path], root: Path) -> None:
    nowhere = root / "nowhere"
    refused([ours[0], nowhere], rf"{nowhere} does not exist", root, DeviceSpecError)


# --- what is in them ---------------------------------------------------------------------------


def current_places(device: Path) -> set[int]:
    return set(read_ledger(device).records[0].places.tolist())


def damaged(devices: list[Path], message: str, root: Path) -> None:
    """Refused by `offload`, reported by ``verify``, told by ``inspect``; nothing changes."""
    with unchanged(root):
        with pytest.raises(CorruptStateError, match=message):
            Run(devices, resume=True)
        problems = [f"{path}: {problem}" for path, problem in verify(devices).problems]
        assert any(re.search(message, problem) for problem in problems), problems
        status, output = cli("verify", *devices)
        assert status == 1
        assert re.search(message, output), output
        assert cli("inspect", *devices)[0] == 0


@pytest.mark.parametrize("device", [1, "all"])
def test_a_state_file_is_missing(device: int | str, ours: list[Path], root: Path) -> None:
    place = current_places(ours[1]).pop()
    for own in ours if device == "all" else [ours[device]]:
        (own / f"state.{place}").unlink()
    damaged(ours, rf"device\d.*state\.{place}", root)


@pytest.mark.parametrize(
    "place",
    [
        0,
        1,
    ],
)
def test_inspect_misses_the_state_file_of_the_newest_step(
    place: int, ours: list[Path], root: Path
) -> None:
    if place not in current_places(ours[1]):
        with Run(ours, resume=True) as run:
            run.train([5])
    (ours[1] / f"state.{place}").unlink()
    assert f"state.{place} is missing" in inspect_set(ours)["health"]


@pytest.mark.parametrize("keep", [0, 1, 4096, 0.5, -1])
def test_a_state_file_is_cut_short(keep: float, ours: list[Path], root: Path) -> None:
    for own in ours:
        file = own / f"state.{current_places(own).pop()}"
        size = file.stat().st_size
        os.truncate(file, int(size * keep) if keep == 0.5 else keep if keep >= 0 else size + keep)
    damaged(ours, r"device\d.*state\.\d", root)
    assert "is cut off" in inspect_set(ours)["health"]


def test_a_file_that_no_step_needs_is_cut_short(ours: list[Path], sets: Sets, root: Path) -> None:
    with Run(ours, resume=True) as run:
        assert run.known() == sets["ours"][1]
        while current_places(ours[0]) != {0}:
            run.train([4])
        expected = run.known()
    os.truncate(ours[0] / "state.1", 100)
    with Run(ours, resume=True) as run:
        assert run.known() == expected
        run.train([5, 6])
        known = run.known()
    works(ours, known, root)


def cuts_of_ledger() -> list[int]:
    return [*range(0, 16385, 1024), 1, 88, 4095, 4097, 8191, 12289, 16383]


def test_a_ledger_is_cut_short(sets: Sets, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At any length: the newest step, an older one with a warning, or a refusal."""
    image, known = sets["ours"]
    assert len(image["device0/ledger"]) == 16384
    end = 3 * 4096 + len(read_ledger(write_image(root / "cut", image)[0]).records[0].encode())
    outcomes = dict.fromkeys(("newest", "older", "refused"), 0)
    for keep in cuts_of_ledger():
        damaged = {**image, "device0/ledger": image["device0/ledger"][:keep]}
        devices = write_image(root / "cut", damaged)
        caplog.clear()
        with unchanged(root):
            verdict = verify(devices)
        assert bool(verdict.problems) == (keep < end), keep  # behind it is padding
        try:
            with Run(devices, resume=True) as run:
                assert verdict.step == run.optimizer.steps
                is_newest = run.known() == known
        except CorruptStateError as error:
            if not re.search(rf"{devices[0]}.*ledger", str(error)):
                raise
            outcomes["refused"] += 1
            assert read_image(root / "cut") == damaged, keep
            continue
        if not is_newest:
            assert verdict.step == STEPS - 1, keep
        if keep < end:
            assert "ledger is cut off" in caplog.text, keep
            assert f"Continuing with step {verdict.step}" in caplog.text, keep
        outcomes["newest" if is_newest else "older"] += 1
        assert verify(devices).problems == [], "a resume makes it whole again"
    print(f"\nledgers cut short: {len(cuts_of_ledger())} lengths, {outcomes}")
    assert all(outcomes.values())


# --- another run than theirs -------------------------------------------------------------------


def wider() -> nn.Module:
    model = net()
    model[2] = nn.Linear(64, 65)
    model[4] = nn.Linear(65, 16)
    return model


def renamed() -> nn.Module:
    return nn.Sequential(nn.Identity(), *net())


def longer() -> nn.Module:
    return nn.Sequential(*net(), nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (wider, r"2\.weight \(64, 64\) float32 where the model has 2\.weight \(65, 64\) float32"),
        (renamed, r"0\.weight \(64, 16\) float32 where the model has 1\.weight \(64, 16\)"),
        (longer, r"6 parameters and the model 8; the first one too many is 5\.weight"),
    ],
)
def test_a_changed_model(
    make: Callable[[], nn.Module], message: str, ours: list[Path], root: Path
) -> None:
    for resume, kind in ((True, StateMismatchError), (None, StateExistsError)):
        model = make()
        with unchanged(root), pytest.raises(kind, match=message):
            offload(model, torch.optim.AdamW(model.parameters()), ours, resume=resume)


def test_a_changed_number_of_devices(ours: list[Path], root: Path) -> None:
    for devices in (ours[:1], [*ours, root / "more"]):
        devices[-1].mkdir(exist_ok=True)
        with unchanged(root), pytest.raises(StateMismatchError) as caught:
            Run(devices, resume=True)
        if len(devices) < DEVICES:
            assert "smart-infinity export" in str(caught.value)
            assert "smart-infinity import" in str(caught.value)
        else:
            assert f"{root / 'more'} holds no state" in str(caught.value)


# --- what may not be written -------------------------------------------------------------------


@pytest.fixture
def read_only(ours: list[Path], root: Path) -> Iterator[list[Path]]:
    """Our set on a file system that is mounted read-only."""
    target = root / "mounted"
    target.mkdir()
    options = ["-t", "tmpfs", "-o", "size=8m", "none", str(target)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        shutil.copytree(root / "ours", target, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(target)], check=True)
        yield devices_of(target)
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_read_only_file_system(read_only: list[Path], root: Path) -> None:
    with unchanged(root):
        for resume in (True, False, None):
            message = rf"{read_only[0]} lies on a read-only file system"
            with pytest.raises(DeviceSpecError, match=message):
                Run(read_only, resume=resume)
        with (
            pytest.raises(DeviceSpecError, match="read-only"),
            open_set(read_only, writable=True),
        ):
            pass
        verdict = verify(read_only)
        assert (verdict.step, verdict.problems) == (STEPS, [])
        assert verdict.snapshots == DEVICES
        assert inspect_set(read_only)["health"] == "ok"
        assert cli("verify", *read_only)[0] == cli("inspect", *read_only)[0] == 0
        status, output = cli("restore", *read_only, "--name", "kept")
        assert status == 1
        assert "read-only file system" in output
