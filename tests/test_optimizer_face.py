"""`OffloadedOptimizer` is an optimizer of torch in every respect that loops rely on."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import smart_infinity
from helpers import (
    OPTIMIZERS,
    directories,
    distance,
    net_loss,
    offload,
    same_bits,
    small_net,
    train,
    two_groups,
    weights_of,
)
from smart_infinity import OffloadedOptimizer
from smart_infinity.errors import StateMismatchError, UnsupportedError

Pair = tuple[nn.Module, OffloadedOptimizer]

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[2],
    ),
}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    model = small_net()
    with offload(
        model, OPTIMIZERS["adamw"](two_groups(model)), directories(tmp_path, 2)
    ) as optimizer:
        yield model, optimizer


def test_is_an_optimizer(pair: Pair) -> None:
    model, optimizer = pair
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert "lr: 0.003" in repr(optimizer)


def test_groups_are_those_of_the_torch_optimizer(tmp_path: Path) -> None:
    model = small_net()
    source = OPTIMIZERS["adamw"](two_groups(model))
    with offload(model, source, directories(tmp_path, 1)) as optimizer:
        assert optimizer.param_groups is source.param_groups
        before = weights_of(model)
        source.param_groups[0]["lr"] = source.param_groups[1]["lr"] = 0.0
        train(model, optimizer, range(1), net_loss)
        assert same_bits(weights_of(model), before)


def test_named_parameters(tmp_path: Path) -> None:
    model = small_net()
    source = torch.optim.AdamW(model.named_parameters())
    with offload(model, source, directories(tmp_path, 1)) as optimizer:
        train(model, optimizer, range(1), net_loss)
        names = optimizer.state_dict()["param_groups"][0]["param_names"]
        assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(name: str, when: str, tmp_path: Path) -> None:
    """Warnings are errors here, also the one about the order of the two ``step()`` calls."""
    model, twin = small_net(), small_net()
    source, theirs = (OPTIMIZERS["adamw"](two_groups(m)) for m in (model, twin))
    schedule = SCHEDULES[name](source) if when == "before" else None
    with offload(model, source, directories(tmp_path, 2)) as optimizer:
        schedule = schedule or SCHEDULES[name](optimizer)
        train(model, optimizer, range(6), net_loss, scheduler=schedule)
        train(twin, theirs, range(6), net_loss, scheduler=SCHEDULES[name](theirs))
        for ours, group in zip(optimizer.param_groups, theirs.param_groups, strict=True):
            assert ours["lr"] == group["lr"]
    assert distance(weights_of(model), weights_of(twin)) < 1e-6


def test_reduce_on_plateau(pair: Pair) -> None:
    model, optimizer = pair
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        train(model, optimizer, range(1), net_loss)
        schedule.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-5)


def test_step_hooks(pair: Pair) -> None:
    model, optimizer = pair
    calls: list[tuple[str, int]] = []
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(("before", o.steps)))
    optimizer.register_step_post_hook(lambda o, *_: calls.append(("after", o.steps)))
    train(model, optimizer, range(2), net_loss)
    assert calls == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]


def test_closure(tmp_path: Path) -> None:
    model, twin = small_net(), small_net()
    theirs = OPTIMIZERS["adamw"](twin.parameters())
    source = OPTIMIZERS["adamw"](model.parameters())
    with offload(model, source, directories(tmp_path, 2)) as optimizer:
        for own, side in ((optimizer, model), (theirs, twin)):

            def closure(own: Any = own, side: Any = side) -> torch.Tensor:
                own.zero_grad()
                loss = net_loss(side, 0)
                loss.backward()
                return loss

            losses = [own.step(closure).detach() for _ in range(3)]
            assert losses[0] > losses[2]
    assert distance(weights_of(model), weights_of(twin)) < 1e-6


def test_state_dict_is_a_small_manifest(pair: Pair) -> None:
    model, optimizer = pair
    train(model, optimizer, range(2), net_loss)
    optimizer.traffic.reset()
    state = optimizer.state_dict()
    assert not any(optimizer.traffic.as_dict().values())
    assert set(state) >= {"state", "param_groups"}
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 10_000
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again == state
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.load_state_dict(again)
    assert optimizer.param_groups[0]["lr"] == 3e-3
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    train(model, optimizer, range(1), net_loss)
    assert optimizer.steps == 3
    optimizer.load_state_dict(again)  # the devices have moved on, and kept that step
    assert optimizer.steps == optimizer.committed_step == 2


def test_a_state_dict_of_torch_is_refused(pair: Pair) -> None:
    model, optimizer = pair
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(two_groups(twin))
    train(twin, theirs, range(1), net_loss)
    with pytest.raises(StateMismatchError, match="state_dict"):
        optimizer.load_state_dict(theirs.state_dict())


def test_add_param_group_is_refused(pair: Pair) -> None:
    _, optimizer = pair
    with pytest.raises(UnsupportedError, match="before offload"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_are_refused(duplicate: Callable[[Any], Any], pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        duplicate(pair[1])


def test_the_model_can_be_copied_and_pickled(pair: Pair) -> None:
    model, optimizer = pair
    train(model, optimizer, range(1), net_loss)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert same_bits(weights_of(twin), weights_of(model))


def test_with_closes_also_after_an_error(tmp_path: Path) -> None:
    model, devices = small_net(), directories(tmp_path, 1)
    source = torch.optim.AdamW(model.parameters())
    with pytest.raises(ZeroDivisionError), offload(model, source, devices):
        raise ZeroDivisionError
    source = torch.optim.AdamW(model.parameters())
    offload(model, source, devices).close()


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("adamw", {"exp_avg", "exp_avg_sq", "step"}),
        ("adam", {"exp_avg", "exp_avg_sq", "step"}),
        ("sgd-momentum", {"momentum_buffer"}),
        ("sgd-plain", set()),
        ("adagrad", {"sum", "step"}),
    ],
)
def test_read_state_by_torchs_names(name: str, moments: set[str], tmp_path: Path) -> None:
    model = small_net()
    source = OPTIMIZERS[name](model.parameters())
    devices = directories(tmp_path, 2)
    with offload(model, source, devices, dtype=torch.bfloat16) as optimizer:
        state = optimizer.read_state(model[0].weight)
        assert set(state) == {"master"} | moments
        assert same_bits([state["master"]], [small_net()[0].weight.detach()]), "before the cast"
        if "sum" in state:
            assert (state["sum"] == torch.tensor(0.01)).all()
        train(model, optimizer, range(3), net_loss)
        for kind, value in optimizer.read_state(model[0].weight).items():
            assert value.dtype is torch.float32
            assert value.shape == (() if kind == "step" else model[0].weight.shape)
        with pytest.raises(UnsupportedError, match="read_state"):
            optimizer.read_state(nn.Parameter(torch.ones(3)))


def test_offload_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_net()
    source = torch.optim.AdamW(model.parameters())
    with (
        caplog.at_level(logging.INFO, "smart_infinity"),
        offload(model, source, directories(tmp_path, 2)),
    ):
        (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    elements = sum(p.numel() for p in model.parameters())
    assert f"{elements:,} parameters to 2 device(s)" in line
    assert re.search(r"reserved on each.*written to each.*per step.*steps until a 600 TBW", line)


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", smart_infinity.__version__)


def test_the_superseded_optimizer_refuses_to_step(tmp_path: Path) -> None:
    model = small_net()
    source = OPTIMIZERS["adamw"](model.parameters())
    optimizer = offload(model, source, directories(tmp_path, 1))
    net_loss(model, 0).backward()
    before = weights_of(model)
    with pytest.raises(UnsupportedError, match="the one that offload\\(\\) returned"):
        source.step()
    assert same_bits(weights_of(model), before)
    optimizer.close()
    net_loss(model, 0).backward()
    source.step()  # an ordinary optimizer again
    assert not same_bits(weights_of(model), before)


def test_adagrads_sums_do_not_stay_in_memory(tmp_path: Path) -> None:
    model = small_net()
    source = OPTIMIZERS["adagrad"](model.parameters())
    with offload(model, source, directories(tmp_path, 1)):
        assert not source.state
