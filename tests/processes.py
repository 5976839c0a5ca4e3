"""Other Python processes, started quickly: without torch, and without this package's engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import smart_infinity

SOURCE = Path(smart_infinity.__file__).parent

# The package's own __init__ imports torch; in its place stands an empty one, so that a part that
# needs torch fails to find it only if it asks for it.
_PRELUDE = f"""
import sys, types
package = types.ModuleType("smart_infinity")
package.__path__ = [{str(SOURCE)!r}]
sys.modules["smart_infinity"] = package
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start ``script`` with pipes; ``sys.argv[1:]`` are the arguments."""
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, *arguments: object) -> str:
    """Run ``script`` to its end; returns what it printed, raises with its errors if it fails."""
    process = start(script, *arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
