"""How a command ends when something is wrong: one line on stderr, and an exit status."""

import errno
from typing import Any

from typer.core import TyperGroup

from smart_infinity.cli.console import print_error
from smart_infinity.errors import SmartInfinityError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports


class UsageError(SmartInfinityError, ValueError):
    """The command was given something that it cannot work with."""


class ErrorReportingGroup(TyperGroup):
    """A group of commands that end in one clear line where the cause is known.

    Any other exception is a fault of ours and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            print_error(str(error))
            ctx.exit(EXIT_USAGE)
        except SmartInfinityError as error:
            print_error(str(error))
            ctx.exit(EXIT_ERROR)
        except OSError as error:
            # Not ours, but no bug either: the metrics, the plot and the weights go to any disk.
            if error.errno != errno.ENOSPC:
                raise
            print_error(f"{error.filename or 'the output directory'}: no space left on the disk")
            ctx.exit(EXIT_ERROR)
