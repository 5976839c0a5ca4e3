"""``smart-infinity bench step``: which processes are compared, and what is said of them."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from smart_infinity.cli.errors import UsageError
from smart_infinity.cli.models import check_model_name

BYTES_PER_PARAMETER = 24  # of state, read and written by AdamW
MODES = ("torch", "raw", "offload", "overlap", "overlap_unclipped", "cache")


def measure(
    directory: Path,
    *,
    model: str,
    batch_size: int,
    seq_len: int,
    rounds: int,
    deepspeed: Sequence[str] | None,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run all modes in turns; returns what ``--json`` writes.

    Args:
        directory: on the storage to measure; what is made in it is removed.
        model: see ``train --model``.
        batch_size: sequences in a batch.
        seq_len: tokens in a sequence.
        rounds: see ``benchmarks.step``.
        deepspeed: the program and the arguments of a process that trains by DeepSpeed, or None.
        on_progress: told what is happening.
    """
    from smart_infinity.benchmarks.step import RAW, measure_steps

    check_model_name(model)
    if not directory.is_dir():
        raise UsageError(f"--devices {directory}: expected an existing directory")
    base = Path(tempfile.mkdtemp(prefix="smart-infinity-bench-", dir=directory))
    try:
        options = [
            "--model",
            model,
            "--batch-size",
            str(batch_size),
            "--seq-len",
            str(seq_len),
        ]
        commands: dict[str, list[str]] = {}
        for mode in MODES:
            (base / mode).mkdir()
            program = [sys.executable, "-m", "smart_infinity.cli.step_child", "--mode", mode]
            commands[mode] = [*program, "--directory", str(base / mode), *options]
        if deepspeed:
            (base / "deepspeed").mkdir()
            own = [*deepspeed, "--directory", str(base / "deepspeed"), *options]
            commands["deepspeed"] = own
        results = measure_steps(commands, rounds=rounds, on_progress=on_progress)
    finally:
        shutil.rmtree(base)
    raw = results.pop(RAW)
    plain = results["torch"]
    assert plain.num_parameters is not None
    nbytes = BYTES_PER_PARAMETER * plain.num_parameters
    return {
        "model": model,
        "modes": {"deepspeed": None} | {name: asdict(own) for name, own in results.items()},
        "raw_gb_per_s": nbytes / raw.step_s / 1e9,
        "raw_steps": raw.steps,
        "bound_s": max(plain.forward_s + plain.backward_s, raw.step_s),
    }


def table_of(result: dict[str, Any]) -> tuple[Table, str]:
    """What is printed."""
    table = Table(title=f"steps of {result['model']}", title_justify="left", box=box.SIMPLE)
    columns = ("", "step", "forward", "backward", "waiting", "of bound", "peak GB", "first step")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for name, own in result["modes"].items():
        if own is not None:
            seconds = [own[key] for key in ("step_s", "forward_s", "backward_s", "wait_s")]
            table.add_row(
                name,
                *(f"{value:.2f} s" for value in seconds),
                f"{own['step_s'] / result['bound_s']:.2f}",
                f"{own['peak_bytes'] / 1e9:.1f}",
                f"{own['first_step_s']:.1f} s",
            )
    return table, (
        f"the bound is {result['bound_s']:.2f} s: what plain torch needs for forward and backward, "
        f"or the state's bytes at {result['raw_gb_per_s']:.2f} GB/s, whichever is longer"
    )
