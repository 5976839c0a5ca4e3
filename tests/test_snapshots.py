"""Snapshots by name: taken near the storage, and gone back to whole or refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from typer.testing import CliRunner, Result

from crashes import Counter, Everything, Other, contents, copies
from helpers import OPTIMIZERS, directories, net_loss, offload, small_net, train, two_groups
from smart_infinity import OffloadedOptimizer
from smart_infinity.cli import app
from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    DeviceIOError,
    OptimizerClosedError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.storage import snapshots as stored

Run = tuple[nn.Module, OffloadedOptimizer, Any]
FREE = "smart_infinity.storage.snapshots.free_nbytes"


def begin(devices: list[Path], resume: bool | None = None, **options: Any) -> Run:
    """A run with a scheduler, registered."""
    model = small_net(seed=77 if resume else 0)
    options = {"dtype": torch.bfloat16} | options
    source = OPTIMIZERS["adamw"](two_groups(model))
    optimizer = offload(model, source, devices, resume=resume, **options)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_for_checkpointing(scheduler)
    return model, optimizer, scheduler


def go(run: Run, first: int, last: int) -> None:
    """Make the steps ``first`` to ``last``."""
    model, optimizer, scheduler = run
    train(model, optimizer, range(first, last + 1), net_loss, scheduler=scheduler)


def cli(*arguments: object) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(params=["step", "none"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_going_back_and_on_is_as_if_nothing_had_happened(durability: str, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices, durability=durability)
    go(run, 1, 3)
    three = Everything(*run)
    run[1].snapshot("three")
    go(run, 4, 6)
    six = Everything(*run)
    run[1].snapshot("six")
    for name, step, there in (("three", 3, three), ("three", 3, three), ("six", 6, six)):
        run[1].restore(name)
        there.check(*run)
        assert run[1].steps == run[1].committed_step == step
    go(run, 7, 8)
    run[1].restore("three")  # and on
    go(run, 4, 6)
    six.check(*run)
    run[1].restore("three")
    crashed = copies(devices, tmp_path / "crash")  # right behind a restore
    again = begin(crashed, resume=True, durability=durability)
    three.check(*again)
    go(again, 4, 6)
    six.check(*again)
    crashed = copies(crashed, tmp_path / "crash2")
    again = begin(crashed, resume=True, durability=durability)
    six.check(*again)
    assert [(own.name, own.step) for own in again[1].snapshots()] == [("three", 3), ("six", 6)]


def test_random_states_buffers_and_objects_go_back_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))
    optimizer = offload(model, OPTIMIZERS["adamw"](model.parameters()), directories(tmp_path, 2))
    counter = Counter()
    optimizer.register_for_checkpointing(counter)

    def steps(first: int, last: int) -> None:
        for n in range(first, last):
            counter.value = n
            train(model, optimizer, [n], net_loss)

    with optimizer:
        steps(0, 3)
        optimizer.snapshot("here")
        steps(3, 6)
        expected = Everything(model, optimizer, counter), dict(model[1].named_buffers())
        buffers = {name: value.clone() for name, value in expected[1].items()}
        torch.rand(3)
        optimizer.restore("here")
        assert counter.value == 2
        assert model[1].num_batches_tracked == 3
        steps(3, 6)
        expected[0].check(model, optimizer, counter)
        assert all(torch.equal(value, buffers[name]) for name, value in expected[1].items())


def test_nothing_crosses_the_host_link(tmp_path: Path) -> None:
    run = begin(directories(tmp_path, 2))
    go(run, 1, 2)
    before = run[1].traffic.as_dict()
    run[1].snapshot("a")
    run[1].snapshots()
    run[1].remove_snapshot("a")
    assert run[1].traffic.as_dict() == before


def test_snapshots_are_listed_oldest_first_and_removed(tmp_path: Path) -> None:
    devices = directories(tmp_path, 3)
    run = begin(devices)
    run[1].snapshot("0.first-one_")  # at step 0
    go(run, 1, 1)
    run[1].snapshot("b")
    run[1].snapshot("a")
    assert [(own.name, own.step) for own in run[1].snapshots()] == [
        ("0.first-one_", 0),
        ("b", 1),
        ("a", 1),
    ]
    run[1].remove_snapshot("b")
    assert [own.name for own in run[1].snapshots()] == ["0.first-one_", "a"]
    assert not list(tmp_path.rglob("snapshots/*b"))
    with pytest.raises(StateMismatchError, match=r"no snapshot 'b'.*0\.first-one_ \(step 0\)"):
        run[1].remove_snapshot("b")
    with pytest.raises(StateMismatchError, match="no snapshot 'b'"):
        run[1].restore("b")
    run[1].snapshot("b")
    run[1].close()
    for call in (run[1].snapshot, run[1].restore, run[1].remove_snapshot):
        with pytest.raises(OptimizerClosedError):
            call("a")
    with pytest.raises(OptimizerClosedError):
        run[1].snapshots()


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "-a", "ä", "a b", "a\n", "x" * 101])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 1)
    before = contents(devices)
    with pytest.raises(StateMismatchError, match="name is"):
        run[1].snapshot(name)
    assert contents(devices) == before
    assert os.listdir(tmp_path / "device0").count("snapshots") == 0
    run[1].close()
    assert cli("snapshot", *devices, f"--name={name}").exit_code == 1


def refused(
    run: Run, devices: list[Path], call: Callable[[], object], kind: type, text: str
) -> None:
    """``call`` fails, nothing has changed, and the run goes on."""
    before, there = contents(devices), Everything(*run)
    with pytest.raises(kind, match=text):
        call()
    assert contents(devices) == before
    assert not list(Path(devices[0]).glob("snapshots/.*"))
    there.check(*run)
    go(run, run[1].steps + 1, run[1].steps + 1)


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 2)
    run[1].snapshot("a")
    refused(run, devices, lambda: run[1].snapshot("a"), StateExistsError, "snapshot 'a' already")


def test_no_space_is_found_out_before_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 2)
    one = stored.Snapshots(run[1]._engine.devices[0].snapshots.store, "").needed_nbytes()
    assert one >= run[1]._engine.devices[0].snapshots.store.state_nbytes
    # Enough for one of the two directories, which share a file system.
    monkeypatch.setattr(FREE, lambda directory: one + one // 2)
    text = "device1: the snapshot 'a' needs .* are free"
    refused(run, devices, lambda: run[1].snapshot("a"), DeviceFullError, text)
    refused(run, devices, lambda: run[1].state_dict(), DeviceFullError, "snapshot 'step-3'")


@pytest.mark.parametrize("call", ["copy_file_range", "rename", "makedirs"])
def test_an_error_while_it_is_taken_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 2)
    run[1].snapshot("before")
    real = getattr(os, call)

    def fail(*arguments: Any, **options: Any) -> Any:
        own = {"rename": f"{devices[1]}/snapshots/a", "makedirs": f"{devices[1]}/snapshots/.a"}
        if call == "copy_file_range" or arguments[-1] == own[call]:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        before = contents(devices)
        with pytest.raises(DeviceIOError):
            run[1].snapshot("a")
    assert contents(devices) == before
    run[1].snapshot("a")
    go(run, 3, 3)
    run[1].restore("a")
    assert run[1].steps == 2


def test_another_sets_snapshot_is_refused(tmp_path: Path) -> None:
    mine, theirs = directories(tmp_path, 2, "mine"), directories(tmp_path, 2, "theirs")
    for devices in (mine, theirs):
        run = begin(devices)
        go(run, 1, 2)
        run[1].snapshot("own" if devices is mine else "foreign")
        run[1].close()
    for one, other in zip(mine, theirs, strict=True):
        shutil.copytree(other / "snapshots" / "foreign", one / "snapshots" / "foreign")
    run = begin(mine, resume=True)
    text = r"no snapshot 'foreign'.*\['own \(step 2\)'\]"
    refused(run, mine, lambda: run[1].restore("foreign"), StateMismatchError, text)
    run[1].close()
    before = contents(mine)
    result = cli("restore", *mine, "--name", "foreign")
    assert result.exit_code == 1
    assert "foreign" in result.stderr
    assert contents(mine) == before


@pytest.mark.parametrize("part", ["snapshot.json", "state", "record", "blob"])
@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
def test_a_damaged_snapshot_is_refused(part: str, how: str, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 2)
    run[1].snapshot("a")
    go(run, 3, 3)
    path = devices[1] / "snapshots" / "a" / part
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data if how == "flip" else data[:40])
    kinds: Any = (CorruptStateError, StateMismatchError, DeviceIOError)
    refused(run, devices, lambda: run[1].restore("a"), kinds, "'?a'?")
    run[1].close()
    before = contents(devices)
    assert cli("restore", *devices, "--name", "a").exit_code == 1
    verdict = cli("verify", *devices)
    assert verdict.exit_code == 1
    assert str(devices[1]) in verdict.stderr.replace("\n", "")
    assert contents(devices) == before


def test_other_registered_objects_are_refused_before_anything_moves(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    run[1].register_for_checkpointing(Counter(1))
    go(run, 1, 2)
    run[1].snapshot("a")
    run[1].close()
    run = begin(devices, resume=True)
    go(run, 3, 3)  # the counter is given up
    run[1].register_for_checkpointing(Other(5))
    refused(run, devices, lambda: run[1].restore("a"), StateMismatchError, "a Other.*a Counter")


@pytest.mark.parametrize("point", ["hidden", "one of two"])
def test_what_a_kill_leaves_is_cleared(point: str, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 2)
    run[1].snapshot("whole")
    run[1].snapshot("a")
    made = devices[0] / "snapshots" / "a"
    shutil.rmtree(devices[1] / "snapshots" / "a")
    if point == "hidden":
        made.rename(made.with_name(".a"))
    crashed = copies(devices, tmp_path / "crash")
    run[1].close()
    again = begin(crashed, resume=True)
    assert not list(crashed[0].glob("snapshots/.*"))
    assert [own.name for own in again[1].snapshots()] == ["whole"]
    with pytest.raises(StateMismatchError, match="whole on every device"):
        again[1].restore("a")
    again[1].snapshot("a")
    assert [own.name for own in again[1].snapshots()] == ["whole", "a"]
    go(again, 3, 3)
    again[1].restore("a")
    assert again[1].steps == 2


def test_the_command_line_does_the_same(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    go(run, 1, 3)
    three = Everything(*run)
    assert cli("list", *devices).exit_code == 0, "also while a run is using them"
    busy = cli("snapshot", *devices, "--name", "a")
    assert busy.exit_code == 1
    assert "in use" in " ".join(busy.stderr.split())
    run[1].close()
    assert "no snapshots" in cli("list", *devices).stderr
    result = cli("snapshot", *devices[::-1], "--name", "a")
    assert "step 3" in result.stdout + result.stderr
    assert cli("snapshot", *devices, "--name", "a").exit_code == 1
    run = begin(devices, resume=True)
    go(run, 4, 5)
    run[1].snapshot("b")
    five = Everything(*run)
    run[1].close()
    listed = cli("list", *devices).stdout
    assert all(word in listed.split() for word in ("a", "3", "b", "5"))
    assert cli("restore", *devices, "--name", "a").exit_code == 0
    run = begin(devices, resume=True)
    three.check(*run)
    go(run, 4, 5)
    five.check(*run)
    run[1].close()
    assert cli("restore", *devices[::-1], "--name", "b").exit_code == 0
    assert cli("remove", *devices, "--name", "a").exit_code == 0
    assert cli("remove", *devices, "--name", "a").exit_code == 1
    run = begin(devices, resume=True)
    five.check(*run)
    assert [own.name for own in run[1].snapshots()] == ["b"]
