"""``smart-infinity bench``: update beside raw I/O, kernels beside torch's, runs that are killed."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from smart_infinity.cli.console import print_error, print_line, print_result, stderr
from smart_infinity.cli.errors import EXIT_ERROR, UsageError
from smart_infinity.cli.options import Verify
from smart_infinity.cli.variadic import SeveralValuesCommand

app = typer.Typer(no_args_is_help=True, help="Measure this machine; nothing is left behind.")

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result to this file.", show_default=False),
]


def parse_count(text: str) -> int:
    """A positive number, with underscores or commas for the eye: ``200_000_000``."""
    digits = text.replace("_", "").replace(",", "")
    if not digits.isascii() or not digits.isdecimal() or int(digits) < 1:
        raise typer.BadParameter(f"{text!r} is not a whole number above 0")
    return int(digits)


@app.command(cls=SeveralValuesCommand)
def update(
    devices: Annotated[
        list[Path],
        typer.Option(
            help="An existing directory on the storage to measure; several are several devices."
        ),
    ],
    params: Annotated[
        str, typer.Option(help="Parameters of the synthetic model, such as 200_000_000.")
    ] = "200_000_000",
    rounds: Annotated[
        int, typer.Option(min=1, help="Measured rounds, each of two steps and two raw passes.")
    ] = 9,
    verify: Annotated[
        Verify, typer.Option(help="Check checksums when resuming only, or at each read too.")
    ] = Verify.RESUME,
    json_file: JsonOption = None,
) -> None:
    """Measure AdamW's update phase on bf16 gradients, in turns with raw I/O of the same bytes."""
    num_params = parse_count(params)
    _check_output(json_file)
    from smart_infinity.benchmarks.update import measure_update

    with _progress() as on_progress:
        result = measure_update(
            num_params,
            devices,
            rounds=rounds,
            verify="read" if verify is Verify.READ else "resume",
            on_progress=on_progress,
        )
    _write_json(json_file, result.to_json())
    low, high = result.fraction_spread
    table = _table("update phase", "", "update", "raw I/O")
    table.add_row("GB/s, read and written", f"{result.gb_per_s:.2f}", f"{result.raw_gb_per_s:.2f}")
    table.add_row("M parameters/s", f"{result.params_per_s / 1e6:.1f}", "")
    table.add_row("GB per step", f"{(result.bytes_read + result.bytes_written) / 1e9:.2f}", "same")
    table.add_row("threads per device", "", str(result.raw_threads))
    table.add_row("fraction of raw", f"{result.fraction_of_raw:.3f}", "1")
    table.add_row("its 10th to 90th percentile", f"{low:.3f} to {high:.3f}", "")
    print_result(table)


@app.command()
def kernel(
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds over all kernels.")] = 9,
    records: Annotated[
        int, typer.Option(min=1, help="State records per kernel; few may fit into a cache.")
    ] = 32,
    record_elements: Annotated[
        int, typer.Option(min=1, help="Elements of a record.", hidden=True)
    ] = 1 << 20,
    json_file: JsonOption = None,
) -> None:
    """Measure every fused kernel in turns with torch.optim.AdamW(fused=True)."""
    _check_output(json_file)
    from smart_infinity.benchmarks.kernel import measure_kernels

    with _progress() as on_progress:
        result = measure_kernels(
            rounds=rounds,
            num_records=records,
            record_elements=record_elements,
            on_progress=on_progress,
        )
    _write_json(json_file, result.to_json())
    speeds: dict[str, dict[int, float]] = {}
    for own in result.kernels:
        speeds.setdefault(own.name, {})[own.threads] = own.mparams_per_s
    torch_speeds = {int(threads): speed for threads, speed in result.torch_fused.items()}
    speeds["torch.optim.AdamW(fused=True), fp32"] = torch_speeds
    threads = list(torch_speeds)
    columns = [f"{count} thread{'s' if count > 1 else ''}" for count in threads]
    table = _table("kernels, M parameters/s", "", *columns)
    for name, own_speeds in speeds.items():
        table.add_row(name, *(f"{own_speeds[count]:.0f}" for count in threads))
    ratios = [f"{result.ratio_to_torch_fused[str(count)]:.2f}" for count in threads]
    table.add_row("adamw bf16 / torch", *ratios)
    table.add_row("adamw bf16 on denormals / usual", f"{result.ratio_denormal:.2f}")
    compile_s = result.compile_s
    print_result(
        table,
        f"compiling for a first AdamW step: {compile_s['cold']:.1f} s, "
        f"from the cache {compile_s['cached']:.1f} s",
    )


@app.command()
def crash(
    kills: Annotated[int, typer.Option(min=1, help="SIGKILLs, over all runs.")] = 200,
    devices: Annotated[
        Path | None,
        typer.Option(
            help="An existing directory in which up to three devices are made and removed; "
            "without it, the one for temporary files.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, rates, and the instants of kills.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Kill training runs at random instants; exit with 1 if what they commit is not as promised."""
    _check_output(json_file)
    from smart_infinity.benchmarks.crash import ConfigurationResult, crash_campaign

    with _progress() as on_progress:
        result = crash_campaign(kills, devices, seed=seed, on_progress=on_progress)
    _write_json(json_file, result.to_json())
    columns = ("kills", "starting", "in steps", "steps", "lost", "mismatched", "lags")
    table = _table("training runs, killed and resumed", "", *columns)
    for own in [*result.configurations, result]:
        name = "all"
        if isinstance(own, ConfigurationResult):
            name = f"{own.optimizer} {own.dtype}, {own.devices} device{'s'[: own.devices - 1]}"
        counts = (
            own.kills,
            own.kills_while_resuming,
            own.kills_in_steps,
            own.committed_steps,
            own.lost_steps,
            own.mismatched_steps,
            own.scheduler_lags,
        )
        table.add_row(name, *map(str, counts))
    print_result(
        table,
        f"{result.committed_in_flight} steps were committed by trainers that died before they "
        f"knew; {result.resumed_beside_workers} resumes beside DataLoader workers of a killed "
        f"trainer; {result.seconds:.0f} s",
    )
    for problem in result.problems:
        print_error(problem)
    if result.problems:
        raise typer.Exit(EXIT_ERROR)


@app.command()
def step(
    devices: Annotated[Path, typer.Option(help="An existing directory on the storage to measure.")],
    model: Annotated[str, typer.Option(help="A preset, or a local directory.")] = "gpt2-124m",
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Of 3 steps each, in turns.")] = 3,
    deepspeed: Annotated[
        list[str] | None,
        typer.Option(
            help="A Python that has DeepSpeed, and the path of benchmarks/deepspeed_step.py.",
            show_default=False,
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure whole training steps beside plain torch in memory, in turns."""
    from smart_infinity.cli.bench_step import measure, table_of

    _check_output(json_file)
    with _progress() as on_progress:
        result = measure(
            devices,
            model=model,
            batch_size=batch_size,
            seq_len=seq_len,
            rounds=rounds,
            deepspeed=deepspeed,
            on_progress=on_progress,
        )
    _write_json(json_file, result)
    print_result(*table_of(result))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what is going on: a spinner on a terminal, else a line for each new thing."""
    if not stderr.is_terminal:
        yield print_line
        return
    with stderr.status("starting") as spinner:
        yield spinner.update


def _check_output(path: Path | None) -> None:
    """Before minutes of measuring, not after them."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"--json {path}: expected a file in an existing directory")


def _write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
