"""The same numbers as torch, on any number of devices.

"No farther than": the relative L2 distance over everything to a run in float64 is at most twice
that of torch's own run in fp32. Every run computes its gradients from its own weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    OPTIMIZERS,
    directories,
    distance,
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
def test_fp32_is_as_near_to_float64_as_torch(name: str, tmp_path: Path) -> None:
    exact, theirs = in_torch(name, torch.float64), in_torch(name, torch.float32)
    one = on_devices(name, tmp_path / "1", 1)
    for kind, values in exact.items():
        if kind == "step":
            assert one[kind] == values
            continue
        ours, torchs = distance(one[kind], values), distance(theirs[kind], values)
        print(f"{name} {kind}: {ours:.3g}, torch {torchs:.3g}, ratio {ours / torchs:.2f}")
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
def test_random_cuts(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


class Masters:
    """The explicit loop in plain torch: masters, ``p.grad.float()``, clip, step, copy back."""

    def __init__(self, name: str, model: nn.Module, wide: torch.dtype) -> None:
        self.model = copy.deepcopy(model).to(wide)
        self.optimizer = OPTIMIZERS[name](two_groups(self.model))
        self.schedule = cosine(self.optimizer)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self.model.parameters(), gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> State:
        moments = torch_moments(self.model, self.optimizer)
        return {"master": weights_of(self.model), **moments}


@functools.cache
def mixed_in_torch(name: str, half: torch.dtype) -> State:
    model = tiny_gpt(width=35)
    masters = Masters(name, model, torch.float32)
    model.to(half)
    for seed in range(STEPS):
        model.zero_grad()
        gpt_loss(model, seed).backward()
        masters.step([p.grad for p in model.parameters()])
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.model.parameters(), strict=True):
                p.copy_(master)
    return masters.state()


def mixed_on_devices(
    name: str, half: torch.dtype, devices: Sequence[Path], mirrors: Sequence[Masters] = ()
) -> State:
    """The offloaded run; ``mirrors`` are given the very gradients that it computes."""
    model = tiny_gpt(width=35)
    source = OPTIMIZERS[name](two_groups(model))
    with offload(model, source, devices, dtype=half) as optimizer:
        assert all(p.dtype is half for p in model.parameters())
        schedule = cosine(optimizer)
        for seed in range(STEPS):
            gpt_loss(model, seed).backward()
            for mirror in mirrors:
                mirror.step([p.grad.to_dense() for p in model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        state = offloaded_moments(model, optimizer)
    assert same_bits([m.to(half) for m in state["master"]], weights_of(model))
    return state


MIXED = [
    *[(name, torch.bfloat16) for name in OPTIMIZERS],
    ("adamw", torch.float16),
    ("sgd-nesterov", torch.float16),
]


@pytest.mark.parametrize(("name", "half"), MIXED, ids=lambda value: str(value))
def test_16_bits_against_an_explicit_loop(
    name: str,
    half: torch.dtype,
    tmp_path: Path,
) -> None:
    exact = Masters(name, tiny_gpt(width=35), torch.float64)
    theirs = Masters(name, tiny_gpt(width=35), torch.float32)
    one = mixed_on_devices(name, half, directories(tmp_path / "one", 1), [exact, theirs])
    for kind, values in exact.state().items():
        if kind != "step":
            ours, torchs = distance(one[kind], values), distance(theirs.state()[kind], values)
            print(
                f"{name} {half} {kind}: {ours:.3g}, torch {torchs:.3g}, ratio {ours / torchs:.2f}"
            )
            # The error of exp_avg_sq is that of 0.999 in fp32, now and then cancelled in torch by
            # the error of its norm: below two units in the last place, luck is not to be beaten.
            assert ours <= 2 * (torchs if kind == "master" else max(torchs, 2**-22)), kind
    three = mixed_on_devices(name, half, directories(tmp_path / "three", 3))
    for kind, values in one.items():
        assert same_bits(three[kind], values), kind
    # A last bit of a master now and then turns the rounding of a weight, and the gradients of
    # two runs part from there: so they are near, but not to the rounding of fp32.
    for kind, values in mixed_in_torch(name, half).items():
        assert distance(one[kind], values) < (1e-3 if kind == "master" else 2e-2), kind


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_model_is_its_own_master_without_dtype(half: torch.dtype, tmp_path: Path) -> None:
    model = tiny_gpt(width=35).to(half)
    given = weights_of(model)
    with offload(model, torch.optim.SGD(model.parameters(), lr=0.0), directories(tmp_path, 2)) as o:
        assert same_bits([o.read_state(p)["master"].to(half) for p in model.parameters()], given)
        train(model, o, range(2))
        assert same_bits(weights_of(model), given)


def test_buffers_are_not_cast(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9))
    source = torch.optim.SGD(model.parameters(), lr=0.1)
    with offload(model, source, directories(tmp_path, 1), dtype=torch.bfloat16):
        assert model[0].weight.dtype is torch.bfloat16
        assert model[1].running_mean.dtype is torch.float32


# --- awkward models --------------------------------------------------------------------------


class Awkward(nn.Module):
    """0-dim, empty and odd parameters, frozen ones, an unused one, one used in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.first = nn.Linear(7, 4099)
        self.frozen = nn.Linear(7, 11)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.sometimes = nn.Linear(7, 4099)
        self.last = nn.Linear(4099, 1)
        self.transposed = nn.Parameter(torch.randn(3, 7).t())

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        hidden = self.first(x) + (self.sometimes(x) if odd else 0)
        extra = self.frozen(x).sum(-1, keepdim=True) + (x @ self.transposed).sum(-1, keepdim=True)
        return self.scale * self.last(hidden.tanh()) + 0.01 * extra + self.empty.sum()


