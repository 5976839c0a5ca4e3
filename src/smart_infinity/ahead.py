"""Setting devices to work on a step while backward still runs.

State is read ahead. Where the loop has said that nothing scales its gradients and how many
backwards make a step, a unit is also updated as soon as its gradients are complete; `step()` then
compares what was used with what is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from smart_infinity.arrivals import Arrivals
from smart_infinity.devices.base import Device, EarlyPlan
from smart_infinity.link import HostLink


class Ahead:
    """Counts the gradients of each parameter since the last step, and tells the devices.

    Args:
        devices: by index.
        link: the host link.
        arrivals: nothing is begun before the step under way has delivered all its weights.
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
        num_parameters: int,
        accumulation_steps: int,
        expected_table: Callable[[], npt.NDArray[np.float32]] | None,
    ) -> None:
        self._devices, self._link, self._arrivals = devices, link, arrivals
        self._steps = accumulation_steps
        self._expected_table = weakref.WeakMethod(expected_table) if expected_table else None
        self._landed = [0] * num_parameters
        self._has_begun = False

    def landed(self, parameter: int) -> None:
        """Backward has computed a gradient of the parameter, and it has landed."""
        self._landed[parameter] += 1
        if self._landed[parameter] != self._steps:
            return
        if self._has_begun:
            self._complete(parameter)
        elif not self._arrivals.any_missing():
            self._begin()

    def _begin(self) -> None:
        expected_table = None if self._expected_table is None else self._expected_table()
        table = None if expected_table is None else expected_table()
        self._has_begun = True
        for device in self._devices:
            if table is not None:
                self._link.carry("control", table)
            device.begin_early(EarlyPlan(table))
        for parameter, landed in enumerate(self._landed):
            if landed >= self._steps:
                self._complete(parameter)

    def _complete(self, parameter: int) -> None:
        for device in self._devices:
            device.gradient_complete(parameter)

    def reset(self) -> None:
        """A step has taken the gradients over; the devices have what was begun for it."""
        self._landed = [0] * len(self._landed)
        self._has_begun = False

    def drop(self) -> None:
        """There will be no such step: it was skipped, or the state is replaced."""
        for device in self._devices:
            device.drop_early()
        self.reset()
