"""Part of the state stays in host memory: it is not read again, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
from smart_infinity.errors import DeviceMemoryError

RECORD_NBYTES = 8192  # of `small_records`


def begin(path: Path, **options: Any) -> Any:
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    return model, offload(model, source, directories(path, 2), **options)


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("durability", ["step", "none"])
def test_what_is_cached_is_written_and_not_read(durability: str, tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path, durability=durability, state_cache=2 * 10 * RECORD_NBYTES)
    with optimizer:
        for seed in range(2):
            train(model, optimizer, [seed])
            for own in optimizer.last_io.values():
                assert own["bytes_written"] - own["bytes_read"] == 10 * RECORD_NBYTES


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
