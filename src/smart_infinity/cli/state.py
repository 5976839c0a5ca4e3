"""What is done to a state without its model: ``inspect``, ``verify``, snapshots, moving it."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from smart_infinity.cli.console import print_error, print_line, print_result, status
from smart_infinity.cli.errors import EXIT_ERROR

Directories = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...", help="All directories of the run, in any order.", show_default=False
    ),
]
Name = Annotated[str, typer.Option("--name", help="Of the snapshot.", show_default=False)]


def inspect(
    directories: Directories,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what directories hold: model, step, sizes, snapshots, health."""
    from smart_infinity.tools.inspection import inspect_set

    found = inspect_set(directories)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    summary = Table(box=box.SIMPLE, show_header=False)
    for label, value in (
        ("model", f"{found['model']}, {found['parameters']:,} parameters"),
        ("optimizer", found["optimizer"]),
        ("committed step", "none" if found["committed_step"] is None else found["committed_step"]),
        ("set", found["set_uuid"]),
        ("format version", found["format_version"]),
        ("health", found["health"]),
    ):
        summary.add_row(label, str(value))
    devices = _table("devices", "directory", "index", "steps", "on disk", "free", "last write", "")
    for own in found["devices"]:
        devices.add_row(
            own["path"],
            str(own["index"]),
            ", ".join(map(str, own["steps"])),
            f"{own['disk_bytes'] / 1e9:.3f} GB",
            f"{own['free_bytes'] / 1e9:.1f} GB",
            _time(own["last_write"]),
            "in use" if own["in_use"] else "",
        )
    print_result(summary, devices)
    if found["snapshots"]:
        print_result(_snapshot_table(found["snapshots"]))


def verify(directories: Directories) -> None:
    """Read everything and compare it with its checksums; exit with 1 if anything is bad."""
    from smart_infinity.tools.verify import verify as verify_set

    with status("reading all state"):
        verdict = verify_set(directories)
    for path, problem in verdict.problems:
        print_error(f"{path}: {problem}")
    step = "no complete step" if verdict.step is None else f"step {verdict.step}"
    print_line(
        f"{step} and {verdict.snapshots // len(directories)} snapshots: {verdict.records} state "
        f"records read, {len(verdict.problems)} problems"
    )
    if verdict.problems:
        raise typer.Exit(EXIT_ERROR)


def snapshot(directories: Directories, name: Name) -> None:
    """Keep the committed step under a name; the devices copy their own state."""
    from smart_infinity.tools.history import take_snapshot

    with status("copying the state"):
        step = take_snapshot(directories, name)
    print_line(f"snapshot {name} holds step {step}")


def restore(directories: Directories, name: Name) -> None:
    """Go back to a snapshot; steps after it are given up."""
    from smart_infinity.tools.history import restore_snapshot

    with status("checking and copying the snapshot"):
        step = restore_snapshot(directories, name)
    print_line(f"the devices hold step {step} again, of snapshot {name}")


def remove(directories: Directories, name: Name) -> None:
    """Remove a snapshot."""
    from smart_infinity.tools.history import remove_snapshot

    remove_snapshot(directories, name)
    print_line(f"snapshot {name} is removed")


def list_(directories: Directories) -> None:
    """List the snapshots that directories hold."""
    from smart_infinity.tools.inspection import inspect_set

    found = inspect_set(directories)["snapshots"]
    if not found:
        print_line("there are no snapshots")
    else:
        print_result(_snapshot_table(found))


def export(
    directories: Directories,
    to: Annotated[
        Path, typer.Option("--to", help="A new directory for the files.", show_default=False)
    ],
    snapshot_name: Annotated[
        str | None,
        typer.Option("--snapshot", help="Export this snapshot instead of the committed step."),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help="Largest size of a file, such as 5GB; one tensor is never cut.")
    ] = "5GB",
) -> None:
    """Write masters and moments as safetensors, in fp32 and under torch's names."""
    from smart_infinity.planning import parse_bytes
    from smart_infinity.tools.export import export_set

    limit = parse_bytes("--shard-size", shard_size)
    assert limit is not None
    with status("exporting"):
        step = export_set(directories, to, snapshot=snapshot_name, max_shard_bytes=limit)
    print_line(f"step {step} is in {to}")


def import_(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="A directory on each drive for the state; made if missing.",
            show_default=False,
        ),
    ],
    source: Annotated[Path, typer.Option("--from", help="What export wrote.", show_default=False)],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard a state that the directories hold.")
    ] = False,
) -> None:
    """Make devices from an export, on any number of directories; continue with resume=True."""
    from smart_infinity.tools.importing import import_set

    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    with status("importing"):
        step = import_set(source, directories, discard=fresh)
    print_line(f"{len(directories)} devices hold step {step}")


def _snapshot_table(found: list[dict[str, object]]) -> Table:
    table = _table("snapshots", "name", "step", "made", "size")
    for own in found:
        size = f"{int(str(own['bytes'])) / 1e9:.3f} GB"
        table.add_row(str(own["name"]), str(own["step"]), _time(own["created"]), size)
    return table


def _time(stamp: object) -> str:
    return "" if stamp is None else str(stamp)[:19].replace("T", " ") + " UTC"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
