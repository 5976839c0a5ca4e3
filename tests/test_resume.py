"""Resuming is continuing: the same numbers, or a refusal that names the difference."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    offloaded_moments,
    run_python,
    same_bits,
    small_net,
    train,
    two_groups,
    weights_of,
)
from smart_infinity import OffloadedOptimizer
from smart_infinity.errors import (
    CorruptStateError,
    SmartInfinityError,
    StateExistsError,
    StateMismatchError,
    UnsupportedError,
)

FIVE_MORE = """
import sys
from pathlib import Path
import torch
from helpers import *

torch.set_num_threads(1)
name, dtype, out, *devices = sys.argv[1:]
model = small_net(seed=77)
dtype = None if dtype == "None" else getattr(torch, dtype)
optimizer = offload(model, OPTIMIZERS[name](two_groups(model)), [Path(d) for d in devices],
                    dtype=dtype, resume=True)
assert optimizer.steps == optimizer.committed_step == 5
with optimizer:
    started = weights_of(model)
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    train(model, optimizer, range(5, 10), net_loss)
    states = offloaded_moments(model, optimizer)
torch.save([started, weights_of(model), states, learning_rates], out)
"""


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("adamw", "bfloat16", 1),
        ("adamw", "None", 3),
        ("sgd-dampening", "bfloat16", 3),
        ("adagrad", "float16", 1),
    ],
)
def test_ten_steps_are_five_and_five_in_a_new_process(
    name: str, dtype: str, count: int, tmp_path: Path
) -> None:
    def begin(base: Path) -> tuple[nn.Module, OffloadedOptimizer, list[Path]]:
        model, devices = small_net(), directories(base, count)
        source = OPTIMIZERS[name](two_groups(model))
        half = None if dtype == "None" else getattr(torch, dtype)
        return model, offload(model, source, devices, dtype=half), devices

    model, optimizer, _ = begin(tmp_path / "ten")
    with optimizer:
        optimizer.param_groups[1]["lr"] = 1e-3
        train(model, optimizer, range(10), net_loss)
        expected = offloaded_moments(model, optimizer)
    ten = weights_of(model)

    model, optimizer, devices = begin(tmp_path / "five")
    with optimizer:
        optimizer.param_groups[1]["lr"] = 1e-3
        train(model, optimizer, range(5), net_loss)
    done = run_python(FIVE_MORE, name, dtype, tmp_path / "out.pt", *devices)
    assert done.returncode == 0, done.stderr
    started, weights, states, rates = torch.load(tmp_path / "out.pt")
    assert same_bits(started, weights_of(model)), "weights come from the state"
    assert rates == [optimizer.param_groups[0]["lr"], 1e-3], "so do the hyper-parameters"
    assert same_bits(weights, ten)
    for kind, values in expected.items():
        assert same_bits(states[kind], values), kind


def begin(
    devices: list[Path], resume: bool | None = None, model: nn.Module | None = None
) -> tuple[nn.Module, OffloadedOptimizer]:
    model = model or small_net()
    source = OPTIMIZERS["adamw"](model.parameters())
    return model, offload(model, source, devices, resume=resume)


def counts(model: nn.Module, optimizer: OffloadedOptimizer) -> list[int]:
    return [int(optimizer.read_state(p)["step"]) for p in model.parameters()]


def test_step_counts_are_those_of_each_parameter(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    with optimizer:
        for seed in range(4):
            net_loss(model, seed).backward()
            if seed % 2:
                model[0].weight.grad = model[4].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
        expected = counts(model, optimizer)
        assert sorted(expected) == [2, 2, 4, 4, 4, 4]
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        assert counts(model, optimizer) == expected


@pytest.fixture
def held(tmp_path: Path) -> tuple[list[Path], list[Tensor]]:
    """Directories with a state at step 3, and its weights."""
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    with optimizer:
        train(model, optimizer, range(3), net_loss)
    return devices, weights_of(model)


Held = tuple[list[Path], list[Tensor]]


def contents(devices: list[Path]) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for device in devices for f in device.iterdir()}


def test_a_state_is_not_overwritten_without_a_word(held: Held) -> None:
    devices, weights = held
    before = contents(devices)
    model = small_net(seed=5)
    given = weights_of(model)
    with pytest.raises(StateExistsError) as caught:
        begin(devices, model=model)
    for part in ("step 3", "resume=True to continue", "resume=False to discard", "device0"):
        assert part in str(caught.value)
    assert contents(devices) == before
    assert same_bits(weights_of(model), given)
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        assert optimizer.steps == 3
        assert same_bits(weights_of(model), weights)


def test_resume_false_discards(held: Held) -> None:
    devices, _ = held
    (devices[0] / "lost+found").mkdir()
    (devices[0] / "mine.txt").write_text("not yours")
    model, optimizer = begin(devices, resume=False)
    with optimizer:
        assert optimizer.steps == 0
        assert same_bits(weights_of(model), weights_of(small_net()))
        assert counts(model, optimizer) == [0] * 6
    assert (devices[0] / "mine.txt").read_text() == "not yours"
    assert (devices[0] / "lost+found").is_dir()


def no_ledger(devices: list[Path]) -> None:
    for device in devices:
        (device / "state.0").write_bytes(b"half")


def died_before_the_superblock(devices: list[Path]) -> None:
    _, optimizer = begin(devices)
    optimizer.close()
    for device in devices:
        for name in ("superblock.json", "superblock.copy.json"):
            (device / name).unlink()
        (device / "ledger").write_bytes(bytes(4 * 4096))


def only_step_zero(devices: list[Path]) -> None:
    _, optimizer = begin(devices, model=small_net(seed=9))
    optimizer.close()


@pytest.mark.parametrize("resume", [None, True, False])
@pytest.mark.parametrize(
    "leave", [lambda devices: None, no_ledger, died_before_the_superblock, only_step_zero]
)
def test_directories_without_a_step_start_fresh(
    leave: Callable[[list[Path]], None], resume: bool | None, tmp_path: Path
) -> None:
    devices = directories(tmp_path, 2)
    leave(devices)
    model, optimizer = begin(devices, resume)
    with optimizer:
        assert optimizer.steps == 0
        assert same_bits(weights_of(model), weights_of(small_net()))
        train(model, optimizer, range(2), net_loss)
        assert optimizer.steps == 2


def smaller() -> nn.Sequential:
    return small_net()[:3]


def wider() -> nn.Sequential:
    model = small_net()
    model[2] = nn.Linear(33, 61)
    model[4] = nn.Linear(61, 1)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: (wider(), torch.optim.AdamW),
            r"2\.weight \(59, 33\) float32 where the model has 2\.weight \(61, 33\) float32",
        ),
        (lambda: (smaller(), torch.optim.AdamW), r"6 parameters and the model 4.*4\.weight"),
        (lambda: (small_net().bfloat16(), torch.optim.AdamW), r"float32 where .* bfloat16"),
        (lambda: (small_net(), torch.optim.SGD), "optimizer is 'adamw' and this run's is 'sgd'"),
        (lambda: (small_net(), torch.optim.Adam), "optimizer is 'adamw' and this run's is 'adam'"),
    ],
    ids=["shape", "fewer", "dtype", "SGD", "Adam"],
)
def test_another_models_state_is_refused_by_the_first_difference(
    make: Callable[[], tuple[nn.Module, Any]], message: str, held: Held
) -> None:
    devices, _ = held
    before = contents(devices)
    for resume, kind in ((True, StateMismatchError), (None, StateExistsError)):
        model, optimizer = make()
        given = weights_of(model)
        with pytest.raises(kind, match=message):
            offload(model, optimizer(model.parameters(), lr=0.1), devices, resume=resume)
        assert same_bits(weights_of(model), given)
    assert contents(devices) == before


def test_another_number_of_groups_is_refused(held: Held) -> None:
    model = small_net()
    with pytest.raises(StateMismatchError, match=r"param_groups .* \[6\] against \[3, 3\]"):
        offload(model, torch.optim.AdamW(two_groups(model)), held[0], resume=True)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (
            lambda devices, other: devices[:1],
            r"lies on 2 devices and 1 were given.*missing: device 1",
        ),
        (lambda devices, other: [devices[0], other], "holds no state"),
        (lambda devices, other: [*devices, other], "holds no state"),
    ],
    ids=["one missing", "one empty", "one more"],
)
def test_another_set_of_directories_is_refused(
    choose: Callable[[list[Path], Path], list[Path]], message: str, held: Held, tmp_path: Path
) -> None:
    devices, weights = held
    (other,) = directories(tmp_path, 1, "other")
    with pytest.raises(StateMismatchError, match=message):
        begin(choose(devices, other), resume=True)
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        assert same_bits(weights_of(model), weights)


def test_directories_of_two_sets_are_refused(held: Held, tmp_path: Path) -> None:
    others = directories(tmp_path, 2, "other")
    model, optimizer = begin(others)
    with optimizer:
        train(model, optimizer, range(3), net_loss)
    with pytest.raises(StateMismatchError, match="belongs to set"):
        begin([held[0][0], others[1]], resume=True)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_noticed(held: Held) -> None:
    devices, _ = held
    for state in devices[1].glob("state.*"):
        flip(state, 100)
    with pytest.raises(CorruptStateError, match=r"device1: state record 0 in state\.\d differs"):
        begin(devices, resume=True)


COPIES = ("superblock.json", "superblock.copy.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version": 2}'])
def test_a_damaged_superblock_is_refused(content: bytes, held: Held) -> None:
    devices, _ = held
    for name in COPIES:
        (devices[1] / name).write_bytes(content)
    with pytest.raises(SmartInfinityError, match=r"superblock\.json is damaged"):
        begin(devices, resume=True)


@pytest.mark.parametrize("name", COPIES)
def test_a_superblock_is_mended_from_its_other_copy(
    name: str, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    devices, weights = held
    whole = (devices[1] / name).read_bytes()
    (devices[1] / name).write_bytes(whole.replace(b"adamw", b"adamW"))
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        assert same_bits(weights_of(model), weights)
    assert f"{name} is damaged; its other copy is whole" in caplog.text
    assert (devices[1] / name).read_bytes() == whole


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_is_refused_by_its_version(version: int, held: Held) -> None:
    devices, _ = held
    for name in COPIES:
        content = json.loads((devices[0] / name).read_text())
        del content["checksum"]
        (devices[0] / name).write_text(json.dumps(content | {"format_version": version}))
    with pytest.raises(StateMismatchError, match=f"format version {version}, .* reads version 2"):
        begin(devices, resume=True)


def test_directories_may_come_in_any_order(held: Held) -> None:
    devices, weights = held
    model, optimizer = begin(devices[::-1], resume=True)
    with optimizer:
        assert same_bits(weights_of(model), weights)
        train(model, optimizer, range(3, 5), net_loss)
        after = weights_of(model)
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        assert same_bits(weights_of(model), after)


@pytest.mark.parametrize("resume", [None, True])
def test_a_copy_of_a_directory_is_refused(resume: bool | None, held: Held, tmp_path: Path) -> None:
    devices, _ = held
    copied = tmp_path / "copied"
    shutil.copytree(devices[0], copied)
    with pytest.raises(SmartInfinityError, match="one is a copy of the other"):
        begin([devices[0], copied], resume=resume)
    with pytest.raises(SmartInfinityError, match="one is a copy of the other"):
        begin([*devices, copied], resume=resume)


def test_edits_before_a_resume_are_overwritten_by_the_state(held: Held) -> None:
    """The state is what is resumed: weights given to the model beforehand do not matter."""
    devices, weights = held
    model, optimizer = begin(devices, resume=True, model=small_net(seed=4))
    with optimizer:
        assert same_bits(weights_of(model), weights)
    assert os.path.exists(devices[0] / "superblock.json")


@pytest.mark.parametrize("resume", ["yes", 1.5, "no"])
def test_resume_takes_only_true_false_and_none(resume: object, tmp_path: Path) -> None:
    model = small_net()
    with pytest.raises(UnsupportedError, match="resume is"):
        offload(
            model, OPTIMIZERS["adamw"](model.parameters()), directories(tmp_path, 1), resume=resume
        )


def test_resuming_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_net()
    source = OPTIMIZERS["adamw"](model.parameters())
    with offload(model, source, directories(tmp_path, 1), resume=True) as optimizer:
        assert optimizer.steps == 0
    assert [r.message for r in caplog.records if "starting fresh" in r.message]
