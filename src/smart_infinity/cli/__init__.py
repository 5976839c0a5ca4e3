"""The command line, ``smart-infinity``.

Only what ``--help`` needs is imported here; torch, transformers and matplotlib wait until a
command runs.
"""

import typer

from smart_infinity.cli.bench import app as bench_app
from smart_infinity.cli.console import show_log
from smart_infinity.cli.doctor import doctor
from smart_infinity.cli.errors import ErrorReportingGroup
from smart_infinity.cli.state import (
    export,
    import_,
    inspect,
    list_,
    remove,
    restore,
    snapshot,
    verify,
)
from smart_infinity.cli.train import train
from smart_infinity.cli.variadic import SeveralValuesCommand

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command(cls=SeveralValuesCommand)(train)
app.command()(doctor)
app.command()(inspect)
app.command()(verify)
app.command()(snapshot)
app.command()(restore)
app.command("list")(list_)
app.command()(remove)
app.command()(export)
app.command("import")(import_)
app.add_typer(bench_app, name="bench")


@app.callback()
def main() -> None:
    """Train models whose optimizer states live on storage, with the update done there."""
    show_log()
