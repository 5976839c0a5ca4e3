"""What remains of a run: ``metrics.jsonl``, and the tables printed at its end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from rich import box
from rich.table import Table

from smart_infinity.cli.errors import UsageError
from smart_infinity.cli.loop import PHASES, StepMetrics

# The first four are those of the formulas; other kinds of traffic are shown together as "other".
LINK_COLUMNS = {
    "gradients": ("gradients_to_device", "gradients_to_host"),
    "weights to host": ("weights_to_host",),
    "state to host": ("state_to_host",),
    "state to device": ("state_to_device",),
    "other": ("weights_to_device", "control"),
}
NUM_STEPS_IN_LOSS_MEAN = 5


@dataclass(frozen=True)
class LinkFormula:
    """Bytes per parameter and step over the host link, as a publication or our design has them."""

    name: str
    columns: tuple[float, ...]
    """One value for each of `LINK_COLUMNS`."""

    @property
    def sum(self) -> float:
        """Over all columns."""
        return sum(self.columns)


# Adam, 16-bit weights, one backward per step; Table I of the paper, whose M is 2 bytes/parameter.
PUBLISHED_FORMULAS = (
    LinkFormula("ZeRO-Infinity", (8, 0, 12, 12, 0)),
    LinkFormula("SmartUpdate (paper)", (4, 4, 0, 0, 0)),
    LinkFormula("SmartComp 2 % (paper)", (0.08, 4, 0, 0, 0)),
)


def own_formula(bytes_per_weight: int, accumulate: int) -> LinkFormula:
    """What this library should have moved: every gradient out once, every weight back once."""
    times = "" if accumulate == 1 else f" x{accumulate}"
    return LinkFormula(
        f"ours, {8 * bytes_per_weight}-bit{times}",
        (bytes_per_weight * accumulate, bytes_per_weight, 0, 0, 0),
    )


class RunRecord:
    """The steps of a run, in memory and in ``metrics.jsonl``.

    Attributes:
        steps: what each step did, kept lines of an earlier part included.
        held_out: by number of steps made, the loss over windows that are not trained on.
        committed_step: how many steps the devices hold.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        keep_until_step: int,
        num_parameters: int,
        bytes_per_weight: int,
        accumulate: int,
    ) -> None:
        self.num_parameters = num_parameters
        self.bytes_per_weight = bytes_per_weight
        self.accumulate = accumulate
        self.committed_step = keep_until_step
        self.steps: list[StepMetrics] = []
        self.held_out: dict[int, float] = {}
        self._file: IO[str] | None = None
        if path is None:
            return
        kept = read_metrics(path) if keep_until_step and path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        for metrics in kept:
            # Steps after the one that is resumed from are made again.
            if metrics.step <= keep_until_step:
                self.append(metrics)

    def append(self, metrics: StepMetrics) -> None:
        """Adds a step; its line is written at once, so that the file can be followed."""
        self.steps.append(metrics)
        if self._file is not None:
            self._file.write(json.dumps(metrics.as_dict(), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def measured(self) -> tuple[float, ...]:
        """Mean bytes per parameter of the steps not skipped, for each of `LINK_COLUMNS`."""
        moved = [step for step in self.steps if not step.skipped]
        return tuple(
            sum(step.bytes.get(kind, 0) for step in moved for kind in kinds)
            / (self.num_parameters * max(1, len(moved)))
            for kinds in LINK_COLUMNS.values()
        )

    def formulas(self) -> tuple[LinkFormula, ...]:
        """The published formulas, and what this library should have moved in this run."""
        return (*PUBLISHED_FORMULAS, own_formula(self.bytes_per_weight, self.accumulate))


def read_metrics(path: Path) -> list[StepMetrics]:
    """Reads a ``metrics.jsonl``."""
    names = {field.name for field in fields(StepMetrics)}
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values = json.loads(line)
            steps.append(StepMetrics(**{name: values[name] for name in names}))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}, line {number}: not a line of metrics that this version wrote; move the "
                "file away, or give another --output"
            ) from error
    return steps


def link_table(record: RunRecord) -> Table:
    """Bytes per parameter and step, measured, beside the formulas."""
    title = "Bytes per parameter and step over the host link"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in LINK_COLUMNS:
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    table.add_column("sum", justify="right", style="bold")
    for formula in record.formulas():
        _add_row(table, formula.name, formula.columns)
    table.add_section()
    _add_row(table, "measured", record.measured(), style="green")
    table.caption = (
        "ZeRO-Infinity and the paper: Adam, 16-bit weights, fp32 gradients, one backward per step; "
        "ZeRO-Infinity's gradients go out and come back"
    )
    return table


def _add_row(table: Table, name: str, columns: Sequence[float], style: str = "") -> None:
    cells = [_format_bytes(value) for value in (*columns, sum(columns))]
    table.add_row(name, *cells, style=style)


def _format_bytes(value: float) -> str:
    if value == 0:
        return "-"
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def run_table(record: RunRecord) -> Table:
    """Loss, speed, and where the time went."""
    steps = record.steps
    title = f"Steps {steps[0].step} to {steps[-1].step}"
    table = Table(title=title, show_header=False, box=box.SIMPLE_HEAD)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    losses = [step.loss for step in steps if step.loss is not None]
    if losses:
        count = min(NUM_STEPS_IN_LOSS_MEAN, max(1, len(losses) // 2))
        start, end = sum(losses[:count]) / count, sum(losses[-count:]) / count
        note = "" if count == 1 else f"means of first and last {count} steps"
        table.add_row("training loss", f"{start:.4f} -> {end:.4f}", note)
    if len(record.held_out) > 1:
        (first, before), (last, after) = min(record.held_out.items()), max(record.held_out.items())
        note = f"after {first} and after {last} steps, on text not trained on"
        table.add_row("held-out loss", f"{before:.4f} -> {after:.4f}", note)
    num_skipped = sum(step.skipped for step in steps)
    if num_skipped:
        table.add_row("skipped", str(num_skipped), "a gradient was not finite")
    total = sum(step.seconds["total"] for step in steps)
    tokens = sum(step.tokens for step in steps)
    table.add_row("tokens/s", f"{tokens / total:.1f}", "")
    table.add_row("seconds per step", f"{total / len(steps):.3f}", "")
    for phase in PHASES:
        seconds = sum(step.seconds[phase] for step in steps)
        table.add_row(f"  {phase}", f"{seconds / len(steps):.3f}", f"{seconds / total:.0%}")
    waiting = sum(step.storage_wait_share * step.seconds["total"] for step in steps)
    table.add_row("storage wait", f"{waiting / total:.0%}", "of the time")
    return table
