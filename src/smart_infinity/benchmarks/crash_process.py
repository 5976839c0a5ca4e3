"""One attempt as the parent of the campaign sees it: a process, its messages, and SIGKILL."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait

from smart_infinity.benchmarks import crash_child
from smart_infinity.benchmarks.crash_child import (
    Began,
    Failed,
    Finished,
    Message,
    Resumed,
    StepDone,
    StepInputs,
    Task,
)
from smart_infinity.benchmarks.crash_lineage import Lineage

PATIENCE = 120.0  # seconds after which a silent child is taken for hung
STEP_TIMES = 8  # kills in steps are uniform over this many step times

# Starting a process looks after all others too, and two threads must not fetch one exit status.
_processes = threading.Lock()


class ChildError(Exception):
    """A child ended, or fell silent, without having been killed."""


class Child:
    """One trainer in a process of its own. Leaving the context kills it, should it still run."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "smart_infinity.benchmarks.crash_preload"])
        self._connection, theirs = context.Pipe(duplex=False)
        with theirs:
            self._process = context.Process(target=crash_child.train, args=(task, theirs))
            with _processes:
                self._process.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._join()
        self._connection.close()

    def receive(self, deadline: float = math.inf) -> Message | None:
        """The next message, or None if none came until the deadline (of ``perf_counter``)."""
        patience = min(deadline - time.perf_counter(), PATIENCE)
        ready = wait([self._connection, self._process.sentinel], max(patience, 0))
        if not ready and deadline < math.inf:
            return None
        if not ready:
            raise ChildError(f"it said nothing for {PATIENCE:.0f} seconds")
        if self._connection in ready:
            with contextlib.suppress(EOFError):
                return self._next_message()
        raise ChildError(f"it ended by itself, with exit status {self._join()}")

    def kill(self) -> Iterator[Message]:
        """SIGKILL; yields what it had still said."""
        self._process.kill()
        status = self._join()
        if status != -signal.SIGKILL:
            raise ChildError(f"it ended by itself, with exit status {status}")
        # Workers that were forked from it hold the pipe open: its end is not waited for.
        with contextlib.suppress(EOFError):
            while self._connection.poll():
                yield self._next_message()

    @property
    def pid(self) -> int:
        """Its process id, also that of the group of everything it has forked."""
        pid = self._process.pid
        assert pid is not None, "it was started"
        return pid

    def _next_message(self) -> Message:
        message: Message = self._connection.recv()
        if isinstance(message, Failed):
            raise ChildError(f"it raised {message.error}\n{message.traceback}")
        return message

    def _join(self) -> int | None:
        wait([self._process.sentinel])
        with _processes:
            self._process.join()
        return self._process.exitcode


def end_groups(groups: Iterable[int]) -> None:
    """End what the processes of these groups have forked.

    Forked DataLoader workers outlive a killed trainer for seconds; and for ever, if it died before
    they had asked for its process id, which is how they notice its death.
    """
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class Clock:
    """How long starts and steps take: the medians of what was last measured, in all runs."""

    def __init__(self) -> None:
        self.stopped = False
        self._measured = {what: deque[float](maxlen=15) for what in ("start", "steps")}
        self._lock = threading.Lock()

    def update(self, what: str, seconds: float) -> None:
        """Take a measured time in."""
        with self._lock:
            self._measured[what].append(seconds)

    def seconds(self, what: str) -> float:
        """Of a ``"start"``, or of the ``"steps"`` within which a trainer is killed."""
        with self._lock:
            typical = statistics.median(self._measured[what] or [0.0])
        return STEP_TIMES * typical if what == "steps" else typical


class Attempt:
    """One child, followed until it is killed or finished.

    Args:
        task: what it does.
        number: of the attempt within its run.
        lineage: what is told of its steps.
        clock: is kept up to date.
        fate: when to kill it: in its ``"start"``, in its ``"steps"``, or None for never.
        chance: draws the instant.
        groups: takes the child's process group, for `end_groups`.
    """

    def __init__(
        self,
        task: Task,
        number: int,
        lineage: Lineage,
        clock: Clock,
        fate: str | None = None,
        chance: random.Random | None = None,
        groups: list[int] | None = None,
    ) -> None:
        self.ready: Resumed | None = None
        self.states: dict[str, str] = {}
        self._number, self._lineage, self._clock = number, lineage, clock
        self._fate, self._chance = fate, chance or random.Random(0)
        self._deadline = math.inf
        self._before = 0.0
        with Child(task) as child:
            if groups is not None:
                groups.append(child.pid)
            while not self.states:
                message = child.receive(self._deadline)
                if message is None:
                    for last in child.kill():
                        self._hear(last)
                    return
                self._hear(message)
                if clock.stopped:
                    raise ChildError("the campaign was given up")

    def _hear(self, message: Message) -> None:
        now = time.perf_counter()
        match message:
            case Began():
                self._doom("start", now)
            case Resumed():
                self.ready = message
                self._clock.update("start", now - self._before)
                self._lineage.resumed(self._number, message)
                self._doom("steps", now)
            case StepInputs():
                self._lineage.began(message)
                return
            case StepDone():
                self._lineage.done(message)
                self._clock.update("steps", now - self._before)
            case Finished():
                self.states = message.states
        self._before = now

    def _doom(self, fate: str, now: float) -> None:
        if self._fate == fate:
            self._deadline = now + self._chance.uniform(0, self._clock.seconds(fate))
