"""The crash campaign: training runs that are killed with SIGKILL again and again, and go on.

Each attempt of a run is a process of its own, killed from outside at a random instant: half of
them while they start or resume, the others while they make steps. Data and learning rate differ
in every attempt. What a run has committed must be, bit for bit, what one uninterrupted process
makes of the same inputs, and no step may be lost beyond the one in flight.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from smart_infinity.benchmarks.crash_child import ENDLESS, Task
from smart_infinity.benchmarks.crash_lineage import BrokenLineageError, Lineage
from smart_infinity.benchmarks.crash_process import Attempt, ChildError, Clock, end_groups
from smart_infinity.errors import DeviceSpecError

MAX_KILLS_PER_RUN = 20  # then a run begins anew: beginnings want to be killed as well
LAST_STEPS = 3  # made after the last kill of a run
SIMULTANEOUS_RUNS = 2

# Optimizer, dtype and number of devices.
CONFIGURATIONS = [
    ("adamw", "bfloat16", 1),
    ("sgd", "float32", 1),
    ("adamw", "float32", 2),
    ("sgd", "bfloat16", 2),
    ("adamw", "bfloat16", 3),
    ("sgd", "float32", 3),
]


@dataclass(kw_only=True)
class Counts:
    """What happened, and what should not have."""

    kills: int = 0
    kills_while_resuming: int = 0
    """In `offload()`, fresh or resuming, or after it before the trainer was ready for steps."""
    kills_in_steps: int = 0
    kills_with_workers: int = 0
    """While forked DataLoader workers of the trainer were at work."""
    resumed_beside_workers: int = 0
    """Attempts that were ready while workers of the killed trainer were still alive."""
    attempts: int = 0
    committed_steps: int = 0
    committed_in_flight: int = 0
    """Steps that were committed although the trainer died before it knew."""
    lost_steps: int = 0
    """Acknowledged, and gone after a kill."""
    mismatched_steps: int = 0
    scheduler_lags: int = 0
    """Runs whose scheduler lags, which kills before its first committed call may cause."""
    problems: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Sum up."""
        for name in Counts.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(kw_only=True)
class ConfigurationResult(Counts):
    """All runs of one optimizer on one number of devices."""

    optimizer: str
    dtype: str
    devices: int
    runs: int = 0


@dataclass(kw_only=True)
class CrashResult(Counts):
    """What `crash_campaign` found; all is as promised if there are no problems."""

    seed: int
    configurations: list[ConfigurationResult]
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


