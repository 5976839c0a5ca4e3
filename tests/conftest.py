"""What all tests share."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Numba's disk cache looks at a function's own file only: after a change in a file that a kernel
# calls into, it would hand out the old code. So each version of the kernels has its own cache.
_kernels = sorted((Path(__file__).parents[1] / "src/smart_infinity/kernels").glob("*.py"))
_version = hashlib.sha256(b"".join(path.read_bytes() for path in _kernels)).hexdigest()[:16]
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"smart-infinity-kernels-{_version}")
)

import pytest  # noqa: E402
import torch  # noqa: E402 (the cache's place must be known before anything imports Numba)

from images import in_memory, use_small_records  # noqa: E402

# One thread: results repeat exactly, and a shared machine does not make OpenMP's threads spin.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quiet_log() -> None:
    """The command line sets the library's log going, which the next test must not see."""
    logger = logging.getLogger("smart_infinity")
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several state records on each device also of a tiny model."""
    use_small_records(monkeypatch)


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory in memory."""
    with in_memory() as path:
        yield path


@pytest.fixture
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which only processes die."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
