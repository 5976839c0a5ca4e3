"""Begin anew, continue, or refuse: decided over the whole set, and without losing anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from ledgers import US, contents, record
from smart_infinity.devices.local import LocalDevice
from smart_infinity.errors import (
    CorruptStateError,
    DeviceIOError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.layout import FORMAT_VERSION, ParameterSpec, plan_layout
from smart_infinity.recovery import recover
from smart_infinity.storage.ledger import LedgerContents
from smart_infinity.storage.superblock import Superblock

LAYOUT = plan_layout([ParameterSpec("w", (9000,), "float32")], "sgd", (), 2)
SUPERBLOCK = Superblock(FORMAT_VERSION, "uuid", 0, 2, LAYOUT.hash(), "sgd", "Net")
EMPTY = LedgerContents([], [])


@dataclass
class Held:
    """A device as far as it is asked what it holds."""

    path: str
    superblock: Superblock | None
    ledger: LedgerContents

    def identify(self, notes: list[str] | None = None) -> Superblock | None:
        return self.superblock

    def recorded_steps(self) -> LedgerContents:
        return self.ledger


def decide(*ledgers: LedgerContents | None, resume: bool | None = True) -> Any:
    """Of devices with these ledgers; None: a directory without a state."""
    devices: list[Any] = [
        Held(f"/{number}", None, EMPTY)
        if ledger is None
        else Held(f"/{number}", replace(SUPERBLOCK, device_index=number), ledger)
        for number, ledger in enumerate(ledgers)
    ]
    return recover(devices, LAYOUT, resume)


@pytest.mark.parametrize("resume", [True, False, None])
def test_nothing_of_value_begins_anew(resume: bool | None) -> None:
    first, other = contents(record(0)), contents(record(0, b"o" * 16))
    for held in ([None, None], [first, None], [None, first], [first, first], [first, other]):
        assert decide(*held, resume=resume) is None


def test_any_step_of_value_is_continued_or_refused() -> None:
    step, first = contents(record(1), record(0)), contents(record(0))
    found = decide(step, first)
    assert [own.step for own in found.records] == [0, 0]
    with pytest.raises(StateExistsError, match="step 1"):
        decide(step, first, resume=None)
    for held in ([step, None], [None, step]):
        for resume in (True, None):
            expected = StateMismatchError if resume else StateExistsError
            with pytest.raises(expected, match="holds no state"):
                decide(*held, resume=resume)
    assert decide(step, None, resume=False) is None


def test_a_torn_first_step_in_place_is_refused() -> None:
    torn = contents(record(1, dirty=True), record(0))
    with pytest.raises(CorruptStateError, match="middle of step 1"):
        decide(torn, contents(record(0)))


def test_a_state_whose_ledger_is_gone_is_refused() -> None:
    with pytest.raises(CorruptStateError, match="/1 has a superblock, but no record"):
        decide(contents(record(4)), EMPTY)


def test_a_set_that_went_back_to_its_first_state_is_of_value() -> None:
    """Its snapshots are: they are of later steps, and beginning anew removes them."""
    found = decide(*[contents(record(0, US, branch=1))] * 2)
    assert found is not None
    assert found.records[0].step_id == (1, 0, US)
    with pytest.raises(StateExistsError):
        decide(*[contents(record(0, US, branch=1))] * 2, resume=None)


def test_going_back_to_the_first_state_keeps_later_snapshots(tmp_path: Path) -> None:
    """The same, as a user meets it: a snapshot of step 3 is not lost by two restarts."""
    (path,) = helpers.directories(tmp_path, 1)
    model = helpers.small_net()

    def offload(resume: bool | None) -> Any:
        sgd = helpers.OPTIMIZERS["sgd-momentum"](model.parameters())
        return helpers.offload(model, sgd, [path], resume=resume, durability="none")

    with offload(None) as optimizer:
        optimizer.snapshot("begin")
        helpers.train(model, optimizer, range(3), helpers.net_loss)
        optimizer.snapshot("three")
        at_three = helpers.weights_of(model)
        optimizer.restore("begin")
    with offload(True) as optimizer:
        assert [own.name for own in optimizer.snapshots()] == ["begin", "three"]
        optimizer.restore("three")
        assert helpers.same_bits(helpers.weights_of(model), at_three)


def test_a_snapshot_after_a_torn_amendment_keeps_what_the_run_went_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash amended device 1 only; the resume takes that; so must going back to it later."""
    paths = helpers.directories(tmp_path, 2)

    def begin(resume: bool | None) -> tuple[Any, Any, Any]:
        model = helpers.tiny_gpt()
        sgd = helpers.OPTIMIZERS["sgd-momentum"](model.parameters())
        optimizer = helpers.offload(model, sgd, paths, resume=resume)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.register_for_checkpointing(scheduler)
        return model, optimizer, scheduler

    model, optimizer, scheduler = begin(None)
    real = LocalDevice.amend

    def amend(device: LocalDevice, blob: bytes) -> None:
        if device.path == str(paths[0]):
            raise DeviceIOError(device.path, "blob", "write", 0, 5)
        real(device, blob)

    helpers.gpt_loss(model, 0).backward()
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(LocalDevice, "amend", amend)
        with pytest.raises(DeviceIOError):
            scheduler.step()  # the first call after a step is never foreseen
    model, optimizer, scheduler = begin(True)
    before, rate = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    assert before["last_epoch"] == 1, "the amendment counts"
    optimizer.snapshot("one")
    for seed in (1, 2):
        helpers.gpt_loss(model, seed).backward()
        optimizer.step()
        scheduler.step()
    optimizer.restore("one")
    assert (scheduler.state_dict(), optimizer.param_groups[0]["lr"]) == (before, rate)
    optimizer.close()
