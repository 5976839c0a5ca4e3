"""Where compiled kernels are cached: a directory of its own for each state of their sources.

Numba looks at a function's own file to see whether what it has cached is out of date. A kernel
holds compiled code of the other files here too, and would go on running it after only one of those
has changed: with another layout of its buffers, say, it would write outside them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba


@contextmanager
def kernel_cache() -> Iterator[None]:
    """Let kernels that are declared in the block be cached for exactly these sources.

    ``NUMBA_CACHE_DIR`` is respected; without it the cache lies beside the sources, or among the
    user's caches where those are read-only.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = os.path.join(before or _default(), _digest())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _default() -> str:
    beside = Path(__file__).parent
    if os.access(beside, os.W_OK):
        return str(beside / "__pycache__")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "smart-infinity", "kernels")


def _digest() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]
