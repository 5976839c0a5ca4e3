"""What the user sees while ``train`` runs: a live bar on a terminal, plain lines in a log."""

import time
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from smart_infinity.cli.console import print_line, stderr
from smart_infinity.cli.loop import StepMetrics

SECONDS_BETWEEN_LINES = 10.0
MAX_RATES_ONE_BY_ONE = 4


class TrainingDisplay:
    """Shows each step as it ends: `show` prints to stderr, which keeps stdout for the result."""

    def __init__(self, *, completed: int, total: int) -> None:
        self._total = total
        self._last_line = -SECONDS_BETWEEN_LINES
        self._progress: Progress | None = None
        if stderr.is_terminal:
            self._progress = Progress(
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TextColumn("{task.fields[summary]}", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                expand=True,
                console=stderr,
            )
            self._task = self._progress.add_task(
                "", completed=completed, total=total, summary="first step"
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Shows a step that has just ended."""
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, summary=describe(metrics))
            return
        now = time.monotonic()
        is_due = now - self._last_line >= SECONDS_BETWEEN_LINES
        if is_due or metrics.skipped or metrics.step == self._total:
            self._last_line = now
            print_line(f"step {metrics.step}/{self._total}  {describe(metrics)}")


def describe(metrics: StepMetrics) -> str:
    """One step in a line: loss, tokens/s, GB/s per device, share of time waiting for storage."""
    loss = "not finite" if metrics.loss is None else f"{metrics.loss:.3f}"
    parts = [f"loss {loss}", f"{metrics.tokens_per_second:.0f} tokens/s"]
    if metrics.skipped:
        parts.append("step skipped: a gradient was not finite")
    else:
        parts.append(_describe_rates(list(metrics.device_gb_per_second().values())))
        parts.append(f"storage wait {metrics.storage_wait_share:.0%}")
    return " · ".join(parts)


def _describe_rates(rates: list[float]) -> str:
    if len(rates) > MAX_RATES_ONE_BY_ONE:
        return f"{len(rates)}x {min(rates):.2f}-{max(rates):.2f} GB/s"
    return " ".join(f"{rate:.2f}" for rate in rates) + " GB/s"
