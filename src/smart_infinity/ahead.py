"""Setting devices to work on a step before it is made.

State is read ahead, from when the step before has delivered its weights. Where the loop has said
that nothing scales its gradients and how many backwards make a step, a unit is also updated as
soon as its gradients are complete; `step()` then compares what was used with what is asked for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from smart_infinity.arrivals import Arrivals
from smart_infinity.devices.base import Device
from smart_infinity.guard import Guard, State
from smart_infinity.link import HostLink


class Ahead:
    """Counts the gradients of each parameter since the last step, and tells the devices.

    Args:
        devices: by index.
        link: the host link.
        arrivals: nothing is begun before the step under way has delivered all its weights.
        guard: nothing is begun where the engine must not be used.
        num_parameters: of the layout.
        accumulation_steps: how many backwards make a step.
        expected_table: makes the table of a step over all parameters with the hyper-parameters as
            they are; held weakly. None where nothing may be updated before `step()`.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        link: HostLink,
        arrivals: Arrivals,
        guard: Guard,
        num_parameters: int,
        accumulation_steps: int,
        expected_table: Callable[[], npt.NDArray[np.float32]] | None,
    ) -> None:
        self._devices, self._link, self._arrivals, self._guard = devices, link, arrivals, guard
        self._steps = accumulation_steps
        self._expected_table = weakref.WeakMethod(expected_table) if expected_table else None
        self._landed = [0] * num_parameters
        self._has_begun = self._expects = False
        # Gradients of a GPU land from a thread of their own, while forward runs.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Let the devices read ahead, unless they do, or the step before is not that far."""
        if self._has_begun or self._arrivals.any_missing() or self._arrivals.has_failed:
            return
        if self._guard.state is not State.OPEN or self._guard.is_forked:
            return
        with self._lock:
            if self._has_begun:
                return
            for device in self._devices:
                device.begin_early(updates=self._expected_table is not None)
            self._has_begun = True

    def landed(self, parameter: int) -> None:
        """Backward has computed a gradient of the parameter, and it has landed."""
        self._landed[parameter] += 1
        if self._landed[parameter] != self._steps:
            return
        self.begin()
        if self._expects:
            self._complete(parameter)
        elif self._has_begun and self._expected_table is not None:
            self._expect()

    def _expect(self) -> None:
        """Schedulers have moved: what the step will be told is known now."""
        expected_table = None if self._expected_table is None else self._expected_table()
        if expected_table is None:
            return
        table = expected_table()
        self._expects = True
        for device in self._devices:
            self._link.carry("control", table)
            device.expect(table)
        for parameter, landed in enumerate(self._landed):
            if landed >= self._steps:
                self._complete(parameter)

    def _complete(self, parameter: int) -> None:
        for device in self._devices:
            device.gradient_complete(parameter)

    def reset(self) -> None:
        """A step has taken the gradients over; the devices have what was begun for it."""
        self._landed = [0] * len(self._landed)
        self._has_begun = self._expects = False

    def drop(self) -> None:
        """There will be no such step: it was skipped, or the state is replaced."""
        for device in self._devices:
            device.drop_early()
        self.reset()
