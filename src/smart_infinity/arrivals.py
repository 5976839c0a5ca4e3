"""Which weights of the step under way have not come yet, and waiting for them. No torch in here."""

from __future__ import annotations

import threading
from collections.abc import Mapping


class Arrivals:
    """Counts the pieces of each parameter that a step still has to deliver.

    Devices report from their own threads; the training loop waits.

    Attributes:
        has_failed: the last step ended with an error.
    """

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}
        self.has_failed = False
        self._change = threading.Condition()

    def begin(self, pieces: Mapping[int, int]) -> None:
        """A step has begun: by parameter, how many pieces of new weights it will deliver."""
        with self._change:
            # A parameter without elements has no piece.
            self._missing = {index: count for index, count in pieces.items() if count}

    def arrived(self, parameter: int) -> None:
        """A piece of the parameter's new weights is in its place."""
        if not self._missing:
            return
        with self._change:
            left = self._missing.get(parameter, 0) - 1
            if left > 0:
                self._missing[parameter] = left
            elif left == 0:
                del self._missing[parameter]
                self._change.notify_all()

    def end(self, *, has_failed: bool = False) -> None:
        """The step has ended: nothing more will come."""
        with self._change:
            self._missing, self.has_failed = {}, has_failed
            self._change.notify_all()

    def is_missing(self, parameter: int) -> bool:
        """Whether some of the parameter's new weights are still to come."""
        return parameter in self._missing

    def any_missing(self) -> bool:
        """Whether any weights are still to come."""
        return bool(self._missing)

    def wait(self, parameter: int) -> None:
        """Return once all of the parameter's pieces are there, or the step has ended."""
        if parameter in self._missing:
            with self._change:
                self._change.wait_for(lambda: parameter not in self._missing)
