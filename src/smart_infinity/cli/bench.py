"""PLACEHOLDER, to be replaced: the commands ``bench update`` and ``bench kernel``."""

import typer

app = typer.Typer(help="Not written yet.")


@app.callback()
def bench() -> None:
    """Not written yet."""
