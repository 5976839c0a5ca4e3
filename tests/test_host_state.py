"""What else the host commits with a step: whatever has a state, random states, buffers."""

from __future__ import annotations

import logging
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import RandomSampler

from crashes import Counter, Everything, Other, Run, begin, contents, copies
from helpers import (
    directories,
    net_loss,
    same_bits,
    small_net,
    train,
    weights_of,
)
from smart_infinity import checkpointing
from smart_infinity.errors import CorruptStateError, StateMismatchError, UnsupportedError
from smart_infinity.tools.sets import open_set


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


pytestmark = pytest.mark.usefixtures("without_syncs")


# --- other objects ---------------------------------------------------------------------------


class Loader:
    """Batches of torch's sampler; its state: the generator's at the epoch's begin, and a count."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.load_state_dict({"generator": self.generator.get_state(), "used": 0})

    def __next__(self) -> int:
        self.used += 1
        if self.used > 5:
            self.load_state_dict({"generator": self.generator.get_state(), "used": 0})
            self.used = 1
        return next(self.indices)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.begin, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.used = state["generator"], state["used"]
        self.generator.set_state(self.begin)
        self.indices = iter(RandomSampler(range(5), generator=self.generator))
        for _ in range(self.used):
            next(self.indices)


def test_a_sampler_and_a_counter_continue(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    seen: list[int] = []

    def go(run: Run, loader: Loader, counter: Counter, count: int) -> None:
        for _ in range(count):
            seen.append(next(loader))
            counter.value = {"seen": (len(seen), np.float32(0.5)), "all": torch.tensor(seen)}
            train(*run, seen[-1:], net_loss)

    run, objects = begin(devices), (Loader(3), Counter())
    run[1].register_for_checkpointing(*objects)
    go(run, *objects, 7)
    crashed = copies(devices, tmp_path / "crash")
    go(run, *objects, 6)
    whole, expected = list(seen), weights_of(run[0])
    assert sorted(whole[:5]) == sorted(whole[5:10]) == list(range(5))
    run[1].close()

    del seen[7:]
    next(objects[0])  # what the dead process has done since is forgotten
    run, objects = begin(crashed, resume=True), (Loader(99), Counter())
    run[1].register_for_checkpointing(*objects)
    assert objects[1].value["seen"] == (7, np.float32(0.5))
    assert objects[1].value["all"].tolist() == whole[:7]
    go(run, *objects, 6)
    assert seen == whole
    assert same_bits(weights_of(run[0]), expected)


def held(tmp_path: Path, *objects: Any) -> list[Path]:
    """Directories with a state at step 2."""
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    with optimizer:
        optimizer.register_for_checkpointing(*objects)
        train(model, optimizer, range(2), net_loss)
    return devices


def test_objects_of_another_type_or_order_are_refused(tmp_path: Path) -> None:
    devices = held(tmp_path, Counter(1), Other(2))
    _, optimizer = begin(devices, resume=True)
    with optimizer:
        one, two = Counter(), Other()
        with pytest.raises(StateMismatchError, match=r"object 0 is a Other.*a Counter there"):
            optimizer.register_for_checkpointing(two, one)
        with pytest.raises(StateMismatchError, match="object 0 is a StepLR"):
            optimizer.register_for_checkpointing(lr_scheduler.StepLR(optimizer, 2))
        assert (one.value, two.value) == (0, 0)
        optimizer.register_for_checkpointing(one)
        with pytest.raises(StateMismatchError, match="object 1 is a Counter"):
            optimizer.register_for_checkpointing(Counter())
        optimizer.register_for_checkpointing(two)
        assert (one.value, two.value) == (1, 2)


def test_missing_objects_are_named_at_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = held(tmp_path, Counter(1), Other(2))
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        optimizer.register_for_checkpointing(Counter())
        assert not warnings_of(caplog)
        train(model, optimizer, range(2), net_loss)
        (warning,) = warnings_of(caplog)
        assert warning.levelno == logging.WARNING
        assert "not registered this time" in warning.message
        assert "['Other']" in warning.message


def test_objects_that_the_state_does_not_know_start_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = held(tmp_path, Counter(1))
    model, optimizer = begin(devices, resume=True)
    with optimizer:
        one, two = Counter(), Other(7)
        optimizer.register_for_checkpointing(one, two)
        (warning,) = warnings_of(caplog)
        assert "['Other'] start anew" in warning.message
        assert (one.value, two.value) == (1, 7)
        train(model, optimizer, range(1), net_loss)
    assert len(warnings_of(caplog)) == 1
    _, optimizer = begin(devices, resume=True)
    with optimizer:
        one, two = Counter(), Other()
        optimizer.register_for_checkpointing(one, two)
        assert (one.value, two.value) == (1, 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: object(), "given a object.*state_dict"),
        (lambda: RandomSampler(range(5)), "given a RandomSampler.*state_dict"),
        (lambda: Counter(lambda: 0), r"Counter \(registered object 1\) holds .*function.*'value'"),
        (lambda: Counter([1, {"x": object()}]), r"Counter.*object.*\['value'\]\[1\]\['x'\]"),
        (lambda: Other({1: os.path}), "Other.*module"),
    ],
)
def test_what_cannot_be_committed_is_refused_by_name(
    make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    devices = directories(tmp_path, 1)
    model, optimizer = begin(devices)
    with optimizer:
        good = Counter(5)
        optimizer.register_for_checkpointing(good)
        with pytest.raises(UnsupportedError, match=message):
            optimizer.register_for_checkpointing(make())
        with pytest.raises(UnsupportedError, match="registered already"):
            optimizer.register_for_checkpointing(good)
        train(model, optimizer, range(1), net_loss)
    _, optimizer = begin(devices, resume=True)
    with optimizer:
        again = Counter()
        optimizer.register_for_checkpointing(again)
        assert again.value == 5


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("with_checksum", [False, True])
def test_a_pickle_is_never_executed(with_checksum: bool, tmp_path: Path) -> None:
    devices = held(tmp_path, Counter(1))
    evil = pickle.dumps(Evil(tmp_path / "executed"))
    if with_checksum:
        with open_set(devices, writable=True) as found:
            for store, record in zip(found.stores, found.require_records(), strict=True):
                store.open()
                store.settle(record)
                store.amend(evil)
    else:
        for device in devices:
            for name in ("blob.0", "blob.1"):
                (device / name).write_bytes(evil)
    model = small_net(seed=77)
    with pytest.raises(CorruptStateError):
        begin(devices, resume=True, model=model)
    assert not (tmp_path / "executed").exists()
    assert same_bits(weights_of(model), weights_of(small_net(seed=77)))


# --- random states ---------------------------------------------------------------------------


def draws() -> list[float]:
    return [*torch.randn(3).tolist(), random.gauss(0, 1), float(np.random.standard_normal())]


def test_random_states_continue(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    for n in range(3):
        draws()
        train(model, optimizer, [n], net_loss)
    crashed = copies(devices, tmp_path / "crash")
    expected = [draws() for _ in range(3)]
    optimizer.close()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    model, optimizer = begin(crashed, resume=True)
    with optimizer:
        assert [draws() for _ in range(3)] == expected
        optimizer.restore_random_state()
        assert draws() == expected[0]
        optimizer.restore_random_state()
        train(model, optimizer, [3], net_loss)
        assert draws() == expected[0], "a step draws nothing"
        optimizer.restore_random_state()
        assert draws() == expected[1], "after the first step it does nothing"


def test_dropout_continues(tmp_path: Path) -> None:
    def net(seed: int) -> nn.Module:
        model = small_net(seed)
        model[1] = nn.Dropout(0.4)
        return model

    devices = directories(tmp_path, 2)
    run = begin(devices, model=net(0))
    train(*run, range(3), net_loss)
    crashed = copies(devices, tmp_path / "crash")
    train(*run, range(3, 6), net_loss)
    expected = Everything(*run)
    run[1].close()
    again = begin(crashed, resume=True, model=net(7))
    list(RandomSampler(range(9)))  # a loader that draws a seed when it is made
    again[1].restore_random_state()
    train(*again, range(3, 6), net_loss)
    expected.check(*again)


# --- buffers, fp16, skipped steps ------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Linear(11, 1)
        self.register_buffer("kept", torch.full((2,), float(seed)))
        self.register_buffer("passing", torch.full((2,), float(seed)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))) + self.kept.sum()


def test_persistent_buffers_continue_and_others_do_not(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    run = begin(devices, model=Buffered(1))
    train(*run, range(3), net_loss)
    crashed = copies(devices, tmp_path / "crash")
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    outputs = run[0].eval()(x), run[0].train()(x)
    run[1].close()
    again, optimizer = begin(crashed, resume=True, model=Buffered(2))
    with optimizer:
        assert again.norm.num_batches_tracked == 3
        assert (again.kept == 1).all()
        assert (again.passing == 2).all()
        assert same_bits([again.eval()(x), again.train()(x)], outputs)


def test_buffers_of_another_model_are_refused(tmp_path: Path) -> None:
    devices = directories(tmp_path, 1)
    run = begin(devices, model=Buffered(1))
    train(*run, range(1), net_loss)
    run[1].close()
    other = Buffered(2)
    other.kept = torch.zeros(3)
    with pytest.raises(StateMismatchError, match=r"buffer kept \(2,\).*\(3,\)"):
        begin(devices, resume=True, model=other)
    assert same_bits(weights_of(other), weights_of(Buffered(2)))


def test_large_buffers_are_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "MAX_BUFFER_NBYTES", 40)
    devices = directories(tmp_path, 1)
    run = begin(devices, model=Buffered(1))
    train(*run, range(2), net_loss)
    run[1].close()
    (warning,) = warnings_of(caplog)
    assert "buffers take 104 bytes, more than the 40" in warning.message
    again, optimizer = begin(devices, resume=True, model=Buffered(2))
    with optimizer:
        assert again.norm.num_batches_tracked == 0
        assert (again.kept == 2).all()
        assert same_bits(weights_of(again), weights_of(run[0]))


def scaled(run: Run, scaler: Any, seeds: range) -> None:
    model, optimizer = run
    for seed in seeds:
        scaler.scale(net_loss(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_grad_scaler_continues_from_before_its_update(tmp_path: Path) -> None:
    """As documented: its state is the one in the step, and `update()` comes after that."""

    def scaler(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)

    devices = directories(tmp_path, 2)
    run, own = begin(devices, dtype=torch.float16), scaler(2.0**10)
    run[1].register_for_checkpointing(own)
    scaled(run, own, range(4))
    crashed = copies(devices, tmp_path / "crash")
    now = own.state_dict()
    assert (now["scale"], now["_growth_tracker"]) == (2.0**11, 1)
    scaled(run, own, range(4, 7))
    expected = Everything(*run)
    run[1].close()
    again, own = begin(crashed, resume=True, dtype=torch.float16), scaler(1.0)
    again[1].register_for_checkpointing(own)
    assert own.state_dict() == {**now, "_growth_tracker": 0}
    scaled(again, own, range(4, 7))
    expected.check(*again)


def test_a_skipped_step_writes_nothing(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    optimizer.register_for_checkpointing(Counter(1))
    train(model, optimizer, range(2), net_loss)
    before, all_of_it = contents(devices), Everything(model, optimizer)
    for bad in (float("inf"), float("nan")):
        (net_loss(model, 2) * bad).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
        assert contents(devices) == before
    all_of_it.check(model, optimizer)
    train(model, optimizer, range(2, 3), net_loss)
    assert not optimizer.step_was_skipped
    assert optimizer.committed_step == 3
    assert contents(devices) != before
