"""Where the command line prints: progress, log and errors to stderr, results to stdout.

One console per stream: only the console that shows a live bar can print above it without tearing
it apart.
"""

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.text import Text

# What a table gets where there is no terminal to ask; rich would assume 80.
WIDTH_IN_FILES = 120

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def print_error(message: str) -> None:
    """Writes ``error: message`` to stderr, unwrapped so that it stays one line in a log."""
    line = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    stderr.print(line, soft_wrap=True)


def print_line(message: str) -> None:
    """Writes one plain line to stderr."""
    stderr.print(Text(message), soft_wrap=True)


def print_result(*results: RenderableType) -> None:
    """Writes tables and the like to stdout."""
    console = stdout if stdout.is_terminal else Console(highlight=False, width=WIDTH_IN_FILES)
    for result in results:
        console.print(result)


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """Shows that something slow is going on: a spinner on a terminal, else a line."""
    if stderr.is_terminal:
        with stderr.status(message):
            yield
    else:
        print_line(message)
        yield


def show_log() -> None:
    """Sends the library's log to stderr, once however often the application is called."""
    logger = logging.getLogger("smart_infinity")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(_LogHandler(console=stderr, show_path=False, show_time=False))


class _LogHandler(RichHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # RichHandler lays lines out as a table, which wraps them in a log file.
        if stderr.is_terminal:
            super().emit(record)
        else:
            print_line(f"{record.levelname.lower()}: {record.getMessage()}")
