"""What the training loop is doing: for a trace, and for ``torch.profiler``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from smart_infinity.trace import HOST, Trace, spanning

LOOP = "loop"


class Timeline:
    """The host's track of a trace.

    Forward is what lies between a step and the first gradient that lands, backward what lies
    between that and the next step.
    """

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace
        self._last_end = time.perf_counter()
        self._first_landing: float | None = None

    def landing(self, device: str, name: str) -> contextlib.AbstractContextManager[None]:
        """The gradient of the parameter of this name crosses to a device."""
        if self.trace is not None and self._first_landing is None:
            self._first_landing = time.perf_counter()
        return spanning(self.trace, device, "link", f"gradient of {name}")

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The optimizer's step of this number is being made."""
        if self.trace is not None and self._first_landing is not None:
            self.trace.add(HOST, LOOP, "forward", self._last_end, self._first_landing)
            self.trace.add(HOST, LOOP, "backward", self._first_landing, time.perf_counter())
        self._first_landing = None
        with (
            torch.profiler.record_function("smart_infinity.step"),
            spanning(self.trace, HOST, LOOP, f"step {number}"),
        ):
            yield
        self._last_end = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The loop waits."""
        with (
            torch.profiler.record_function("smart_infinity.wait"),
            spanning(self.trace, HOST, "wait", what),
        ):
            yield

    def close(self) -> None:
        """End the trace."""
        if self.trace is not None:
            self.trace.close()
