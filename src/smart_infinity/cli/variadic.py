"""Options that take several values after one flag: ``--devices /mnt/a /mnt/b``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer.core

SEVERAL = frozenset({"--devices", "--text"})


class SeveralValuesCommand(typer.core.TyperCommand):
    """A command without positional arguments whose ``SEVERAL`` options take one value or more."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with each further value given a flag of its own."""
        return super().parse_args(ctx, repeat_flags(args))


def repeat_flags(args: Sequence[str]) -> list[str]:
    """``--devices a b`` becomes ``--devices a --devices b``; everything else stays."""
    expanded: list[str] = []
    flag, values = "", 0
    for arg in args:
        if arg.startswith("-"):
            flag, values = arg if arg in SEVERAL else "", 0
        elif flag:
            values += 1
            if values > 1:
                expanded.append(flag)
        expanded.append(arg)
    return expanded
