"""Noticing when an LR scheduler is stepped: it happens after the step that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_scheduler(candidate: object) -> bool:
    """Whether this is an LR scheduler: torch's, or one that wraps it."""
    return callable(getattr(candidate, "step", None)) and hasattr(candidate, "get_last_lr")


def _new(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def observe_steps(scheduler: Any, stepped: Callable[[bool], None]) -> Callable[[], None]:
    """Call ``stepped(with arguments)`` after each ``scheduler.step()``; returns what undoes it.

    By a class of its own: a wrapper among the attributes would be part of its ``state_dict``.
    """
    kind: Any = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.step(self, *args, **kwargs)
        stepped(bool(args or kwargs))
        return result

    def reduce(self: Any, protocol: Any) -> Any:
        # A copy is not observed, and a pickle must find the class.
        function, arguments, *rest = kind.__reduce_ex__(self, protocol)
        if function.__name__ == "__newobj__":  # the pickler insists on its class being this one
            function = _new
        return function, tuple(kind if own is observing else own for own in arguments), *rest

    names = {
        "step": step,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    observing = type(kind.__name__, (kind,), names)
    scheduler.__class__ = observing

    def undo() -> None:
        scheduler.__class__ = kind

    return undo


class StepPattern:
    """How often a scheduler is stepped after each optimizer step, as observed.

    A step is committed before the scheduler moves. What is committed with it therefore says how
    many calls will follow, if that is certain: the fewer of the last two intervals. One call more
    than that is an exception (the end of an epoch, the beginning of a run), and the engine then
    amends what it has committed.
    """

    def __init__(self) -> None:
        self.intervals: list[int] = []  # the last two between two commits
        self.calls = 0  # since the last commit
        self.expected = 0  # of those, how many the commit has foreseen
        self._takes_arguments = False
        self._has_begun = False

    def called(self, with_arguments: bool) -> bool:
        """Note a call; returns whether what is committed does not know of it."""
        self.calls += 1
        self._takes_arguments |= with_arguments
        return self.calls > self.expected

    @property
    def outstanding(self) -> int:
        """Calls that are foreseen and have not come yet."""
        return max(self.expected - self.calls, 0)

    def foreseen(self) -> tuple[list[int], int]:
        """For the next commit: the last two intervals then, and the calls that will follow it."""
        intervals = [*self.intervals, self.calls][-2:] if self._has_begun else []
        # What a call will be given cannot be foreseen.
        expected = 0 if self._takes_arguments else min(intervals, default=0)
        return intervals, expected

    def committed(self, intervals: list[int], expected: int) -> None:
        """That commit is durable."""
        self.intervals, self.expected, self.calls = intervals, expected, 0
        self._has_begun = True

    def resumed(self, intervals: list[int], calls: int) -> None:
        """Go on behind that commit; ``calls`` have come since, or are made now.

        Where none was ever committed a crash may have cut off the first one: that interval says
        nothing about the next.
        """
        self.committed(intervals, calls)
        self.calls = calls
        self._has_begun = bool(intervals or calls)
