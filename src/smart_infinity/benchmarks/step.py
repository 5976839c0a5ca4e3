"""Whole training steps of several ways to train, each in a process of its own, in turns.

The processes are children that are driven line by line: one says that it is ready when its first
step is done, makes as many steps as it is told, and says how long they took. Steps are measured
from the start of a forward to the start of the next, back to back behind one that is not measured,
so that what a step leaves to its successor is paid for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from smart_infinity.errors import SmartInfinityError

STEPS_PER_ROUND = 3
RAW = "raw"  # the child that moves the bytes of a step and does nothing else


class ChildFailedError(SmartInfinityError, RuntimeError):
    """One of the measured processes ended."""


@dataclass(kw_only=True)
class ModeResult:
    """Medians of one way to train; seconds."""

    step_s: float
    forward_s: float
    """Without the time that it waited for weights."""
    backward_s: float
    wait_s: float
    """In the optimizer's step, and in forward for weights."""
    peak_bytes: int
    """The largest resident size of the process."""
    first_step_s: float
    """From the start of the process to the end of its first step."""
    num_parameters: int | None
    steps: list[float] = field(repr=False)


class Child:
    """A process that trains when it is told to.

    Args:
        name: of the way it trains.
        command: its arguments, the program first.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._receive()
        self.first_step_s = time.perf_counter() - begin
        self.steps: list[dict[str, float]] = []
        self.peak_bytes = 0

    def run(self, num_steps: int) -> None:
        """Make one step, and ``num_steps`` that are measured."""
        self._send(f"steps {num_steps}")
        answer = self._receive()
        self.steps += answer["steps"]
        self.peak_bytes = answer["peak_bytes"]

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            try:
                self._process.communicate("stop\n", timeout=120)
            except (subprocess.TimeoutExpired, OSError):
                self._process.kill()
                self._process.wait()

    def result(self) -> ModeResult:
        """Medians over all steps."""
        keys = ("step_s", "forward_s", "backward_s", "wait_s")
        medians = {key: statistics.median(own[key] for own in self.steps) for key in keys}
        return ModeResult(
            **medians,
            peak_bytes=self.peak_bytes,
            first_step_s=self.first_step_s,
            num_parameters=self.ready.get("num_parameters"),
            steps=[own["step_s"] for own in self.steps],
        )

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            self._raise()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._raise()
        return json.loads(line)

    def _raise(self) -> None:
        code = self._process.wait()
        raise ChildFailedError(
            f"the process of {self.name} ended with exit code {code}. What it printed says why"
        )


def measure_steps(
    commands: Mapping[str, Sequence[str]],
    *,
    rounds: int = 3,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, ModeResult]:
    """Start all children one after the other, then let them make steps in turns.

    Args:
        commands: by name, a child's arguments.
        rounds: of `STEPS_PER_ROUND` measured steps each.
        on_progress: told what is happening.

    Raises:
        ChildFailedError: a child ended.
    """
    with ExitStack() as stack:
        children = []
        for name, command in commands.items():
            on_progress(f"{name}: first step")
            children.append(Child(name, command))
            stack.callback(children[-1].close)
        for number in range(rounds):
            for child in children:
                on_progress(f"round {number + 1} of {rounds}: {child.name}")
                child.run(STEPS_PER_ROUND)
        return {child.name: child.result() for child in children}
