"""How far devices read ahead of a step: as far as buffers reach, and no farther."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers import OPTIMIZERS, directories, gpt_loss, offload, tiny_gpt, train
from smart_infinity.errors import DeviceMemoryError

OVERLAP: dict[str, Any] = {"overlap": True}


class Reads:
    """Counts the reads of state."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._change, self.count = threading.Condition(), 0
        real = os.preadv

        def preadv(*args: Any) -> int:
            result = real(*args)
            with self._change:
                self.count += 1
                self._change.notify_all()
            return result

        patch.setattr(os, "preadv", preadv)

    def wait_for(self, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: self.count >= count, timeout=60)


def read_ahead(base: Path, monkeypatch: pytest.MonkeyPatch, at_least: int, **options: Any) -> int:
    """Reads between the end of a step and a backward that does not come."""
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    optimizer = offload(model, source, directories(base, 1), **options)
    train(model, optimizer, range(2))
    optimizer.synchronize()
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        gpt_loss(model, 9)
        reads.wait_for(at_least)
        optimizer.close()  # whatever else was begun has ended
        return reads.count


def num_records(base: Path) -> int:
    model = tiny_gpt()
    with offload(model, OPTIMIZERS["adamw"](model.parameters()), directories(base, 1)) as own:
        train(model, own, range(1))
        (moved,) = own.last_io.values()
        return int(moved["bytes_read"]) // 8192


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("pace", [OVERLAP, OVERLAP | {"accumulation_steps": 1}])
def test_half_of_the_state_is_read_ahead(
    pace: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = num_records(tmp_path / "count") // 2
    assert half > 20
    assert read_ahead(tmp_path / "run", monkeypatch, half, **pace) == half


@pytest.mark.usefixtures("small_records")
def test_a_budget_says_how_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        read_ahead(tmp_path / "none", monkeypatch, 0, device_memory=1, **OVERLAP)
    zone, each = map(int, re.findall(r"needs (\d+).* buffer (\d+)", str(caught.value))[0])
    budget = zone + 7 * each
    assert read_ahead(tmp_path / "run", monkeypatch, 7, device_memory=budget, **OVERLAP) == 7


@pytest.mark.usefixtures("small_records")
def test_synchronous_steps_read_nothing_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_ahead(tmp_path, monkeypatch, 0) == 0
