"""Whatever order things come in, and whenever the devices work, the result is the same."""

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
from torch import Tensor, nn

from helpers import (
    OPTIMIZERS,
    directories,
    gpt_loss,
    offload,
    offloaded_moments,
    same_bits,
    tiny_gpt,
    train,
    weights_of,
)
from smart_infinity import layout, planning
from smart_infinity.storage import pipeline, tasklets

RECORD_ELEMENTS, STEPS = 3000, 4

# What offload() is told, the loop's own clipping, and the backwards of a step.
MODES: dict[str, tuple[dict[str, Any], float | None, int]] = {
    "step": ({}, 0.5, 1),
    "overlap": ({"overlap": True}, 0.5, 1),
    "overlap, unclipped": ({"overlap": True}, None, 1),
    "early": ({"accumulation_steps": 1}, None, 1),
    "early, overlap": ({"overlap": True, "accumulation_steps": 1}, None, 1),
    "early, overlap, accumulated": ({"overlap": True, "accumulation_steps": 2}, None, 2),
    "early, overlap, read": ({"overlap": True, "accumulation_steps": 1, "verify": "read"}, None, 1),
    "early, in place": (
        {"overlap": True, "accumulation_steps": 1, "durability": "none"},
        None,
        1,
    ),
    "cached": ({"state_cache": "600 kB"}, 0.5, 1),
    "cached, in place": ({"state_cache": "600 kB", "durability": "none"}, 0.5, 1),
    "early, overlap, cached, in place": (
        {
            "overlap": True,
            "accumulation_steps": 1,
            "state_cache": "600 kB",
            "durability": "none",
        },
        None,
        1,
    ),
    "early, overlap, cached": (
        {"overlap": True, "accumulation_steps": 1, "state_cache": "600 kB"},
        None,
        1,
    ),
    "in vain, cached": (
        {"overlap": True, "accumulation_steps": 1, "state_cache": "600 kB"},
        0.5,
        1,
    ),
    "clipped": ({"overlap": True, "accumulation_steps": 1, "max_grad_norm": 0.5}, None, 1),
    "in vain": ({"overlap": True, "accumulation_steps": 1}, 0.5, 1),  # all is done again
    "too many": ({"overlap": True, "accumulation_steps": 1}, None, 3),  # the second one changes it
}


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
    """Fill a buffer with NaN once its tasklet is over."""
    put_back = pipeline.Pipeline._put_back

    def poisoned(self: pipeline.Pipeline, buffer: tasklets.Buffer) -> None:
        if not buffer.is_valid or buffer.cached is None:
            buffer.bytes.view(np.float32)[:] = np.nan
        if hasattr(buffer, "words"):
            buffer.words32[:] = np.nan
            buffer.words16[:] = 0x7FC0
        put_back(self, buffer)

    patch.setattr(pipeline.Pipeline, "_put_back", poisoned)


def run(base: Path, options: dict[str, Any], clip: float | None, backwards: int) -> list[Tensor]:
    """A run of `STEPS` steps on two devices; weights and states."""
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    optimizer = offload(model, source, directories(base, 2), dtype=torch.bfloat16, **options)

    def loss(model: nn.Module, seed: int) -> Tensor:
        for micro in range(1, backwards):
            gpt_loss(model, 100 * seed + micro).backward()
        return gpt_loss(model, seed)

    with optimizer:
        train(model, optimizer, range(STEPS), loss, clip)
        states = offloaded_moments(model, optimizer)
        return [*weights_of(model), *(tensor for kind in states.values() for tensor in kind)]


@pytest.fixture
def many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records so small that each device has dozens of them."""
    cut = functools.partial(layout.plan_layout, record_elements=RECORD_ELEMENTS)
    monkeypatch.setattr(planning, "plan_layout", cut)


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[float | None, int], list[Tensor]]:
    """By clipping and backwards, what plain steps make."""
    return {}


def check(
    mode: str,
    seed: int,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[tuple[float | None, int], list[Tensor]],
) -> None:
    options, clip, backwards = MODES[mode]
    kind = options.get("max_grad_norm", clip), backwards
    if kind not in undisturbed:
        undisturbed[kind] = run(root / "undisturbed", {}, *kind)
    with monkeypatch.context() as patch:
        disturbance = Reordering(patch, seed)
        poison_released_buffers(patch)
        assert same_bits(run(root / "disturbed", options, clip, backwards), undisturbed[kind])
    assert disturbance.calls > 50 * STEPS - 20 * STEPS * ("state_cache" in options)


@pytest.mark.usefixtures("many_records")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_order_does_not_matter(
    mode: str,
    seed: int,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[tuple[float | None, int], list[Tensor]],
) -> None:
    check(mode, seed, root, monkeypatch, undisturbed)


@pytest.mark.long
@pytest.mark.usefixtures("many_records")
@pytest.mark.parametrize("seed", range(100, 210))
def test_order_does_not_matter_over_many_seeds(
    seed: int,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[tuple[float | None, int], list[Tensor]],
) -> None:
    check(list(MODES)[seed % len(MODES)], seed, root, monkeypatch, undisturbed)
