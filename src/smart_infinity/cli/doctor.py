"""``smart-infinity doctor``: what this machine is, and what its directories can do as devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from smart_infinity.cli.console import print_error, print_result, status
from smart_infinity.cli.errors import EXIT_ERROR

if TYPE_CHECKING:
    from smart_infinity.benchmarks.machine import DirectoryFacts


def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]...",
            help="Directories to examine as devices; each is measured for a few seconds.",
            show_default=False,
            readable=False,
        ),
    ] = None,
) -> None:
    """Show versions, processor and storage; exit with 1 if a directory cannot be used."""
    from smart_infinity.benchmarks import machine
    from smart_infinity.errors import SmartInfinityError

    print_result(
        _facts("versions", machine.versions()),
        _facts("processor", machine.cpu_facts()),
    )
    usable: dict[str, machine.DirectoryFacts] = {}
    reasons: list[str] = []
    for directory in map(str, directories or []):
        try:
            with status(f"examining {directory}"):
                usable[directory] = machine.examine_directory(directory)
        except SmartInfinityError as error:
            reasons.append(
                f"{directory} {error}"
                if isinstance(error, machine.UnusableDirectoryError)
                else str(error)
            )
    for directory, facts in usable.items():
        print_result(_facts(directory, describe_directory(facts)))
    for reason in reasons:
        print_error(reason)
    if reasons:
        raise typer.Exit(EXIT_ERROR)


def describe_directory(facts: "DirectoryFacts") -> dict[str, str]:
    """A directory's facts as the lines of a table."""
    refusal = facts.direct_io_refusal
    rate = facts.bandwidth
    return {
        "O_DIRECT": "works" if refusal is None else f"refused: {refusal}; buffered I/O is used",
        "read": f"{rate.read / 1e9:.2f} GB/s",
        "write": f"{rate.write / 1e9:.2f} GB/s",
        "mixed": f"{rate.mixed / 1e9:.2f} GB/s (read and written together)",
        "free": f"{facts.free_nbytes / 1e9:.1f} GB",
        "fit for Adam": f"{facts.num_parameters / 1e6:,.0f} million parameters",
        "holds": facts.holds,
    }


def _facts(title: str, facts: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table
