"""The fused kernels in turns with ``torch.optim.AdamW(fused=True)``, and their compile time.

Kernels are serial and release the GIL: two threads are two Python threads, each with records of
its own, as a device's workers have them. All of it lies in memory that no cache holds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from smart_infinity.benchmarks.arena import Arena, Call, LandingArena
from smart_infinity.kernels.formats import BF16, F16, F32
from smart_infinity.layout import RECORD_ELEMENTS

THREADS = (1, 2)
MAIN_KERNEL = "adamw bf16"  # what is compared with torch
DENORMAL = "adamw bf16, denormals"
TORCH = "torch"

_COMPILE = """
import time
from smart_infinity import kernels
begin = time.perf_counter()
kernels.prepare("adamw")
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True, kw_only=True)
class KernelSpeed:
    """Median speed of one kernel; ``threads`` have their own records each."""

    name: str
    threads: int
    mparams_per_s: float


@dataclass(frozen=True, kw_only=True)
class KernelResult:
    """What `measure_kernels` found; keys of the dictionaries are numbers of threads."""

    kernels: list[KernelSpeed]
    torch_fused: dict[str, float]
    ratio_to_torch_fused: dict[str, float]
    ratio_denormal: float
    """Speed of one thread on denormal gradients and states over its usual speed."""
    compile_s: dict[str, float]
    rounds: int

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


def measure_kernels(
    *,
    rounds: int = 9,
    num_records: int = 32,
    record_elements: int = RECORD_ELEMENTS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> KernelResult:
    """Measure every kernel once per round, in turns, and take medians over the rounds.

    Args:
        rounds: measured rounds; one more, which also compiles, is discarded.
        num_records: records per kernel; the default makes some hundred MiB.
        record_elements: elements of a record.
        on_progress: told what is happening.
    """
    on_progress("compiling in child processes")
    compile_s = measure_compile_time()
    on_progress("filling the memory")
    calls, denormals = _make_calls(num_records, record_elements)
    fused = _FusedTorch(num_records * record_elements)
    seconds: dict[tuple[str, int], list[float]] = {}
    with ThreadPoolExecutor(max(THREADS)) as pool:
        for number in range(rounds + 1):
            on_progress(f"round {number} of {rounds}")
            taken: dict[tuple[str, int], float] = {}
            for threads in THREADS:
                for name, call in calls.items():
                    taken[name, threads] = _run(pool, call, num_records, threads)
                # Last: torch's worker threads spin for a while after their work, and would take
                # a core from whatever is measured next with as many threads.
                with _torch_threads(threads):
                    taken[TORCH, threads] = _timed(fused.step)
            denormals.fill_with_denormals()
            taken[DENORMAL, 1] = _run(pool, denormals.update, num_records, 1)
            if number:
                for key, value in taken.items():
                    seconds.setdefault(key, []).append(value)
    millions = num_records * record_elements / 1e6
    speed = {key: millions / statistics.median(values) for key, values in seconds.items()}
    return KernelResult(
        kernels=[
            KernelSpeed(name=name, threads=threads, mparams_per_s=speed[name, threads])
            for name in calls
            for threads in THREADS
        ],
        torch_fused={str(threads): speed[TORCH, threads] for threads in THREADS},
        ratio_to_torch_fused={
            str(threads): speed[MAIN_KERNEL, threads] / speed[TORCH, threads] for threads in THREADS
        },
        ratio_denormal=speed[DENORMAL, 1] / speed[MAIN_KERNEL, 1],
        compile_s=compile_s,
        rounds=rounds,
    )


def measure_compile_time() -> dict[str, float]:
    """Seconds until the kernels of a first AdamW step are ready, by state of the cache."""
    with tempfile.TemporaryDirectory(prefix="smart-infinity-bench-") as cache:
        return {"cold": _compile_in_child(cache), "cached": _compile_in_child(cache)}


def _compile_in_child(cache: str) -> float:
    child = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(child.stdout)


def _make_calls(num_records: int, length: int) -> tuple[dict[str, Call], Arena]:
    arenas = {
        MAIN_KERNEL: Arena("adamw", BF16, num_records, length),
        "adamw fp32": Arena("adamw", F32, num_records, length),
        "adamw fp16": Arena("adamw", F16, num_records, length),
        "sgd momentum bf16": Arena("sgd", BF16, num_records, length),
        "adagrad bf16": Arena("adagrad", BF16, num_records, length),
    }
    for arena in arenas.values():
        arena.fill()
    calls: dict[str, Call] = {name: arena.update for name, arena in arenas.items()}
    landings = LandingArena(num_records, length)
    calls["land bf16"], calls["accumulate bf16"] = landings.land, landings.accumulate
    return calls, Arena("adamw", BF16, num_records, length)


class _FusedTorch:
    """torch's own fused AdamW on one fp32 tensor of as many elements."""

    def __init__(self, num_elements: int) -> None:
        parameter = torch.nn.Parameter(torch.empty(num_elements).normal_(0, 0.02))
        parameter.grad = torch.empty(num_elements).normal_(0, 1e-3)
        self._optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)

    def step(self) -> None:
        self._optimizer.step()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(pool: ThreadPoolExecutor, call: Call, num_records: int, threads: int) -> float:
    def work(first: int) -> None:
        for index in range(first, num_records, threads):
            call(index)

    def all_threads() -> None:
        for future in [pool.submit(work, first) for first in range(threads)]:
            future.result()

    return _timed(all_threads)


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
