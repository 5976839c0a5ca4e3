"""``durability="none"``: half the space, the same numbers, and a torn step that is refused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from crashes import Everything, contents, copies
from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    same_bits,
    small_net,
    train,
    two_groups,
    weights_of,
)
from smart_infinity import OffloadedOptimizer
from smart_infinity.cli import app
from smart_infinity.errors import CorruptStateError, StateExistsError, UnsupportedError

Run = tuple[nn.Module, OffloadedOptimizer]


def begin(devices: Any, resume: bool | None = None, **options: Any) -> Run:
    model = small_net(seed=77 if resume else 0)
    options = {"dtype": torch.bfloat16, "durability": "none"} | options
    source = OPTIMIZERS[options.pop("name", "adamw")](two_groups(model))
    return model, offload(model, source, devices, resume=resume, **options)


def in_child(action: Callable[[], object]) -> int:
    """The status of a forked child that does this."""
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(3)
    return os.waitpid(child, 0)[1]


def kill_at_write(nth: int) -> None:
    """Die by SIGKILL instead of writing for the ``nth`` time from now."""
    real, lock, calls = os.pwritev, threading.Lock(), iter(range(1, 10**9))

    def write(*arguments: Any) -> int:
        with lock:
            if next(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    os.pwritev = write  # type: ignore[assignment]


def die_in_step(devices: list[Path], durability: str, nth: int) -> None:
    """Resume in a child, which is killed at a write of its next step."""

    def action() -> None:
        model, optimizer = begin(devices, resume=True, durability=durability)
        net_loss(model, optimizer.steps).backward()
        kill_at_write(nth)
        optimizer.step()

    assert in_child(action) == signal.SIGKILL


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "sgd-plain", "adagrad"])
def test_the_same_numbers_in_half_the_space(name: str, tmp_path: Path) -> None:
    sizes, found = {}, {}
    for durability in ("step", "none"):
        devices = directories(tmp_path, 2, durability)
        run = begin(devices, durability=durability, name=name)
        train(*run, range(5), net_loss)
        found[durability] = Everything(*run)
        sizes[durability] = sum(f.stat().st_size for d in devices for f in d.glob("state.*"))
        run[1].close()
    assert found["none"].numbers == found["step"].numbers
    assert same_bits(found["none"].tensors, found["step"].tensors)
    assert 2 * sizes["none"] == sizes["step"] > 0


def test_parameters_without_gradients_stay(tmp_path: Path) -> None:
    found = []
    for durability in ("step", "none"):
        model, optimizer = begin(directories(tmp_path, 2, durability), durability=durability)
        for seed in range(4):
            net_loss(model, seed).backward()
            if seed % 2:
                model[0].weight.grad = model[4].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
        found.append(Everything(model, optimizer))
    assert same_bits(found[0].tensors, found[1].tensors)


def test_between_steps_the_state_is_whole(tmp_path: Path) -> None:
    devices = directories(tmp_path, 3)
    run = begin(devices)
    train(*run, range(3), net_loss)
    crashed = copies(devices, tmp_path / "crash")
    train(*run, range(3, 6), net_loss)
    expected = Everything(*run)
    again = begin(crashed, resume=True)
    train(*again, range(3, 6), net_loss)
    expected.check(*again)


@pytest.mark.parametrize("nth", [3, 5, 6])
def test_a_torn_step_is_refused_and_a_snapshot_helps(nth: int, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    train(*run, range(2), net_loss)
    run[1].snapshot("two")
    two = Everything(*run)
    train(*run, range(2, 4), net_loss)
    run[1].close()
    die_in_step(devices, "none", nth)
    before = contents(devices)
    model = small_net(seed=5)
    source, options = OPTIMIZERS["adamw"](two_groups(model)), {"dtype": torch.bfloat16}
    for durability in ("none", "step"):
        with pytest.raises(CorruptStateError, match=r"middle of step 5.*smart-infinity restore"):
            offload(model, source, devices, resume=True, durability=durability, **options)
    with pytest.raises((CorruptStateError, StateExistsError)):
        offload(model, source, devices, **options)
    assert same_bits(weights_of(model), weights_of(small_net(seed=5)))
    assert contents(devices) == before
    runner = CliRunner()
    for command in ("inspect", "verify"):
        result = runner.invoke(app, [command, *map(str, devices)])
        assert "middle of step 5" in " ".join((result.stdout + result.stderr).split())
        assert result.exit_code == (command == "verify")
    for command in (["snapshot", "--name", "x"], ["export", "--to", str(tmp_path / "out")]):
        result = runner.invoke(app, [*command, *map(str, devices)])
        assert result.exit_code == 1, command
    assert not (tmp_path / "out").exists()
    result = runner.invoke(app, ["restore", *map(str, devices), "--name", "two"])
    assert result.exit_code == 0, result.stderr
    run = begin(devices, resume=True)
    two.check(*run)
    train(*run, range(2, 4), net_loss)
    run[1].close()


def test_a_torn_step_can_be_discarded(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    train(*run, range(2), net_loss)
    run[1].close()
    die_in_step(devices, "none", 4)
    run = begin(devices, resume=False)
    train(*run, range(2), net_loss)
    assert run[1].steps == 2


def test_a_kill_in_a_restore_in_place_can_be_repeated(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    train(*run, range(2), net_loss)
    run[1].snapshot("two")
    two = Everything(*run)
    train(*run, range(2, 4), net_loss)
    run[1].close()
    real, calls = os.copy_file_range, iter(range(1, 10**9))

    def copy(*arguments: Any) -> int:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    def action() -> None:
        _, optimizer = begin(devices, resume=True)
        os.copy_file_range = copy  # type: ignore[assignment]
        optimizer.restore("two")

    assert in_child(action) == signal.SIGKILL
    with pytest.raises(CorruptStateError, match="middle of step 2"):
        begin(devices, resume=True)
    result = CliRunner().invoke(app, ["restore", *map(str, devices), "--name", "two"])
    assert result.exit_code == 0, result.stderr
    two.check(*begin(devices, resume=True))


@pytest.mark.parametrize("nth", range(1, 9))
def test_by_default_a_kill_costs_the_step_in_flight_only(nth: int, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices, durability="step")
    train(*run, range(4), net_loss)
    four = Everything(*run)
    train(*begin(copies(devices, tmp_path / "other"), resume=True), range(4, 6), net_loss)
    six = Everything(*begin(tmp_path.glob("other/*"), resume=True))
    run[1].close()
    die_in_step(devices, "step", nth)
    run = begin(devices, resume=True, durability="step")
    if run[1].steps == 4:
        four.check(*run)
    train(*run, range(run[1].steps, 6), net_loss)
    six.check(*run)


@pytest.mark.parametrize("order", [("step", "none"), ("none", "step")])
def test_it_may_change_between_runs(order: tuple[str, str], tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    whole = begin(directories(tmp_path, 2, "whole"))
    train(*whole, range(9), net_loss)
    expected = Everything(*whole)
    for n, durability in enumerate([order[0], order[1], order[0]]):
        run = begin(devices, resume=bool(n) or None, durability=durability)
        train(*run, range(3 * n, 3 * n + 2), net_loss)
        run[1].snapshot(f"at-{n}")
        train(*run, range(3 * n + 2, 3 * n + 3), net_loss)
        crashed = copies(devices, tmp_path / f"crash{n}")
        run[1].close()
        again = begin(crashed, resume=True, durability=durability)
        train(*again, range(3 * n + 3, 9), net_loss)
        expected.check(*again)
        again[1].restore("at-0")
        train(*again, range(2, 9), net_loss)
        expected.check(*again)
        again[1].close()
    if order[1] == "none":  # killed in place, after a time with two places
        die_in_step(crashed, "none", 4)
        with pytest.raises(CorruptStateError, match="middle of step"):
            begin(crashed, resume=True, durability="step")
    expected.check(*begin(devices, resume=True))


@pytest.mark.parametrize("value", ["all", None, True, ""])
def test_bad_values_are_refused(value: Any, tmp_path: Path) -> None:
    for option in ("durability", "verify"):
        with pytest.raises(UnsupportedError, match=f"{option} is"):
            begin(directories(tmp_path, 1, option), **{option: value})


@pytest.mark.parametrize("durability", ["step", "none"])
def test_verify_read_notices_a_flipped_bit_in_a_step(durability: str, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices, durability=durability, verify="read")
    train(*run, range(2), net_loss)
    for state in devices[1].glob("state.*"):
        with state.open("r+b") as file:
            file.seek(100)
            file.write(b"\x5a")
    net_loss(run[0], 2).backward()
    with pytest.raises(CorruptStateError, match="state record 0"):
        run[1].step()
    with pytest.raises(CorruptStateError):
        begin(devices, resume=True, durability=durability)
