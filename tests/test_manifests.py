"""``state_dict()`` and ``load_state_dict()``: which step, and the way back to it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from crashes import Everything, contents, copies
from helpers import OPTIMIZERS, directories, net_loss, offload, small_net, train, two_groups
from smart_infinity import OffloadedOptimizer
from smart_infinity.errors import StateMismatchError, UnsupportedError

Run = tuple[nn.Module, OffloadedOptimizer, Any]


def begin(devices: list[Path], resume: bool | None = None, **options: Any) -> Run:
    """A run with a scheduler, registered."""
    model = small_net(seed=77 if resume else 0)
    source = OPTIMIZERS["adamw"](two_groups(model))
    optimizer = offload(model, source, devices, resume=resume, **options)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_for_checkpointing(scheduler)
    return model, optimizer, scheduler


def go(run: Run, first: int, last: int) -> Everything:
    """Make the steps ``first`` to ``last``; returns what there is then."""
    model, optimizer, scheduler = run
    train(model, optimizer, range(first, last + 1), net_loss, scheduler=scheduler)
    return Everything(*run)


def names(run: Run) -> list[str]:
    return [own.name for own in run[1].snapshots()]


def test_a_manifest_survives_torchs_files(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    two = go(run, 1, 2)
    file = io.BytesIO()
    torch.save(run[1].state_dict(), file)
    assert names(run) == ["step-2"]
    made = contents(devices)
    assert run[1].state_dict()["smart_infinity"]["step"] == 2
    assert contents(devices) == made, "once"
    five = go(run, 3, 5)
    file.seek(0)
    manifest = torch.load(file, weights_only=True)
    run[1].load_state_dict(manifest)
    two.check(*run)
    go(run, 3, 5)
    five.check(*run)


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_the_last_ones_are_kept(keep: int, tmp_path: Path) -> None:
    run = begin(directories(tmp_path, 2), keep_snapshots=keep)
    manifests, there = [run[1].state_dict()], {}
    assert names(run) == [], "none at step 0"
    run[1].load_state_dict(manifests[0])
    run[1].snapshot("mine")
    for n in range(1, 13):
        there[n] = go(run, n, n)
        manifests.append(run[1].state_dict())
    kept = list(range(13 - keep, 13))
    assert names(run) == ["mine", *[f"step-{n}" for n in kept]], "12 is not older than 9"
    for n in range(1, 12):
        if n not in kept:
            with pytest.raises(StateMismatchError, match=f"is of step {n}, which") as caught:
                run[1].load_state_dict(manifests[n])
            for part in ("They hold step 12", "mine (step 0)", *[f"step-{k} (" for k in kept]):
                assert part in str(caught.value)
            there[12].check(*run)
    run[1].load_state_dict(manifests[12])  # the committed step needs no snapshot
    there[12].check(*run)
    for n in kept:
        run[1].load_state_dict(manifests[n])
        there[n].check(*run)


@pytest.mark.parametrize("keep", [-1, 1.5, "2", None])
def test_bad_numbers_of_snapshots_are_refused(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="keep_snapshots is"):
        begin(directories(tmp_path, 1), keep_snapshots=keep)


def test_a_manifest_of_step_0_is_gone_later(tmp_path: Path) -> None:
    run = begin(directories(tmp_path, 1))
    manifest = run[1].state_dict()
    go(run, 1, 1)
    with pytest.raises(StateMismatchError, match="is of step 0, which the devices no longer hold"):
        run[1].load_state_dict(manifest)


def test_a_manifest_is_good_in_a_later_run(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices)
    three = go(run, 1, 3)
    manifest = run[1].state_dict()
    six = go(run, 4, 6)
    crashed = copies(devices, tmp_path / "crash")
    again = begin(crashed, resume=True)
    six.check(*again)
    again[1].load_state_dict(manifest)
    three.check(*again)
    crashed = copies(crashed, tmp_path / "crash2")
    again = begin(crashed, resume=True)
    three.check(*again)
    again[1].load_state_dict(manifest)
    go(again, 4, 6)
    six.check(*again)


def test_a_manifest_is_good_for_more_than_one_return(tmp_path: Path) -> None:
    """A checkpoint of a trainer lies in a file: asking for another must not spoil it."""
    run = begin(directories(tmp_path, 2))
    two = go(run, 1, 2)
    manifest = run[1].state_dict()
    go(run, 3, 4)
    run[1].load_state_dict(manifest)
    two.check(*run)
    again = run[1].state_dict()
    go(run, 3, 3)
    for own in (manifest, again, manifest):
        run[1].load_state_dict(own)
        two.check(*run)


def test_the_same_step_of_another_history_is_not_confused(tmp_path: Path) -> None:
    run = begin(directories(tmp_path, 2), keep_snapshots=5)
    go(run, 1, 2)
    two = run[1].state_dict()
    there = {"old": go(run, 3, 4)}
    old = run[1].state_dict()
    run[1].load_state_dict(two)
    there["new"] = go(run, 13, 14)  # other batches: another step 4
    assert run[1].steps == 4
    with pytest.raises(AssertionError):
        there["old"].check(*run)
    new = run[1].state_dict()
    assert old["smart_infinity"]["step"] == new["smart_infinity"]["step"] == 4
    go(run, 15, 15)
    run[1].load_state_dict(new)
    there["new"].check(*run)
    with pytest.raises(StateMismatchError, match="is of step 4, which the devices no longer hold"):
        run[1].load_state_dict(old)
    there["new"].check(*run)


def test_a_snapshot_of_ones_own_serves_as_well(tmp_path: Path) -> None:
    run = begin(directories(tmp_path, 2), keep_snapshots=0)
    two = go(run, 1, 2)
    manifest = run[1].state_dict()
    run[1].snapshot("best")
    go(run, 3, 4)
    run[1].load_state_dict(manifest)
    two.check(*run)


@pytest.mark.parametrize("change", ["set", "layout", "groups", "torch", "empty"])
def test_manifests_of_others_are_refused(change: str, tmp_path: Path) -> None:
    run = begin(directories(tmp_path, 2))
    here = go(run, 1, 2)
    manifest = run[1].state_dict()
    if change == "set":
        other = begin(directories(tmp_path, 2, "other"))
        go(other, 1, 2)
        manifest = other[1].state_dict()
    elif change == "layout":
        manifest["smart_infinity"]["layout_hash"] = "0" * 16
    elif change == "groups":
        manifest["param_groups"] = manifest["param_groups"][:1]
    elif change == "torch":
        twin = small_net()
        manifest = OPTIMIZERS["adamw"](two_groups(twin)).state_dict()
    else:
        manifest = {}
    with pytest.raises(StateMismatchError, match="Expected"):
        run[1].load_state_dict(manifest)
    here.check(*run)


@pytest.mark.parametrize("durability", ["step", "none"])
def test_accelerates_way(durability: str, tmp_path: Path) -> None:
    """`accelerate` calls both at once when it wraps an optimizer, at step 0 and after a resume."""
    devices = directories(tmp_path, 2)
    run = begin(devices, durability=durability)
    run[1].load_state_dict(run[1].state_dict())
    assert names(run) == []
    there = go(run, 1, 3)
    run[1].load_state_dict(run[1].state_dict())
    there.check(*run)
    later = go(run, 4, 5)
    run[1].close()
    run = begin(devices, resume=True, durability=durability)
    run[1].load_state_dict(run[1].state_dict())
    later.check(*run)
    go(run, 6, 6)
    run[1].close()


def test_accelerate_itself(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    devices = directories(tmp_path, 2)
    run = begin(devices)
    wrapper = accelerate.optimizer.AcceleratedOptimizer
    accelerate.Accelerator(cpu=True)
    wrapped = wrapper(run[1], device_placement=True)
    there = go(run, 1, 3)
    manifest = wrapped.state_dict()
    go(run, 4, 4)
    wrapped.load_state_dict(manifest)
    there.check(*run)
    accelerate.state.AcceleratorState._reset_state(True)
