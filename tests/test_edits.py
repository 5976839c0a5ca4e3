"""Whatever a user does to weights after `offload()` reaches the masters on the devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    directories,
    net_loss,
    offload,
    offloaded_moments,
    same_bits,
    small_net,
    train,
    weights_of,
)
from smart_infinity import OffloadedOptimizer
from smart_infinity.errors import OffloadedGradientError, UnsupportedError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def begin(
    base: Path, dtype: torch.dtype, lr: float = 0.1, count: int = 2
) -> tuple[nn.Module, OffloadedOptimizer]:
    model = small_net()
    source = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, offload(model, source, directories(base, count), dtype=dtype)


def masters(model: nn.Module, optimizer: OffloadedOptimizer) -> list[Tensor]:
    return offloaded_moments(model, optimizer)["master"]


def step(model: nn.Module, optimizer: OffloadedOptimizer, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = lr
    train(model, optimizer, [0], net_loss)


def noncontiguous(p: nn.Parameter) -> Tensor:
    doubled = torch.stack([p.data * 3, p.data], -1)
    return doubled[..., 0]


def through_numpy(p: nn.Parameter) -> None:
    view = p.detach().view(torch.int16 if p.element_size() == 2 else torch.int32).numpy()
    view ^= 1 << 3


def one_element(p: nn.Parameter) -> None:
    p.data.view(-1)[p.numel() // 2] += 0.5


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "data.mul_": lambda p: p.data.mul_(2),
    "copy_": lambda p: p.detach().copy_(torch.linspace(-1, 1, p.numel()).view(p.shape)),
    "numpy": through_numpy,
    "data =": lambda p: setattr(p, "data", p.data * 3),
    "data = (not contiguous)": lambda p: setattr(p, "data", noncontiguous(p)),
    "one element": one_element,
    "init": lambda p: nn.init.normal_(p),
}


@each_dtype
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_reach_the_masters(
    edit: Callable[[nn.Parameter], object], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, optimizer = begin(tmp_path, dtype)
    with optimizer:
        train(model, optimizer, range(2), net_loss)
        for p in model.parameters():
            edit(p)
        edited = weights_of(model)
        step(model, optimizer, lr=0.0)
        assert same_bits(weights_of(model), edited)
        assert same_bits([m.to(dtype) for m in masters(model, optimizer)], edited)
        step(model, optimizer, lr=0.1)
        assert not any(map(torch.equal, weights_of(model), edited)), "training goes on from there"
        assert same_bits([m.to(dtype) for m in masters(model, optimizer)], weights_of(model))


@each_dtype
@pytest.mark.parametrize("count", [1, 3])
def test_load_state_dict(dtype: torch.dtype, count: int, tmp_path: Path) -> None:
    other = small_net(seed=1).to(dtype)
    model, optimizer = begin(tmp_path, dtype, count=count)
    with optimizer:
        train(model, optimizer, range(2), net_loss)
        model.load_state_dict(other.state_dict())
        step(model, optimizer, lr=0.0)
        assert same_bits(weights_of(model), weights_of(other))
        assert same_bits([m.to(dtype) for m in masters(model, optimizer)], weights_of(other))


@each_dtype
def test_an_edited_run_equals_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    """Masters replaced by an edit, moments kept: as if the edit were made to torch's masters."""
    model, optimizer = begin(tmp_path, dtype)
    with optimizer:
        train(model, optimizer, range(2), net_loss)
        model.load_state_dict(small_net(seed=1).state_dict())
        state = offloaded_moments(model, optimizer)
        plain = [
            nn.Parameter(torch.where(master.to(dtype) == p, master, p.detach().float()))
            for master, p in zip(state["master"], model.parameters(), strict=True)
        ]
        theirs = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
        for parameter, buffer in zip(plain, state["momentum_buffer"], strict=True):
            theirs.state[parameter]["momentum_buffer"] = buffer
        net_loss(model, 7).backward()
        for parameter, p in zip(plain, model.parameters(), strict=True):
            parameter.grad = p.grad.to_dense()
        theirs.step()
        optimizer.step()
        expected = [p.detach() for p in plain]
        torch.testing.assert_close(masters(model, optimizer), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_only_changed_words_replace_masters(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(base: Path, *, load: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model, optimizer = begin(base, dtype)
        with optimizer:
            train(model, optimizer, range(3), net_loss)
            before = masters(model, optimizer)
            if load:
                same = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(same)
                model[0].weight.data[0, 0] = 5.0
            train(model, optimizer, [], net_loss)
            optimizer.param_groups[0]["lr"] = 0.0
            train(model, optimizer, [3], net_loss)
            return before, masters(model, optimizer), weights_of(model)

    before, untouched, _ = run(tmp_path / "untouched", load=False)
    _, loaded, _ = run(tmp_path / "loaded", load=True)
    assert any((m.to(dtype).float() != m).any() for m in before), "masters have low bits to lose"
    assert loaded[0][0, 0] == 5.0
    loaded[0][0, 0] = untouched[0][0, 0]
    assert same_bits(loaded, untouched)


def test_loading_the_same_weights_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    results = []
    for load in (False, True):
        model, optimizer = begin(tmp_path / str(load), torch.bfloat16)
        with optimizer:
            train(model, optimizer, range(3), net_loss)
            if load:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
                for p in model.parameters():
                    p.data = p.data.clone()
            train(model, optimizer, range(3, 6), net_loss)
            results.append([*masters(model, optimizer), *weights_of(model)])
    assert same_bits(*results)


@each_dtype
def test_edits_of_a_parameter_without_gradient(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path, dtype)
    with optimizer:
        train(model, optimizer, range(2), net_loss)
        before = masters(model, optimizer)
        model[0].weight.data.mul_(2)
        edited = weights_of(model)
        net_loss(model, 5).backward()
        for p in (*model[0].parameters(), model[2].weight):
            p.grad = None
        optimizer.step()
        after = masters(model, optimizer)
        assert torch.equal(after[0].to(dtype), edited[0])
        assert not torch.equal(after[0], before[0])
        assert same_bits(weights_of(model)[:3], edited[:3])
        assert same_bits(after[1:3], before[1:3])
        assert not torch.equal(after[3], before[3])


def test_edits_survive_a_skipped_step(tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path, torch.bfloat16)
    with optimizer:
        train(model, optimizer, range(2), net_loss)
        for p in model.parameters():
            p.data.mul_(2)
        edited = weights_of(model)
        (net_loss(model, 3) * float("inf")).backward()
        optimizer.step()
        assert optimizer.step_was_skipped
        optimizer.zero_grad()
        assert same_bits(weights_of(model), edited)
        step(model, optimizer, lr=0.0)
        assert same_bits(weights_of(model), edited)
        assert same_bits([m.bfloat16() for m in masters(model, optimizer)], edited)


def test_unedited_weights_cost_nothing(tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path, torch.bfloat16)
    with optimizer:
        optimizer.traffic.reset()
        train(model, optimizer, range(3), net_loss)
        assert optimizer.traffic.weights_to_device == 0


def assign_other(model: nn.Module) -> object:
    return model.load_state_dict(small_net(seed=1).state_dict(), assign=True)


def replace_one(model: nn.Module) -> object:
    return setattr(model[2], "weight", nn.Parameter(torch.zeros(59, 33)))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (assign_other, r"0\.weight"),
        (replace_one, r"2\.weight"),
        (lambda model: model.half(), r"0\.weight"),
        (lambda model: setattr(model[0].bias, "data", torch.zeros(1)), r"0\.bias"),
    ],
    ids=["assign=True", "another parameter", "converted", "reshaped"],
)
@pytest.mark.parametrize("assigned", [False, True], ids=["backward", "gradients assigned"])
def test_what_cannot_reach_the_masters_is_refused_by_name(
    change: Callable[[nn.Module], object], name: str, assigned: bool, tmp_path: Path
) -> None:
    model, optimizer = begin(tmp_path, torch.float32)
    with optimizer:
        change(model)
        if assigned:
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.ones(p.shape)

        def train_a_step() -> None:
            if not assigned:
                net_loss(model, 0).backward()
            optimizer.step()

        with pytest.raises((UnsupportedError, OffloadedGradientError), match=name):
            train_a_step()
        assert optimizer.steps == 0
