"""Ctrl-C waits for the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back while the block runs, then deliver it to the handler that was there.

    Only the main thread receives signals; elsewhere this does nothing.
    """
    previous = signal.getsignal(signal.SIGINT)
    # None: the handler was not installed from Python and could not be put back.
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            if callable(previous):
                previous(*received[0])
            elif previous == signal.SIG_DFL:
                signal.raise_signal(signal.SIGINT)
