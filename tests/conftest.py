"""What all tests share."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from images import in_memory, use_small_records

# One thread: results repeat exactly, and a shared machine does not make OpenMP's threads spin.
torch.set_num_threads(1)

# Jobs that a shell starts in the background ignore Ctrl-C, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
