"""The same numbers as torch, on any number of devices.

"No farther than": the relative L2 distance over everything to a run in float64 is at most twice
that of torch's own run in fp32. Every run computes its gradients from its own weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    OPTIMIZERS,
    distance,
    directories,
    gpt_loss,
    offload,
    offloaded_moments,
    same_bits,
    tiny_gpt,
    torch_moments,
    train,
    two_groups,
    weights_of,
)
from torch import Tensor, nn

from smart_infinity import layout, planning

STEPS = 20

State = dict[str, list[Tensor]]
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, 1e-4)


@functools.cache
def in_torch(name: str, dtype: torch.dtype) -> State:
    """Weights and moments after the run in plain torch."""
    model = tiny_gpt().to(dtype)
    optimizer = OPTIMIZERS[name](two_groups(model))
    norms = train(model, optimizer, range(STEPS), scheduler=cosine(optimizer))
    moments = torch_moments(model, optimizer)
    return {"norm": [torch.tensor(norms)], "master": weights_of(model), **moments}


def on_devices(name: str, base: Path, count: int, **options: object) -> State:
    """The same of the offloaded run."""
    model = tiny_gpt()
    optimizer = offload(
        model, OPTIMIZERS[name](two_groups(model)), directories(base, count), **options
    )
    with optimizer:
        norms = train(model, optimizer, range(STEPS), scheduler=cosine(optimizer))
        state = offloaded_moments(model, optimizer)
    assert same_bits(state["master"], weights_of(model))
    return {"norm": [torch.tensor(norms)], **state}


@each_optimizer
def test_fp32_is_as_near_to_float64_as_torch(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    exact, theirs = in_torch(name, torch.float64), in_torch(name, torch.float32)
    one = on_devices(name, tmp_path / "1", 1)
    for kind, values in exact.items():
        if kind == "step":
            assert one[kind] == values
            continue
        ours, torchs = distance(one[kind], values), distance(theirs[kind], values)
        record_property(f"{name} {kind} ours/torch", f"{ours:.3g}/{torchs:.3g}")
        assert ours <= 2 * torchs, kind
    for count in (2, 3):
        many = on_devices(name, tmp_path / str(count), count)
        for kind, values in one.items():
            assert same_bits(many[kind], values), f"{kind} on {count} devices"


@pytest.mark.parametrize("count", [5, 16])
def test_more_devices_than_blocks_in_a_parameter(count: int, tmp_path: Path) -> None:
    one = on_devices("adamw", tmp_path / "one", 1)
    many = on_devices("adamw", tmp_path / "many", count)
    for kind, values in one.items():
        assert same_bits(many[kind], values), kind


@pytest.mark.parametrize("record_elements", [777, 3 * layout.BLOCK_ELEMENTS, 30011])
@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_the_cut_into_records_changes_nothing(
    name: str, record_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = on_devices(name, tmp_path / "whole", 2)
    cut = functools.partial(layout.plan_layout, record_elements=record_elements)
    monkeypatch.setattr(planning, "plan_layout", cut)
    pieces = on_devices(name, tmp_path / "pieces", 2)
    for kind, values in whole.items():
        assert same_bits(pieces[kind], values), kind


@pytest.mark.long
@each_optimizer
@pytest.mark.parametrize("seed", range(5))
def test_random_cuts(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 17, (), generator=draw))
    elements = int(torch.randint(64, 100_000, (), generator=draw))
    whole = on_devices(name, tmp_path / "whole", 1)
    cut = functools.partial(layout.plan_layout, record_elements=elements)
    monkeypatch.setattr(planning, "plan_layout", cut)
    pieces = on_devices(name, tmp_path / "pieces", count)
    for kind, values in whole.items():
        assert same_bits(pieces[kind], values), f"{kind}: {count} devices, {elements} in a record"


# --- 16 bits ---------------------------------------------------------------------------------


def mixed_loop(name: str, model: nn.Module, half: torch.dtype, wide: torch.dtype) -> State:
    """The explicit loop in plain torch: masters, ``p.grad.float()``, clip, step, copy back."""
    masters = copy.deepcopy(model).to(wide)
    optimizer = OPTIMIZERS[name](two_groups(masters))
    schedule = cosine(optimizer)
    model.to(half)
    for seed in range(STEPS):
        gpt_loss(model, seed).backward()
        for p, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad, p.grad = p.grad.to(wide), None
        nn.utils.clip_grad_norm_(masters.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    moments = torch_moments(masters, optimizer)
    return {"master": weights_of(masters), "weights": weights_of(model), **moments}


@functools.cache
def mixed_in_torch(name: str, half: torch.dtype, wide: torch.dtype) -> State:
    return mixed_loop(name, tiny_gpt(width=35), half, wide)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@each_optimizer
def test_16_bits_against_an_explicit_loop(name: str, half: torch.dtype, tmp_path: Path) -> None:
    runs = []
    for count in (1, 2, 3):
        model = tiny_gpt(width=35)
        source = OPTIMIZERS[name](two_groups(model))
        devices = directories(tmp_path / str(count), count)
        with offload(model, source, devices, dtype=half) as optimizer:
            assert all(p.dtype is half for p in model.parameters())
            train(model, optimizer, range(STEPS), scheduler=cosine(optimizer))
            state = offloaded_moments(model, optimizer)
        assert same_bits([m.to(half) for m in state["master"]], weights_of(model))
        runs.append(state)
    assert all(same_bits(run[kind], runs[0][kind]) for run in runs for kind in runs[0])
    exact = mixed_in_torch(name, half, torch.float64)
    theirs = mixed_in_torch(name, half, torch.float32)
    for kind in set(exact) - {"step", "weights"}:
        print(name, half, kind, distance(runs[0][kind], exact[kind]), distance(theirs[kind], exact[kind]), distance(runs[0][kind], theirs[kind]))
