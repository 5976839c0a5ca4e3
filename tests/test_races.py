"""Whatever order reads, updates and writes of different records come in, the result is the same."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import (
    OPTIMIZERS,
    directories,
    offload,
    offloaded_moments,
    same_bits,
    tiny_gpt,
    train,
    weights_of,
)
from smart_infinity import layout, planning
from smart_infinity.storage import handler

RECORD_ELEMENTS, STEPS = 3000, 3


class Reordering:
    """Delays every read and write by a random time, so that they overtake each other."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.random, self.lock, self.calls = random.Random(seed), threading.Lock(), 0
        for call in ("preadv", "pwritev"):
            patch.setattr(os, call, functools.partial(self.delayed, getattr(os, call)))

    def delayed(self, real: Any, *args: Any) -> Any:
        with self.lock:
            self.calls += 1
            seconds = self.random.choice([0, 0, 1e-4, 1e-3, 3e-3])
        if self.random.random() < 0.5:
            time.sleep(seconds)
            return real(*args)
        result = real(*args)
        time.sleep(seconds)
        return result


def poison_released_buffers(patch: pytest.MonkeyPatch) -> None:
    """Fill a worker's buffer with NaN once its tasklet is over."""
    tasklet = handler.TransferHandler._tasklet

    def poisoned(self: Any, record: Any, buffer: handler.Buffer, *args: Any) -> None:
        tasklet(self, record, buffer, *args)
        buffer.bytes.view(np.float32)[:] = np.nan
        buffer.words32[:] = np.nan
        buffer.words16[:] = 0x7FC0

    patch.setattr(handler.TransferHandler, "_tasklet", poisoned)


def run(base: Path) -> list[Tensor]:
    """A run of `STEPS` steps on two devices; weights and states."""
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    optimizer = offload(model, source, directories(base, 2), dtype=torch.bfloat16)
    with optimizer:
        train(model, optimizer, range(STEPS))
        states = offloaded_moments(model, optimizer)
        return [*weights_of(model), *(tensor for kind in states.values() for tensor in kind)]


@pytest.fixture
def many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records so small that each device has dozens of them."""
    cut = functools.partial(layout.plan_layout, record_elements=RECORD_ELEMENTS)
    monkeypatch.setattr(planning, "plan_layout", cut)


def check(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        disturbance = Reordering(patch, seed)
        poison_released_buffers(patch)
        assert same_bits(run(tmp_path / "disturbed"), expected)
    assert disturbance.calls > 50 * STEPS


@pytest.mark.usefixtures("many_records")
@pytest.mark.parametrize("seed", range(4))
def test_order_does_not_matter(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.usefixtures("many_records")
@pytest.mark.parametrize("seed", range(100, 150))
def test_order_does_not_matter_over_many_seeds(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(seed, tmp_path, monkeypatch)
