"""``run.png``: loss, time per phase, and bytes over the host link, of one run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smart_infinity.cli.loop import PHASES, StepMetrics
from smart_infinity.cli.report import LINK_COLUMNS, LinkFormula, RunRecord

PLOT_INSTALL = 'pip install "smart-infinity[plot]"'

# Okabe and Ito's colours, which stay apart for colour-blind readers.
PHASE_COLORS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "clip": "#CC79A7",
    "update": "#E69F00",
}
LINK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7")
LOSS_COLOR = "#0072B2"
HELD_OUT_COLOR = "#D55E00"
TEXT_COLOR = "#333333"
GRID_COLOR = "#DDDDDD"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "text.color": TEXT_COLOR,
    "axes.labelcolor": TEXT_COLOR,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
}

MIN_STEPS_FOR_MEAN = 10
MAX_STEPS_AS_BARS = 200


def plot_run(record: RunRecord, path: Path, *, title: str) -> bool:
    """Draws a run; returns False where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return False
    with matplotlib.rc_context(STYLE):
        # A figure of its own rather than pyplot's: no window system, no global state.
        figure = Figure(figsize=(15, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.1, wspace=0.06))
        FigureCanvasAgg(figure)
        figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=12)
        loss, time, link = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
        _plot_loss(loss, record.steps, record.held_out)
        _plot_time(time, record.steps)
        measured = LinkFormula("measured", record.measured())
        _plot_link(link, [*record.formulas(), measured])
        figure.savefig(path, dpi=120)
    return True


def _plot_loss(axes: Any, steps: Sequence[StepMetrics], held_out: Mapping[int, float]) -> None:
    axes.set_title("Loss")
    numbers = [step.step for step in steps]
    losses = [float("nan") if step.loss is None else step.loss for step in steps]
    axes.plot(
        numbers,
        losses,
        color=LOSS_COLOR,
        marker="o",
        markersize=3,
        alpha=0.45,
        lw=1,
        label="training, each step",
    )
    if len(steps) >= MIN_STEPS_FOR_MEAN:
        # A batch of one window says little about the model; the mean shows the trend.
        width = max(5, len(steps) // 10)
        means = [sum(losses[end - width : end]) / width for end in range(width, len(losses) + 1)]
        axes.plot(
            numbers[width - 1 :],
            means,
            color=LOSS_COLOR,
            lw=2.2,
            label=f"training, mean of {width} steps",
        )
    if held_out:
        # Between the step before and the step after.
        places = [step + 0.5 for step in held_out]
        axes.plot(
            places,
            list(held_out.values()),
            color=HELD_OUT_COLOR,
            marker="D",
            markersize=5,
            ls="--",
            clip_on=False,
            label="held-out text",
        )
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
    axes.legend(frameon=False, loc="upper right")
    axes.grid(axis="y", color=GRID_COLOR)
    _label_steps(axes, numbers)


def _plot_time(axes: Any, steps: Sequence[StepMetrics]) -> None:
    axes.set_title("Seconds per step")
    numbers = [step.step for step in steps]
    seconds = {phase: [step.seconds[phase] for step in steps] for phase in PHASES}
    if len(steps) <= MAX_STEPS_AS_BARS:
        bottom = [0.0] * len(steps)
        for phase, values in seconds.items():
            axes.bar(
                numbers, values, bottom=bottom, width=0.85, color=PHASE_COLORS[phase], label=phase
            )
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    else:
        axes.stackplot(
            numbers,
            list(seconds.values()),
            labels=list(seconds),
            colors=[PHASE_COLORS[phase] for phase in seconds],
        )
    total = sum(step.seconds["total"] for step in steps)
    handles, labels = axes.get_legend_handles_labels()
    shares = [f"{label} {sum(seconds[label]) / total:.0%}" for label in labels]
    axes.margins(y=0.22)  # room for the legend above the bars
    axes.legend(handles[::-1], shares[::-1], ncols=2, frameon=False, loc="upper right")
    axes.grid(axis="y", color=GRID_COLOR)
    _label_steps(axes, numbers)


def _label_steps(axes: Any, numbers: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_xlim(numbers[0] - 0.7, numbers[-1] + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_link(axes: Any, formulas: Sequence[LinkFormula]) -> None:
    axes.set_title("Host link, bytes per parameter and step")
    names = [formula.name for formula in formulas]
    left = [0.0] * len(formulas)
    for index, (column, color) in enumerate(zip(LINK_COLUMNS, LINK_COLORS, strict=True)):
        values = [formula.columns[index] for formula in formulas]
        # A kind that is too small to be seen needs no line in the legend.
        label = column if max(values) > 0.01 else None
        axes.barh(names, values, left=left, height=0.6, color=color, label=label)
        left = [low + value for low, value in zip(left, values, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.annotate(
            f"{total:.2f}", (total, name), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left))  # room for the sums
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID_COLOR)
    axes.legend(frameon=False, loc="lower right")
