"""The update phase alone, in turns with raw I/O of the same bytes in the same blocks.

A module of synthetic bf16 weights is offloaded through the public API; its gradient lands once
and stays landed over all steps. Checksums and ledger are on, as always.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import psutil
import torch

import smart_infinity
from smart_infinity.benchmarks.raw import RawCopy
from smart_infinity.devices import check_specs
from smart_infinity.errors import DeviceFullError, DeviceMemoryError, DeviceSpecError
from smart_infinity.layout import Layout
from smart_infinity.planning import plan
from smart_infinity.storage.blockfile import direct_io_refusal
from smart_infinity.storage.slots import free_nbytes, totals_by_file_system

LAYER_ELEMENTS = 1 << 24
DISCARDED_ROUNDS = 1


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What `measure_update` found; see the fields."""

    params: int
    devices: list[str]
    direct_io: list[bool]
    rounds: int
    params_per_s: float
    bytes_read: int
    """Per step, over all devices."""
    bytes_written: int
    gb_per_s: float
    """Read and written together, 1e9 bytes; the median, as ``raw_gb_per_s``."""
    raw_gb_per_s: float
    fraction_of_raw: float
    fraction_spread: tuple[float, float]
    """10th and 90th percentile of the ratio by round."""
    raw_threads: int
    """Per device: the fastest number, found once before the rounds."""
    stages: dict[str, float]
    """Median seconds of a step by stage, summed over the workers of all devices."""
    round_seconds: list[float]
    """Of one step, or one raw pass: the mean of two."""
    raw_round_seconds: list[float]

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


# Weights and gradients in bf16, and the landed gradient.
MEMORY_BYTES_PER_PARAMETER = 6


def _require_memory(num_params: int) -> None:
    needed, available = MEMORY_BYTES_PER_PARAMETER * num_params, psutil.virtual_memory().available
    if needed > available:
        raise DeviceMemoryError(
            f"{num_params:,} parameters need {needed:,} bytes of memory, of which {available:,} "
            "are available. Use fewer parameters"
        )


class _Layer(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def measure_update(
    num_params: int,
    devices: Sequence[str | os.PathLike[str]],
    *,
    rounds: int = 9,
    verify: Literal["resume", "read"] = "resume",
    on_progress: Callable[[str], None] = lambda _: None,
) -> UpdateResult:
    """Measure AdamW's update phase on bf16 weights and gradients, and raw I/O, in turns.

    Args:
        num_params: parameters of the synthetic module.
        devices: existing directories. What is made in them is removed at the end.
        rounds: measured rounds, each of two raw passes and two steps; one more is discarded.
        verify: as in `offload`: ``"read"`` checks the state's checksums in each step.
        on_progress: told what is happening.
    """
    paths = check_specs(devices)
    _require_memory(num_params)
    generator = torch.Generator().manual_seed(0)
    model = _make_model(num_params, generator)
    torch_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    layout = plan(model, torch_optimizer, len(paths), None).layout
    with ExitStack() as stack:
        owned = [stack.enter_context(_own_directory(path)) for path in paths]
        _require_space(layout, paths)
        direct = [direct_io_refusal(path) is None for path in owned]
        on_progress("writing the first state")
        _, optimizer = smart_infinity.offload(model, torch_optimizer, owned, verify=verify)
        stack.callback(optimizer.close)
        for parameter in model.parameters():
            gradient = torch.empty_like(parameter).normal_(0, 1e-3, generator=generator)
            parameter.grad = gradient
        raw = RawCopy(owned, layout, direct)
        stack.callback(raw.close)
        on_progress("choosing the number of raw threads")
        raw_threads = raw.choose_threads()
        ours: list[float] = []
        theirs: list[float] = []
        stages: list[dict[str, float]] = []
        for number in range(-DISCARDED_ROUNDS, rounds):
            on_progress("warming up" if number < 0 else f"round {number + 1} of {rounds}")
            raw_seconds = raw.run()
            begin = time.perf_counter()
            for _ in range(2):  # to the other place and back, as the raw passes
                optimizer.step()
            seconds = (time.perf_counter() - begin) / 2
            if number >= 0:
                ours.append(seconds)
                theirs.append(raw_seconds)
                stages.append(_sums(optimizer.last_timings.values()))
        moved = _sums(optimizer.last_io.values())
    total = sum(moved.values()) / 1e9
    ratios = np.array(theirs) / np.array(ours)
    low, high = np.quantile(ratios, [0.1, 0.9]).tolist()
    return UpdateResult(
        params=num_params,
        devices=paths,
        direct_io=direct,
        rounds=rounds,
        params_per_s=num_params / statistics.median(ours),
        bytes_read=int(moved["bytes_read"]),
        bytes_written=int(moved["bytes_written"]),
        gb_per_s=total / statistics.median(ours),
        raw_gb_per_s=total / statistics.median(theirs),
        fraction_of_raw=statistics.median(theirs) / statistics.median(ours),
        fraction_spread=(low, high),
        raw_threads=raw_threads,
        stages={key: statistics.median(one[key] for one in stages) for key in stages[0]},
        round_seconds=ours,
        raw_round_seconds=theirs,
    )


def _make_model(num_params: int, generator: torch.Generator) -> torch.nn.ModuleList:
    layers = []
    for begin in range(0, num_params, LAYER_ELEMENTS):
        weight = torch.empty(min(LAYER_ELEMENTS, num_params - begin), dtype=torch.bfloat16)
        layers.append(_Layer(weight.normal_(0, 0.02, generator=generator)))
    return torch.nn.ModuleList(layers)


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def _require_space(layout: Layout, paths: Sequence[str]) -> None:
    """State takes two places per device; say so before anything is written."""
    needs = ((path, 2 * layout.state_nbytes(index)) for index, path in enumerate(paths))
    for path, needed in totals_by_file_system(needs):
        available = free_nbytes(path)
        if available < needed:
            raise DeviceFullError(
                f"device {path}: the benchmark needs {needed} bytes on this file "
                f"system (two places for the state) and {available} are free. Free some space, "
                "or measure fewer parameters"
            )


@contextmanager
def _own_directory(path: str) -> Iterator[str]:
    try:
        own = tempfile.mkdtemp(prefix="smart-infinity-bench-", dir=path)
    except OSError as error:
        raise DeviceSpecError(
            f"device {path}: cannot make a directory in it: {error.strerror}. Expected an "
            "existing directory that this process may write to"
        ) from error
    try:
        yield own
    finally:
        shutil.rmtree(own)