def crash_campaign(
    kills: int,
    root: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> CrashResult:
    """Kill training runs, and compare what they commit with uninterrupted ones.

    Args:
        kills: how many, over all configurations.
        root: an existing directory in which devices are made, and removed at the end; None takes
            the one for temporary files.
        seed: of the data, the factors, and the instants of the kills.
        on_progress: told what is happening.
    """
    begin = time.perf_counter()
    results = [
        ConfigurationResult(optimizer=optimizer, dtype=dtype, devices=devices)
        for optimizer, dtype, devices in CONFIGURATIONS
    ]
    total = CrashResult(seed=seed, configurations=results)
    with _own_directory(root) as base, ThreadPoolExecutor(SIMULTANEOUS_RUNS) as pool:
        clock = Clock()
        on_progress("measuring starts and steps")
        for number, configuration in enumerate(results[-2:]):
            _Run(configuration, number, 0, base, seed, clock).measure()
        runs = [
            _Run(results[number % len(results)], number, own_kills, base, seed, clock)
            for number, own_kills in enumerate(split_kills(kills))
        ]
        try:
            for run, counts in zip(runs, pool.map(_Run.make, runs), strict=True):
                run.configuration.add(counts)
                run.configuration.runs += 1
                total.add(counts)
                on_progress(f"{total.kills} of {kills} kills, {total.committed_steps} steps")
        except BaseException:
            clock.stopped = True
            raise
    total.seconds = time.perf_counter() - begin
    return total


def split_kills(kills: int) -> list[int]:
    """The kills of each run: few in each, and as many runs of every configuration."""
    per_round = len(CONFIGURATIONS) * MAX_KILLS_PER_RUN
    num_runs = min(kills, -(-kills // per_round) * len(CONFIGURATIONS))
    return [kills // num_runs + (number < kills % num_runs) for number in range(num_runs)]


@dataclass
class _Run:
    """One lineage: its kills, its last steps, and the uninterrupted run that it must equal."""

    configuration: ConfigurationResult
    number: int
    kills: int
    base: Path
    seed: int
    clock: Clock
    groups: list[int] = field(default_factory=list)

    def make(self) -> Counts:
        """All of it."""
        counts, lineage = Counts(), Lineage()
        own = self.configuration
        name = f"{own.optimizer} {own.dtype} on {own.devices} device(s), run {self.number}"
        try:
            states = self._attempts(counts, lineage)
            counts.scheduler_lags = int(bool(lineage.unscheduled))
            self._compare(counts, lineage, states)
        except (ChildError, BrokenLineageError) as error:
            counts.problems.append(f"attempt {counts.attempts - 1}: {error}")
        finally:
            end_groups(self.groups)
        counts.committed_steps = lineage.step
        counts.committed_in_flight = lineage.committed_in_flight
        counts.lost_steps = lineage.lost_steps
        counts.problems = [f"{name}: {own}" for own in lineage.problems + counts.problems]
        return counts

    def _attempts(self, counts: Counts, lineage: Lineage) -> dict[str, str]:
        chance = random.Random(f"{self.seed} {self.number}")
        workers: tuple[int, ...] = ()
        for number in range(self.kills + 1):
            last = number == self.kills
            turn = number + self.number
            task = self._task(
                f"run{self.number}",
                attempts=(number,),
                steps_each=LAST_STEPS if last else ENDLESS,
                overlap=turn // 4 % 2 == 1 or self.kills - number < 4,
                workers=turn % 4 in (0, 3),
            )
            fate = None if last else "start" if turn % 2 else "steps"
            counts.attempts += 1
            attempt = Attempt(task, number, lineage, self.clock, fate, chance, self.groups)
            if attempt.ready is not None:
                counts.resumed_beside_workers += any(map(_is_alive, workers))
                workers += attempt.ready.workers
            if not last:
                counts.kills += 1
                counts.kills_in_steps += attempt.ready is not None
                counts.kills_while_resuming += attempt.ready is None
                counts.kills_with_workers += attempt.ready is not None and task.workers
        return attempt.states

    def _compare(self, counts: Counts, lineage: Lineage, states: dict[str, str]) -> None:
        task = self._task(
            f"reference{self.number}",
            attempts=tuple(inputs.attempt for inputs in lineage.inputs),
            steps_each=1,
            skip_scheduler_after=tuple(lineage.unscheduled),
        )
        reference = Lineage()
        theirs = Attempt(task, -1, reference, self.clock).states
        mismatches = lineage.mismatches(reference)
        counts.mismatched_steps = len(mismatches)
        counts.problems += mismatches
        counts.problems += [
            f"after the last step: {what} differs from the uninterrupted run's"
            for what in sorted(states.keys() | theirs.keys())
            if states.get(what) != theirs.get(what)
        ]

    def measure(self) -> None:
        """A few steps that are not killed: what starts and steps take."""
        task = self._task(f"measured{self.number}", attempts=(0,), steps_each=6)
        Attempt(task, 0, Lineage(), self.clock)

    def _task(self, name: str, **options: Any) -> Task:
        own = self.configuration
        directories = [self.base / name / f"device{index}" for index in range(own.devices)]
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        return Task(
            seed=random.Random(f"{self.seed} {self.number}").getrandbits(31),
            optimizer=own.optimizer,
            dtype=own.dtype,
            directories=tuple(map(str, directories)),
            **options,
        )


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _own_directory(root: str | os.PathLike[str] | None) -> Iterator[Path]:
    try:
        own = tempfile.TemporaryDirectory(prefix="smart-infinity-crash-", dir=root)
    except OSError as error:
        raise DeviceSpecError(
            f"device {root}: cannot make a directory in it: {error.strerror}. Expected an "
            "existing directory that this process may write to"
        ) from error
    with own as path:
        yield Path(path)