def awkward_loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 7, generator=generator).to(dtype), seed % 2 == 1).square().mean()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "sgd-dampening", "sgd-plain", "adagrad"])
def test_awkward_parameters(name: str, count: int, tmp_path: Path) -> None:
    runs = {}
    for dtype in (torch.float64, torch.float32):
        model = Awkward().to(dtype)
        theirs = OPTIMIZERS[name](two_groups(model))
        train(model, theirs, range(8), awkward_loss)
        runs[dtype] = model, theirs
    exact, model = runs[torch.float64][0], Awkward()
    frozen = weights_of(model.frozen)
    with offload(model, OPTIMIZERS[name](two_groups(model)), directories(tmp_path, count)) as ours:
        train(model, ours, range(8), awkward_loss)
        assert distance(weights_of(model), weights_of(exact)) <= 2 * distance(
            weights_of(runs[torch.float32][0]), weights_of(exact)
        )
        trainable = [p for p in model.parameters() if p.requires_grad]
        elements = sum(p.numel() for p in trainable)
        assert ours.traffic.weights_to_device == 4 * elements, "frozen parameters cost nothing"
        for p, their_p in zip(model.parameters(), runs[torch.float32][0].parameters(), strict=True):
            if p.requires_grad and (step := theirs.state.get(their_p, {}).get("step")) is not None:
                assert ours.read_state(p)["step"] == step
    assert same_bits(weights_of(model.frozen), frozen)
    assert same_bits(weights_of(model.unused), weights_of(Awkward().unused))


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tied_weights_and_blocks_used_again(uses: int, tied: bool, tmp_path: Path) -> None:
    def run(dtype: torch.dtype, devices: Sequence[Path] = ()) -> list[Tensor]:
        model = tiny_gpt(width=35, tied=tied, uses=uses).to(dtype)
        optimizer = OPTIMIZERS["adamw"](two_groups(model))
        if devices:
            optimizer = offload(model, optimizer, devices)
            elements = sum(p.numel() for p in model.parameters())
            assert optimizer.traffic.weights_to_device == 4 * elements, "tied: counted once"
        train(model, optimizer, range(6))
        before = weights_of(tiny_gpt(width=35, tied=tied, uses=uses).to(dtype))
        assert not any(map(torch.equal, weights_of(model), before)), "every tensor moved"
        if devices:
            assert (model.head.weight is model.tokens.weight) is tied
            optimizer.close()
        return weights_of(model)

    exact, ours = run(torch.float64), run(torch.float32, directories(tmp_path, 2))
    assert distance(ours, exact) <= 2 * distance(run(torch.float32), exact)


def test_hyper_parameters_are_read_at_each_step(tmp_path: Path) -> None:
    def run(dtype: torch.dtype, devices: Sequence[Path] = ()) -> list[Tensor]:
        model = tiny_gpt(width=35).to(dtype)
        optimizer = torch.optim.AdamW([*two_groups(model), {"params": []}], lr=1e-2, eps=1e-5)
        if devices:
            optimizer = offload(model, optimizer, devices)
        groups = optimizer.param_groups
        train(model, optimizer, range(3))
        groups[0]["lr"], groups[1]["lr"] = 0.0, torch.tensor(3e-3, dtype=torch.float64)
        train(model, optimizer, range(3, 6))
        groups[0].update(lr=2e-2, betas=(0.5, 0.9), weight_decay=0.3, eps=1e-3)
        train(model, optimizer, range(6, 9))
        if devices:
            optimizer.close()
        return weights_of(model)

    exact, ours = run(torch.float64), run(torch.float32, directories(tmp_path, 3))
    assert distance(ours, exact) <= 2 * distance(run(torch.float32), exact)


def test_a_model_without_a_single_element(tmp_path: Path) -> None:
    model = nn.Module()
    model.nothing = nn.Parameter(torch.empty(0))
    with offload(model, torch.optim.AdamW(model.parameters()), directories(tmp_path, 2)) as o:
        model.nothing.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        o.step()
        assert o.steps == 1
