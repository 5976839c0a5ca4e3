"""A set as files: to another number of devices, to plain torch and back, or refused whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from crashes import Counter, Everything, contents
from helpers import (
    OPTIMIZERS,
    TinyGPT,
    directories,
    distance,
    offload,
    same_bits,
    tiny_gpt,
    train,
    two_groups,
    weights_of,
)
from smart_infinity import OffloadedOptimizer, load_export, save_export
from smart_infinity.errors import (
    StateMismatchError,
    UnsupportedError,
)
from smart_infinity.tools.export import export_set
from smart_infinity.tools.importing import import_set

Run = tuple[nn.Module, OffloadedOptimizer]


def net(seed: int = 0, tied: bool = False) -> TinyGPT:
    """With a frozen parameter, one without dimensions, and one without elements."""
    model = tiny_gpt(seed, width=15, heads=3, layers=1, tied=tied)
    model.scale = nn.Parameter(torch.tensor(1.25))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.places.weight.requires_grad_(False)
    model.register_forward_hook(lambda own, _, out: out * own.scale + own.empty.sum())
    return model


def begin(
    devices: list[Path], resume: bool | None = None, name: str = "adamw", **options: Any
) -> Run:
    model = net(77 if resume else 0, options.pop("tied", False))
    if resume:  # what is frozen comes with the model
        model.places.weight.data = net(0).places.weight.data
    source = OPTIMIZERS[name](two_groups(model))
    return model, offload(model, source, devices, resume=resume, **options)


def trained(devices: list[Path], steps: int = 3, **options: Any) -> Everything:
    """Leave a state in the directories."""
    model, optimizer = begin(devices, **options)
    with optimizer:
        train(model, optimizer, range(steps))
        return Everything(model, optimizer)


@pytest.mark.parametrize(
    ("name", "dtype", "source", "targets"),
    [
        ("adamw", torch.bfloat16, 2, [1, 3]),
        ("adamw", None, 3, [2]),
        ("adam", torch.float16, 1, [2]),
        ("sgd-momentum", torch.bfloat16, 1, [3]),
        ("sgd-plain", torch.bfloat16, 2, [1]),
        ("adagrad", None, 1, [2, 1]),
    ],
)
def test_a_set_moves_to_another_number_of_devices(
    name: str, dtype: Any, source: int, targets: list[int], tmp_path: Path
) -> None:
    devices, options = directories(tmp_path, source), {"name": name, "dtype": dtype, "tied": True}
    run = begin(devices, **options)
    train(*run, range(3))
    three = Everything(*run)
    run[1].snapshot("three")
    train(*run, range(3, 6))
    six = Everything(*run)
    run[1].close()
    before = contents(devices)
    assert export_set(devices[::-1], tmp_path / "three", snapshot="three") == 3
    assert export_set(devices, tmp_path / "six") == 6
    assert contents(devices) == before
    for step, expected in ((3, three), (6, six)):
        export = tmp_path / ("three" if step == 3 else "six")
        for count in targets:
            moved = directories(tmp_path / f"{count}", count, f"{export.name}-")
            assert import_set(export, moved) == step
            again = begin(moved, resume=True, **options)
            expected.check(*again)
            train(*again, range(step, 6))
            six.check(*again)
            again[1].close()
            assert export_set(moved, tmp_path / f"{count}" / f"back{step}") == 6
            for own in (tmp_path / "six").glob("*.safetensors"):
                back = tmp_path / f"{count}/back{step}"
                assert own.read_bytes() == (back / own.name).read_bytes()


def test_what_the_host_committed_moves_too(tmp_path: Path) -> None:
    def registered(run: Run) -> tuple[Any, Counter]:
        objects = lr_scheduler.ExponentialLR(run[1], 0.9), Counter(0 if run[1].steps else 7)
        run[1].register_for_checkpointing(*objects)
        return objects

    devices = directories(tmp_path, 2)
    run = begin(devices)
    objects = registered(run)
    train(*run, range(4), scheduler=objects[0])
    expected = Everything(*run, *objects)
    draw = torch.rand(2)
    run[1].close()
    export_set(devices, tmp_path / "out")
    moved = directories(tmp_path, 3, "moved")
    import_set(tmp_path / "out", moved)
    torch.rand(5)
    run = begin(moved, resume=True)
    objects = registered(run)
    expected.check(*run, *objects)
    run[1].restore_random_state()
    assert torch.equal(torch.rand(2), draw)


# --- the files -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 4000, 1])
def test_files_load_with_the_safetensors_package(max_shard_bytes: int, tmp_path: Path) -> None:
    devices, out = directories(tmp_path, 2), tmp_path / "new" / "out"
    model, optimizer = begin(devices, dtype=torch.bfloat16)
    train(model, optimizer, range(3))
    states = {name: optimizer.read_state(parameter) for name, parameter in named(model)}
    optimizer.close()
    out.parent.mkdir()
    assert export_set(devices, out, max_shard_bytes=max_shard_bytes) == 3
    masters, moments = {}, {}
    for stem, found in (("model", masters), ("optimizer", moments)):
        files = sorted(out.glob(f"{stem}*.safetensors"))
        for file in files:
            with safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
            found |= load_file(file)
        index = out / f"{stem}.safetensors.index.json"
        assert index.exists() == (len(files) > 1)
        if len(files) > 1:
            weight_map = json.loads(index.read_text())["weight_map"]
            assert set(weight_map.values()) == {file.name for file in files}
            for name, file in weight_map.items():
                assert name in load_file(out / file)
    if max_shard_bytes == 1:
        assert len(list(out.glob("model-*"))) == len(states)
    assert set(masters) == set(states)
    assert set(moments) == {f"state.{n}.{m}" for n in states for m in ("exp_avg", "exp_avg_sq")}
    for name, state in states.items():
        assert same_bits([masters[name]], [state["master"]])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert same_bits([moments[f"state.{name}.{moment}"]], [state[moment]])
    about = json.loads((out / "state.json").read_text())
    assert (about["step"], about["optimizer"], about["model"]) == (3, "adamw", "TinyGPT")
    assert [(own["name"], own["step"], own["dtype"]) for own in about["parameters"]] == [
        (name, int(state["step"]), "bfloat16") for name, state in states.items()
    ]
    assert [own["lr"] for own in about["param_groups"]] == [3e-3, 3e-3]
    import_set(out, directories(tmp_path, 1, "again"))


# --- plain torch -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_into_plain_torch_and_on(name: str, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices, name=name)
    train(model, optimizer, range(3))
    ours = offloaded_moments_of(model, optimizer)
    optimizer.close()
    export_set(devices, tmp_path / "out")
    twin = net(0)
    theirs = OPTIMIZERS[name](two_groups(twin))
    found = load_export(tmp_path / "out", twin, theirs)
    assert (found["step"], found["buffers"]) == (3, {})
    torch.random.set_rng_state(found["random"]["torch"])
    for (label, parameter), state in zip(named(twin), ours, strict=True):
        assert same_bits([parameter.detach()], [state.pop("master")]), label
        theirs_own = {k: v for k, v in theirs.state[parameter].items() if v is not None}
        assert set(theirs_own) == set(state)
        for kind, value in state.items():
            assert same_bits([theirs_own[kind].float()], [value]), (label, kind)
    model, optimizer = begin(devices, resume=True, name=name)
    train(model, optimizer, range(3, 5))
    train(twin, theirs, range(3, 5))
    assert distance(weights_of(twin), weights_of(model)) < 1e-6
    optimizer.close()

    # And from there back to devices: what torch holds, exactly.
    save_export(tmp_path / "back", twin, theirs, step=5)
    moved = directories(tmp_path, 3, "moved")
    assert import_set(tmp_path / "back", moved) == 5
    model, optimizer = begin(moved, resume=True, name=name)
    assert optimizer.steps == 5
    assert same_bits(weights_of(model), weights_of(twin))
    ours = offloaded_moments_of(model, optimizer)
    for (_, parameter), state in zip(named(twin), ours, strict=True):
        assert same_bits([state.pop("master")], [parameter.detach()])
        for kind, value in state.items():
            assert same_bits([value], [theirs.state[parameter][kind].float()]), kind
    train(model, optimizer, range(5, 7))
    train(twin, theirs, range(5, 7))
    assert distance(weights_of(twin), weights_of(model)) < 1e-6


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def offloaded_moments_of(
    model: nn.Module, optimizer: OffloadedOptimizer
) -> list[dict[str, torch.Tensor]]:
    return [optimizer.read_state(parameter) for _, parameter in named(model)]


def test_a_schedule_goes_on_in_plain_torch(tmp_path: Path) -> None:
    devices = directories(tmp_path, 1)
    model, optimizer = begin(devices)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_for_checkpointing(scheduler)
    train(model, optimizer, range(4), scheduler=scheduler)
    rate, state = optimizer.param_groups[0]["lr"], scheduler.state_dict()
    optimizer.close()
    export_set(devices, tmp_path / "out")
    twin = net(0)
    theirs = OPTIMIZERS["adamw"](two_groups(twin))
    schedule = lr_scheduler.ExponentialLR(theirs, 0.9)
    load_export(tmp_path / "out", twin, theirs, [schedule])
    assert theirs.param_groups[0]["lr"] == rate
    assert schedule.state_dict() == state


def test_a_schedule_comes_from_plain_torch(tmp_path: Path) -> None:
    twin = net(0)
    theirs = OPTIMIZERS["adamw"](two_groups(twin))
    schedule = lr_scheduler.ExponentialLR(theirs, 0.9)
    train(twin, theirs, range(4), scheduler=schedule)
    save_export(tmp_path / "out", twin, theirs, step=4, objects=[schedule, Counter(3)])
    devices = directories(tmp_path, 2)
    import_set(tmp_path / "out", devices)
    model, optimizer = begin(devices, resume=True)
    counter, scheduler = Counter(), lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_for_checkpointing(scheduler, counter)
    assert counter.value == 3
    assert scheduler.state_dict() == schedule.state_dict()
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    train(model, optimizer, range(4, 7), scheduler=scheduler)
    train(twin, theirs, range(4, 7), scheduler=schedule)
    assert distance(weights_of(twin), weights_of(model)) < 1e-6
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_another_run_is_refused_and_unchanged(tmp_path: Path) -> None:
    devices = directories(tmp_path, 1)
    trained(devices)
    export_set(devices, tmp_path / "out")
    for model, optimizer, text in (
        (net(), lambda m: torch.optim.Adam(two_groups(m)), "optimizer adamw and this one is adam"),
        (net(), lambda m: torch.optim.AdamW(m.parameters()), "param_groups"),
        (tiny_gpt(), lambda m: torch.optim.AdamW(two_groups(m)), "where the model has"),
    ):
        theirs, given = optimizer(model), weights_of(model)
        with pytest.raises(StateMismatchError, match=text):
            load_export(tmp_path / "out", model, theirs)
        assert same_bits(weights_of(model), given)
        assert not theirs.state


def test_save_export_refuses_step_0(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(UnsupportedError, match="step is 0"):
        save_export(tmp_path / "o", model, OPTIMIZERS["adam"](model.parameters()), step=0)
    assert os.listdir(tmp_path) == []
