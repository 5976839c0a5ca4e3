"""What a determined user found: dropped optimizers, torn resumes, odd gradients and odd numbers."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    same_bits,
    small_net,
    train,
    weights_of,
)
from smart_infinity.errors import (
    CorruptStateError,
    OffloadedGradientError,
    OptimizerFailedError,
    StateMismatchError,
    UnsupportedError,
)


def begin(paths: list[Path], resume: bool | None = None, **options: Any) -> Any:
    model = small_net()
    optimizer = offload(
        model, OPTIMIZERS["adamw"](model.parameters()), paths, resume=resume, **options
    )
    return model, optimizer


# --- dropped without close() -------------------------------------------------------------------


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_dropped_pair_frees_everything(with_gradients: bool, tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)

    def use_and_forget(resume: bool | None) -> weakref.ref[nn.Module]:
        model, optimizer = begin(paths, resume)
        train(model, optimizer, range(2), net_loss)
        if with_gradients:
            net_loss(model, 0).backward()
        return weakref.ref(model)

    use_and_forget(None)
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(3):
        model = use_and_forget(True)  # the directories are free again
        gc.collect()
        assert model() is None
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)  # an idle worker ends soon after its pool is gone, not at once
        assert not thread.is_alive()


def test_a_model_outlives_its_dropped_optimizer(tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    model, optimizer = begin(paths)
    net_loss(model, 0).backward()
    gradient = next(model.parameters()).grad
    del optimizer
    gc.collect()
    with pytest.raises(OffloadedGradientError, match="optimizer is gone"):
        gradient.norm()
    again = offload(model, OPTIMIZERS["adamw"](model.parameters()), paths, resume=True)
    with again:
        assert next(model.parameters()).grad is None
        train(model, again, range(1), net_loss)


# --- a resume that fails -----------------------------------------------------------------------


def trained(paths: list[Path]) -> None:
    model, optimizer = begin(paths)
    with optimizer:
        train(model, optimizer, range(3), net_loss)


def test_damaged_state_leaves_an_alarm_on_the_model(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    trained(paths)
    places = [paths[1] / "state.0", paths[1] / "state.1"]
    whole = [path.read_bytes() for path in places]
    for path, data in zip(places, whole, strict=True):
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    model = small_net(seed=5)
    source = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(CorruptStateError):
        offload(model, source, paths, resume=True)
    with pytest.raises(OptimizerFailedError):
        net_loss(model, 0)
    with pytest.raises(OptimizerFailedError):
        model.state_dict()
    for path, data in zip(places, whole, strict=True):
        path.write_bytes(data)
    with offload(model, source, paths, resume=True) as optimizer:
        assert optimizer.steps == 3
        net_loss(model, 0)


@pytest.mark.parametrize("cut", [1, 3])
def test_other_groups_are_refused_before_a_weight_moves(cut: int, tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    model = small_net()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    with offload(model, torch.optim.AdamW(groups), paths, dtype=torch.bfloat16) as optimizer:
        train(model, optimizer, range(2), net_loss)
    other = small_net(seed=9)
    before, parameters = weights_of(other), list(other.parameters())
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:]}]
    with pytest.raises(StateMismatchError, match="param_groups"):
        offload(other, torch.optim.AdamW(groups), paths, resume=True, dtype=torch.bfloat16)
    assert same_bits(weights_of(other), before)
    net_loss(other, 0)


# --- gradients without memory -------------------------------------------------------------------


@pytest.mark.parametrize(
    "touch",
    [
        lambda g: g.share_memory_(),
        lambda g: g.untyped_storage(),
        lambda g: g.data_ptr(),
        lambda g: g.storage(),
        lambda g: g.pin_memory(),
        lambda g: torch.from_dlpack(g),
        lambda g: np.from_dlpack(g),
    ],
)
def test_there_is_no_way_to_the_missing_memory(touch: Any, tmp_path: Path) -> None:
    model, optimizer = begin(directories(tmp_path, 1))
    with optimizer:
        net_loss(model, 0).backward()
        with pytest.raises(OffloadedGradientError, match="to_dense"):
            touch(next(model.parameters()).grad)


def test_assigning_data_replaces_the_landed_gradient(tmp_path: Path) -> None:
    model, optimizer = begin(directories(tmp_path, 2))
    with optimizer:
        net_loss(model, 0).backward()
        weight = next(model.parameters())
        values = torch.randn_like(weight)
        weight.grad.data = values
        assert torch.equal(weight.grad.to_dense(), values)
        weight.grad.data.mul_(2)
        assert torch.equal(weight.grad.to_dense(), 2 * values)


@pytest.mark.parametrize("factors", [(1e20, 1e20), (1e-25, 1e-25), (1e30, 1e-30, 3.0), (1e-39,)])
def test_extreme_factors_act_as_in_torch(factors: tuple[float, ...], tmp_path: Path) -> None:
    model, optimizer = begin(directories(tmp_path, 1))
    with optimizer:
        weight = next(model.parameters())
        for start in (1e-30, 1e-3, 1e30):
            expected = torch.full_like(weight, start)
            weight.grad = None
            (weight * expected).sum().backward()
            for factor in factors:
                weight.grad.mul_(factor)
                expected.mul_(factor)
            got = weight.grad.to_dense()
            assert torch.allclose(got, expected, rtol=1e-6, atol=1.2e-38)
            norm, reference = weight.grad.norm(), expected.norm()
            assert norm == reference or abs(norm / expected.double().norm() - 1) < 1e-4


def test_a_norm_beyond_fp32_is_infinite_and_the_step_is_taken(tmp_path: Path) -> None:
    model, optimizer = begin(directories(tmp_path, 1))
    with optimizer:
        weight = next(model.parameters())
        weight.grad = torch.full_like(weight, 3e38)
        optimizer.step()
        assert weight.grad.norm() == torch.inf
        assert not optimizer.step_was_skipped


# --- numbers that are not plain -------------------------------------------------------------------


@pytest.mark.parametrize("lr", [np.float32(1e-3), np.array(1e-3), torch.tensor(1e-3), 1])
def test_any_kind_of_number_survives_a_resume(lr: Any, tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    model, optimizer = begin(paths)
    with optimizer:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[0]["mine"] = {"a key": "of the user's"}
        train(model, optimizer, range(1), net_loss)
        assert "mine" not in json.loads(json.dumps(optimizer.state_dict()))["param_groups"][0]
    model, optimizer = begin(paths, resume=True)
    with optimizer:
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(float(lr))
        train(model, optimizer, range(1), net_loss)


def test_a_device_may_hold_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    source = torch.optim.AdamW(model.parameters())
    with offload(model, source, directories(tmp_path, 3), device_memory="64MiB") as optimizer:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert optimizer.steps == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_transposed_sharing_is_refused(frozen: bool, tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
    model[1].weight = nn.Parameter(model[0].weight.detach().t(), requires_grad=not frozen)
    with pytest.raises(UnsupportedError, match="share memory"):
        offload(model, torch.optim.AdamW(model.parameters()), directories(tmp_path, 1))


def test_a_lazy_module_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match=r"0\.weight"):
        offload(model, torch.optim.AdamW(model.parameters()), directories(tmp_path, 1))


@pytest.mark.parametrize("change", ["cut", "grown"])
def test_a_ledger_of_another_size_still_gives_the_newest_step(change: str, tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    trained(paths)
    ledger = paths[0] / "ledger"
    data = ledger.read_bytes()
    # Step 3 lies in the second of four places and in the last.
    ledger.write_bytes(data[: len(data) // 2] if change == "cut" else data + bytes(100_000))
    with begin(paths, resume=True)[1] as optimizer:
        assert optimizer.steps == 3


def test_gradients_of_a_closed_optimizer_refuse_scaling(tmp_path: Path) -> None:
    model, optimizer = begin(directories(tmp_path, 1))
    net_loss(model, 0).backward()
    gradient = next(model.parameters()).grad
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        gradient.mul_(2)
