"""`OffloadedGradient`: what training loops do to gradients, beside plain torch doing the same."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import (
    directories,
    distance,
    net_loss,
    offload,
    same_bits,
    small_net,
    train,
    weights_of,
)
from smart_infinity import OffloadedGradient, OffloadedOptimizer
from smart_infinity.errors import OffloadedGradientError, UnsupportedError

HALVES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = [2.0, 1.0, 3.0, math.inf, 0.5, 0.0]

Pair = tuple[nn.Module, OffloadedOptimizer, nn.Module, torch.optim.Optimizer]


def odd_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """5000 elements in one matrix (two blocks), a 0-dim and an empty parameter."""
    model = small_net()
    model.append(nn.Linear(1, 5000, bias=False))
    model.scale = nn.Parameter(torch.tensor(0.7))
    model.empty = nn.Parameter(torch.empty(3, 0))
    return model.to(dtype)


def odd_loss(model: nn.Module, seed: int) -> Tensor:
    return net_loss(model, seed) * model.scale.float() + model.empty.sum()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """An offloaded model on two devices, and its twin in plain torch."""
    ours, twin = odd_net(), odd_net()
    optimizer = offload(ours, adamw(ours), directories(tmp_path, 2))
    yield ours, optimizer, twin, adamw(twin)
    optimizer.close()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def grads(model: nn.Module) -> list[Tensor]:
    """All gradients, dense."""
    return [p.grad.to_dense() if p.grad is not None else torch.zeros(0) for p in model.parameters()]


def assert_close(ours: Any, theirs: Any, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-10)


def backward(*models: nn.Module, seed: int = 0) -> None:
    for model in models:
        odd_loss(model, seed).backward()


def step_both(pair: Pair, tolerance: float = 3e-6) -> None:
    """A step on both sides; the weights must agree after it."""
    ours, optimizer, twin, theirs = pair
    optimizer.step()
    theirs.step()
    assert_near(ours, twin, tolerance)


def assert_near(ours: nn.Module, twin: nn.Module, tolerance: float = 3e-6) -> None:
    """Weights agree to the rounding of some steps; `test_parity` is the exacting judge."""
    assert distance(weights_of(ours), weights_of(twin)) < tolerance


# --- what it is ------------------------------------------------------------------------------


def test_looks_like_the_gradient_of_its_parameter(pair: Pair) -> None:
    ours, _, twin, _ = pair
    assert all(p.grad is None for p in ours.parameters())
    backward(ours, twin)
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        grad = p.grad
        assert type(grad) is OffloadedGradient
        assert isinstance(grad, torch.Tensor)
        assert (grad.shape, grad.dtype, grad.device) == (p.shape, torch.float32, p.device)
        assert grad.detach() is grad
        assert grad.data is not None
        assert name in repr(grad)
        assert str(tuple(p.shape)) in repr(grad)
        assert torch.equal(grad.to_dense(), q.grad)
        assert p.grad is grad


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values_are_those_of_autograd(dtype: torch.dtype, tmp_path: Path) -> None:
    ours, twin = odd_net(dtype), odd_net(dtype)
    with offload(ours, adamw(ours), directories(tmp_path, 3)):
        backward(ours, twin)
        assert same_bits(grads(ours), [q.grad.float() for q in twin.parameters()])
        assert all(p.grad.dtype is torch.float32 for p in ours.parameters())


def test_hooks_of_the_user_run_first(tmp_path: Path) -> None:
    ours, twin = odd_net(), odd_net()
    seen: list[type] = []
    for model in (ours, twin):
        model[0].weight.register_hook(lambda g: g * 3)
    ours[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    with offload(ours, adamw(ours), directories(tmp_path, 1)):
        ours[2].weight.register_hook(lambda g: g * 5)
        twin[2].weight.register_hook(lambda g: g * 5)
        ours[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
        backward(ours, twin)
        assert same_bits(grads(ours), [q.grad for q in twin.parameters()])
    assert seen == [Tensor, OffloadedGradient]


def test_autograd_grad_is_untouched(pair: Pair) -> None:
    ours, optimizer, twin, _ = pair
    parameters = list(ours.parameters())
    found = torch.autograd.grad(odd_loss(ours, 0), parameters)
    backward(twin)
    assert same_bits(found, [q.grad for q in twin.parameters()])
    assert all(p.grad is None for p in parameters)
    assert optimizer.traffic.gradients_to_device == 0


def test_checkpointing_without_reentrance(pair: Pair) -> None:
    ours, _, twin, _ = pair
    x = torch.randn(4, 7)
    hidden = torch.utils.checkpoint.checkpoint(ours[:5], x, use_reentrant=False)
    ours[5](hidden).square().mean().backward()
    twin(x).square().mean().backward()
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad.to_dense(), q.grad)


# --- norms and clipping ----------------------------------------------------------------------


@pytest.mark.parametrize("power", [*NORMS, -math.inf])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_norms(power: float, dtype: torch.dtype, tmp_path: Path) -> None:
    model = odd_net(dtype)
    del model.empty
    model.empty = torch.zeros(0)
    with offload(model, adamw(model), directories(tmp_path, 3)):
        backward(model)
        changes: list[Callable[[Tensor], Any]] = [
            lambda g: None,
            lambda g: g.mul_(-0.37),
            lambda g: g.clamp_(-1e-3, 2e-3),
            lambda g: g.mul_(torch.tensor(-4.0)),
            lambda g: g.clamp_(min=1e-4),
        ]
        for change in changes:
            with torch.no_grad():
                own = [p.grad for p in model.parameters()]
                for grad in own:
                    change(grad)
                dense = grads(model)
                theirs = [torch.linalg.vector_norm(g.double(), power).float() for g in dense]
                assert_close([torch.linalg.vector_norm(g, power) for g in own], theirs, 1e-5)
                assert_close([g.norm(power) for g in own], theirs, 1e-5)
                assert_close(list(torch._foreach_norm(own, power)), theirs, 1e-5)
        assert own[0].norm(dtype=torch.float64).dtype is torch.float64
        assert torch.linalg.vector_norm(model[0].weight.grad, keepdim=True).shape == (1, 1)


@pytest.mark.parametrize("foreach", [None, True], ids=["each", "foreach"])
@pytest.mark.parametrize("power", NORMS)
def test_clip_grad_norm(power: float, foreach: bool | None, pair: Pair) -> None:
    ours, _, twin, _ = pair
    for model in (ours, twin):  # torch has no infinity norm of an empty tensor
        model.empty.requires_grad_(False)
    backward(ours, twin)
    for limit in (0.02, 1e6):
        found = nn.utils.clip_grad_norm_(ours.parameters(), limit, power, foreach=foreach)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), limit, power)
        assert_close(found, expected, 3e-4)  # torch sums in fp32
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            if q.grad is not None:
                assert_close(p.grad.to_dense(), q.grad, 3e-4)
    step_both(pair, 1e-5)


@pytest.mark.parametrize("foreach", [None, True], ids=["each", "foreach"])
def test_clip_grad_value(foreach: bool | None, pair: Pair) -> None:
    ours, _, twin, _ = pair
    backward(ours, twin)
    nn.utils.clip_grad_value_(ours.parameters(), 1e-3, foreach=foreach)
    nn.utils.clip_grad_value_(twin.parameters(), 1e-3)
    assert same_bits(grads(ours), [q.grad for q in twin.parameters()])
    step_both(pair)


def test_total_norm_without_clipping(pair: Pair) -> None:
    ours, _, twin, _ = pair
    backward(ours, twin)
    total = [nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (ours, twin)]
    assert_close(total[0], total[1])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_error_if_nonfinite(value: float, pair: Pair) -> None:
    ours = pair[0]
    ours[2].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), value))
    backward(ours)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0, error_if_nonfinite=True)
    assert not nn.utils.clip_grad_norm_(ours.parameters(), 1.0).isfinite()


# --- scaling, clamping, zero -------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda gs: [g.mul_(0.25) for g in gs],
        lambda gs: [g.mul_(torch.tensor(0.25)) for g in gs],
        lambda gs: [g.div_(3) for g in gs],
        lambda gs: [g.div_(torch.tensor(-8.0, dtype=torch.float64)) for g in gs],
        lambda gs: [g.clamp_(-1e-3, 1e-4) for g in gs],
        lambda gs: [g.clamp_(max=1e-4) for g in gs],
        lambda gs: [g.clamp_min_(-1e-4) for g in gs],
        lambda gs: [g.clamp_max_(1e-4) for g in gs],
        lambda gs: [g.mul_(-3).clamp_(-1e-3, 1e-4).div_(7).clamp_(-1e-4).mul_(0.5) for g in gs],
        lambda gs: [g.mul_(0).clamp_(1e-3, 1e-2) for g in gs],
        lambda gs: [g.zero_() for g in gs],
        lambda gs: torch._foreach_mul_(gs, 0.25),
        lambda gs: torch._foreach_mul_(gs, torch.tensor(0.25)),
        lambda gs: torch._foreach_mul_(gs, [0.5 + n for n in range(len(gs))]),
        lambda gs: torch._foreach_div_(gs, 3.0),
        lambda gs: torch._foreach_div_(gs, [0.5 + n for n in range(len(gs))]),
        lambda gs: torch._foreach_clamp_min_(gs, -1e-4),
        lambda gs: torch._foreach_clamp_max_(gs, 1e-4),
        lambda gs: torch._foreach_zero_(gs),
    ],
)
@torch.no_grad()
def test_changes_in_place(change: Callable[[list[Tensor]], Any], pair: Pair) -> None:
    ours, _, twin, _ = pair
    with torch.enable_grad():
        backward(ours, twin)
    for model in (ours, twin):
        change([p.grad for p in model.parameters()])
    assert_close(grads(ours), [q.grad for q in twin.parameters()], 1e-6)
    step_both(pair)
    with torch.enable_grad():
        backward(ours, twin, seed=1)
    assert distance(grads(ours), [q.grad for q in twin.parameters()]) < 1e-5
    step_both(pair)


@pytest.mark.parametrize("through", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(through: str, to_none: bool, pair: Pair) -> None:
    ours, optimizer, twin, theirs = pair
    for seed in range(2):
        backward(ours, twin, seed=seed)
        step_both(pair)
        (optimizer if through == "optimizer" else ours).zero_grad(set_to_none=to_none)
        (theirs if through == "optimizer" else twin).zero_grad(set_to_none=to_none)
        assert all((p.grad is None) is to_none for p in ours.parameters())
        step_both(pair)  # a zero gradient moves by momentum, an absent one does not
    counts = [int(optimizer.read_state(p)["step"]) for p in ours.parameters()]
    assert counts == [2 if to_none else 4] * len(counts)


def test_a_second_step_applies_the_landed_gradient_again(pair: Pair) -> None:
    ours, _, twin, _ = pair
    backward(ours, twin)
    nn.utils.clip_grad_norm_(ours.parameters(), 0.01)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    for _ in range(3):
        step_both(pair)


def test_a_dense_gradient_may_be_assigned(pair: Pair) -> None:
    ours, optimizer, twin, _ = pair
    backward(ours, twin)
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        if p.dim() < 2:
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    ours[0].weight.grad = torch.full((7, 33), 0.5, dtype=torch.float64).t().to(torch.bfloat16)
    twin[0].weight.grad = torch.full((33, 7), 0.5)
    ours[2].weight.grad = ours[2].weight.grad.to_dense() * 2
    twin[2].weight.grad.mul_(2)
    assert_close(
        nn.utils.clip_grad_norm_(ours.parameters(), 0.5),
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5),
        1e-3,
    )
    ours[0].weight.grad = twin[0].weight.grad.clone()  # bf16 rounded the clipped value
    step_both(pair)
    assert all(type(p.grad) is OffloadedGradient for p in ours.parameters())
    optimizer.zero_grad()
    twin.zero_grad()
    for p, q in ((ours[0].weight, twin[0].weight), (ours[2].bias, twin[2].bias)):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    backward(ours, twin)
    step_both(pair)


# --- accumulation ----------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scaling", [False, True], ids=["plain", "scaled"])
def test_accumulation_is_exact(
    times: int, dtype: torch.dtype, scaling: bool, tmp_path: Path
) -> None:
    ours, twin = odd_net(dtype), odd_net(dtype)
    sums: list[Tensor] = []
    with offload(ours, adamw(ours), directories(tmp_path, 2)) as optimizer:
        for seed in range(times):
            twin.zero_grad()
            backward(ours, twin, seed=seed)
            added = [q.grad.float() for q in twin.parameters()]
            sums = [total + new for total, new in zip(sums, added, strict=True)] if seed else added
            if scaling:
                for p, total in zip(ours.parameters(), sums, strict=True):
                    p.grad.mul_(0.5).clamp_(-0.125, 0.25)
                    total.mul_(0.5).clamp_(-0.125, 0.25)
        assert same_bits(grads(ours), sums)
        expected = nn.utils.get_total_norm(sums)
        found = nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        assert_close(found, expected)
        masters = [optimizer.read_state(p)["master"] for p in ours.parameters()]
        plain = [nn.Parameter(master) for master in masters]
        for parameter, total in zip(plain, sums, strict=True):
            parameter.grad = total
        nn.utils.clip_grad_norm_(plain, 0.1)
        torch.optim.AdamW(plain, lr=1e-2, eps=1e-5).step()
        optimizer.step()
        after = [optimizer.read_state(p)["master"] for p in ours.parameters()]
        assert distance(after, [p.data for p in plain]) < 1e-6


def test_several_backwards_of_one_graph(pair: Pair) -> None:
    ours, _, twin, _ = pair
    for model in (ours, twin):
        loss = odd_loss(model, 0)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        odd_loss(model, 1).backward(inputs=[model[0].weight])
    assert_close(grads(ours), [q.grad for q in twin.parameters()])
    step_both(pair)


# --- GradScaler ------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["by itself", "unscale_"])
def test_grad_scaler(unscale: bool, pair: Pair) -> None:
    ours, optimizer, twin, theirs = pair
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) for _ in "ab"]
    sides = [(ours, optimizer, scalers[0]), (twin, theirs, scalers[1])]
    for seed in range(6):
        overflow = seed == 3
        skipped = weights_of(ours)
        for model, own, scaler in sides:
            factor = math.inf if overflow else 1.0
            scaler.scale(odd_loss(model, seed) * factor).backward()
            if unscale:
                scaler.unscale_(own)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(own)
            scaler.update()
            own.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert same_bits(weights_of(ours), skipped) is overflow
        assert_near(ours, twin)
    assert optimizer.steps == 5


def test_grad_scaler_with_fp16_weights(tmp_path: Path) -> None:
    model = small_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with offload(model, adamw(model), directories(tmp_path, 1), dtype=torch.float16) as optimizer:
        for seed in range(30):
            scaler.scale(net_loss(model, seed)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert 5 < optimizer.steps < 30, "some steps were skipped, until the scale was low enough"
        assert all(p.isfinite().all() for p in model.parameters())


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        lambda g: g.clone(),
        lambda g: g + 1,
        lambda g: 2 * g,
        lambda g: g.sum(),
        lambda g: g.abs().max(),
        lambda g: g.double(),
        lambda g: g.to(torch.bfloat16),
        lambda g: g[0],
        lambda g: g.view(-1),
        lambda g: g.isnan().any(),
        lambda g: torch.isfinite(g).all(),
        lambda g: g.add_(1.0),
        lambda g: g.add_(torch.ones(33, 7), alpha=2),
        lambda g: g.add_(torch.ones(7)),
        lambda g: g.mul_(torch.ones(33, 7)),
        lambda g: g.copy_(torch.ones(33, 7)),
        lambda g: g.normal_(),
        lambda g: torch.ones(33, 7).add_(g),
        lambda g: torch.ones(33, 7).mul_(g),
        lambda g: torch.ones(33, 7) @ g.t(),
        lambda g: g.numpy(),
        lambda g: g.tolist(),
        lambda g: np.asarray(g),
        lambda g: copy.deepcopy(g),
        lambda g: pickle.dumps(g),
        lambda g: torch.linalg.vector_norm(g, dim=0),
    ],
)
@torch.no_grad()
def test_everything_else_is_refused_by_name(operation: Callable[[Any], Any], pair: Pair) -> None:
    ours = pair[0]
    with torch.enable_grad():
        backward(ours)
    before = grads(ours)
    with pytest.raises(OffloadedGradientError, match=r"0\.weight") as caught:
        operation(ours[0].weight.grad)
    assert "to_dense()" in str(caught.value)
    assert same_bits(grads(ours), before)


def test_reading_a_single_value_is_refused(pair: Pair) -> None:
    ours = pair[0]
    backward(ours)
    for read in (lambda g: g.item(), float, bool):
        with pytest.raises(OffloadedGradientError, match="scale"):
            read(ours.scale.grad)


def test_the_gradient_of_another_parameter_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with offload(model, adamw(model), directories(tmp_path, 1)) as optimizer:
        model(torch.ones(2, 3)).sum().backward()
        model[0].bias.grad = model[1].bias.grad
        with pytest.raises(OffloadedGradientError, match=r"0\.bias is that of another"):
            optimizer.step()


def test_a_sparse_gradient_is_refused(pair: Pair) -> None:
    ours, optimizer, _, _ = pair
    ours[0].weight.grad = torch.zeros(33, 7).to_sparse()
    with pytest.raises(UnsupportedError, match=r"0\.weight is sparse"):
        optimizer.step()


def test_a_float64_gradient_is_refused(pair: Pair) -> None:
    ours, optimizer, _, _ = pair
    ours[0].weight.grad = torch.zeros(33, 7, dtype=torch.float64)
    with pytest.raises(OffloadedGradientError, match=r"0\.weight is torch\.float64"):
        optimizer.step()


def test_training_goes_on_after_a_refusal(pair: Pair) -> None:
    ours, optimizer, twin, theirs = pair
    backward(ours, twin)
    with pytest.raises(OffloadedGradientError):
        ours[0].weight.grad.sum()
    step_both(pair)
    optimizer.zero_grad()
    theirs.zero_grad()
    train(ours, optimizer, range(3), odd_loss)
    train(twin, theirs, range(3), odd_loss)
    assert_near(ours, twin)


# --- at the edges ----------------------------------------------------------------------------


def test_clamping_makes_infinities_finite_as_in_torch(pair: Pair) -> None:
    ours, optimizer, twin, _ = pair
    for model in (ours, twin):
        model[2].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), math.inf))
    backward(ours, twin)
    for model in (ours, twin):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    step_both(pair)
    assert not optimizer.step_was_skipped


def test_gradients_from_before_offload_count(tmp_path: Path) -> None:
    ours, twin = odd_net(), odd_net()
    backward(ours, twin)
    with offload(ours, adamw(ours), directories(tmp_path, 2)) as optimizer:
        backward(ours, twin, seed=1)
        assert_close(grads(ours), [q.grad for q in twin.parameters()])
        step_both((ours, optimizer, twin, adamw(twin)))


def test_parameters_outside_the_optimizer_keep_plain_gradients(tmp_path: Path) -> None:
    model = odd_net()
    inside = list(model[2].parameters())
    source = torch.optim.AdamW(inside, lr=1e-2)
    with offload(model, source, directories(tmp_path, 1), dtype=torch.bfloat16) as optimizer:
        before = weights_of(model)
        backward(model)
        for p in model.parameters():
            assert (type(p.grad) is OffloadedGradient) is any(p is q for q in inside)
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, old) is not any(p is q for q in inside)


def test_unfreezing_late_is_refused(tmp_path: Path) -> None:
    model = odd_net()
    model[0].requires_grad_(False)
    with offload(model, adamw(model), directories(tmp_path, 1)) as optimizer:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(True)
        backward(model)
        with pytest.raises(UnsupportedError, match="frozen at offload"):
            optimizer.step()


def test_freezing_late_leaves_a_parameter_alone(pair: Pair) -> None:
    ours, _, twin, _ = pair
    for seed in range(3):
        if seed == 1:
            for model in (ours, twin):
                model[0].requires_grad_(False)
        for model in (ours, twin):
            model.zero_grad()
        backward(ours, twin, seed=seed)
        step_both(pair)
