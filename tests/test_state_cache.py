"""Part of the state stays in host memory: it is not read again, and nothing else changes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import (
    OPTIMIZERS,
    directories,
    offload,
    offloaded_moments,
    run_python,
    same_bits,
    tiny_gpt,
    train,
    weights_of,
)
from smart_infinity.errors import CorruptStateError, DeviceMemoryError

RECORD_NBYTES = 8192  # of `small_records`
PACES: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"overlap": True, "accumulation_steps": 1},
]


def begin(path: Path, **options: Any) -> Any:
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    return model, offload(model, source, directories(path, 2), **options)


TEN = 2 * 10 * RECORD_NBYTES  # ten records on each of two devices


@pytest.mark.usefixtures("small_records")
def test_what_is_cached_is_written_and_not_read(tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path, state_cache=TEN)
    with optimizer:
        for seed in range(2):
            train(model, optimizer, [seed])
            for own in optimizer.last_io.values():
                assert own["bytes_written"] - own["bytes_read"] == 10 * RECORD_NBYTES


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("pace", PACES)
def test_in_place_it_is_not_written_either(pace: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path / "all", durability="none")
    with optimizer:
        train(model, optimizer, range(1))
        every = [own["bytes_written"] for own in optimizer.last_io.values()]
    model, optimizer = begin(tmp_path / "cached", durability="none", state_cache=TEN, **pace)
    with optimizer:
        for seed in range(3):
            train(model, optimizer, [seed], clip=None)
            optimizer.synchronize()
            for whole, own in zip(every, optimizer.last_io.values(), strict=True):
                assert own["bytes_written"] == whole - 10 * RECORD_NBYTES
                assert own["bytes_read"] in (own["bytes_written"], 0)


def leave(optimizer: Any) -> None:
    optimizer.close()


def drop(optimizer: Any) -> None:
    """The caller has the only other reference."""


def keep(optimizer: Any) -> None:
    optimizer.snapshot("kept")
    optimizer.restore("kept")
    optimizer.close()


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("end", [leave, drop, keep])
def test_in_place_it_is_written_in_the_end(end: Any, pace: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for number, options in enumerate(({}, {"state_cache": TEN, **pace})):
        model, optimizer = begin(tmp_path / str(number), durability="none", **options)
        train(model, optimizer, range(3), clip=None)
        optimizer.read_state(model.head.weight)
        train(model, optimizer, range(3, 5), clip=None)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        optimizer.register_for_checkpointing(scheduler)
        train(model, optimizer, range(5, 6), clip=None, scheduler=scheduler)
        end(optimizer)
        del optimizer, scheduler
        gc.collect()
        again = tiny_gpt(seed=9)
        source = OPTIMIZERS["adamw"](again.parameters())
        devices = [tmp_path / str(number) / f"device{index}" for index in range(2)]
        with offload(again, source, devices, durability="none", resume=True) as resumed:
            assert resumed.steps == 6
            states = offloaded_moments(again, resumed)
            results.append([*weights_of(again), *(t for kind in states.values() for t in kind)])
            assert same_bits(weights_of(again), weights_of(model))
    assert same_bits(*results)


SCRIPT = """
import sys, torch
from helpers import OPTIMIZERS, tiny_gpt, train
from images import use_small_records
import pytest, smart_infinity, os, signal

with pytest.MonkeyPatch.context() as patch:
    use_small_records(patch)
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    model, optimizer = smart_infinity.offload(
        model, source, sys.argv[2:], durability="none", state_cache=160_000, resume=True
    )
train(model, optimizer, range(3))
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "forked" and os.fork() == 0:
    sys.exit()
if sys.argv[1] == "forked":
    os.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("end", ["ends", "killed", "forked"])
def test_a_process_that_just_ends_has_written_it(end: str, tmp_path: Path) -> None:
    """One that is killed has not, and says so; neither does a forked child write it."""
    devices = directories(tmp_path, 2)
    done = run_python(SCRIPT, end, *map(str, devices))
    assert (done.returncode == 0) == (end == "ends"), done.stderr
    model = tiny_gpt(seed=9)
    source = OPTIMIZERS["adamw"](model.parameters())
    if end == "ends":
        with offload(model, source, devices, durability="none", resume=True) as optimizer:
            assert optimizer.steps == 3
    else:
        with pytest.raises(CorruptStateError):
            offload(model, source, devices, durability="none", resume=True)


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("cache", [1, 3 * RECORD_NBYTES, "64MiB"])
def test_going_back_to_a_snapshot_forgets_what_was_cached(cache: Any, tmp_path: Path) -> None:
    results = []
    for number, options in enumerate(({}, {"state_cache": cache})):
        model, optimizer = begin(tmp_path / str(number), **options)
        with optimizer:
            train(model, optimizer, range(2))
            optimizer.snapshot("two")
            train(model, optimizer, range(2, 4))
            optimizer.restore("two")
            train(model, optimizer, range(5, 8))
            states = offloaded_moments(model, optimizer)
            train(model, optimizer, range(8, 9))
        results.append([*weights_of(model), *(t for kind in states.values() for t in kind)])
    assert same_bits(*results)


@pytest.mark.usefixtures("small_records")
def test_a_step_that_is_made_again_does_not_find_the_lost_one(tmp_path: Path) -> None:
    """What was computed early and given up is not in the cache."""
    results = []
    for number, options in enumerate(({}, {"state_cache": "64MiB", "accumulation_steps": 1})):
        model, optimizer = begin(tmp_path / str(number), **options)
        with optimizer:
            for seed in range(3):
                train(model, optimizer, [seed], clip=1e-3)
                optimizer.read_state(model.head.weight)
        results.append(weights_of(model))
    assert same_bits(*results)


@pytest.mark.parametrize("value", ["lots", 0, -1, 1 << 60])
def test_a_cache_that_makes_no_sense_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match=r"state_cache is .*Expected"):
        begin(tmp_path, state_cache=value)
