"""The stream of gradients to the devices.

`GradientStream` hangs a hook on every parameter: as soon as autograd has produced a gradient, the
hook sends it over the host link into the landing zones of the devices and leaves an
`OffloadedGradient` in ``param.grad``. It keeps what is pending for each landed gradient, and
answers for it.
"""

from __future__ import annotations

import logging
import math
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity.ahead import Ahead
from smart_infinity.arrivals import Arrivals
from smart_infinity.cuda.gradients import GradientDescent
from smart_infinity.devices.base import NO_PENDING, Device, Pending
from smart_infinity.errors import OffloadedGradientError, UnsupportedError
from smart_infinity.gate import Gate
from smart_infinity.gradients import OffloadedGradient
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.landing import NONFINITE_BITS
from smart_infinity.layout import Layout
from smart_infinity.link import HostLink
from smart_infinity.timeline import Timeline
from smart_infinity.weights import DTYPES, words_of

logger = logging.getLogger("smart_infinity")

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class GradientStream:
    """Hands gradients over to the devices and answers for them afterwards.

    Args:
        layout: the layout; parameter indices are its own.
        parameters: by index.
        devices: by index.
        link: the host link.
        guard: called before anything touches a device; raises where the engine must not be used.
        arrivals: the step under way; a landed gradient is not changed before it was used.
        gate: told of each gradient that backward computes, if steps overlap.
        ahead: told of each such gradient that has landed, if devices begin before the step.
        descent: brings gradients down from the GPU, if the model is on one.
        timeline: told of what lands.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.nn.Parameter],
        devices: Sequence[Device],
        link: HostLink,
        guard: Callable[[], None],
        arrivals: Arrivals,
        gate: Gate | None,
        ahead: Ahead | None,
        descent: GradientDescent | None,
        timeline: Timeline,
    ) -> None:
        self.layout = layout
        self._parameters, self._devices, self._link = parameters, devices, link
        self.guard, self._arrivals, self._gate, self._ahead = guard, arrivals, gate, ahead
        self._descent, self._timeline = descent, timeline
        # What each landed gradient still has to be multiplied and clamped with, and its largest
        # magnitude bits.
        self._pending: list[Pending] = [NO_PENDING] * len(parameters)
        self._peaks = [0] * len(parameters)
        self._warned_of_skip = False
        self.gradients = [OffloadedGradient(self, i, p) for i, p in enumerate(parameters)]
        self._grad_dtypes = [parameter.grad_dtype for parameter in parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]
        for parameter in parameters:
            if type(parameter.grad) is OffloadedGradient:  # of an optimizer that was dropped
                parameter.grad = None
            # The gradient is fp32 whatever the weight is, so that norms are not rounded to 16
            # bits; autograd must accept that.
            parameter.grad_dtype = None

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weak: Python's garbage collector does not see what a hook on a tensor holds, and would
        # never free a model and an optimizer that were dropped without close().
        reference = weakref.ref(self)

        def hand_over(parameter: torch.Tensor) -> None:
            stream = reference()
            if stream is not None:
                stream.receive(index, parameter)

        return hand_over

    def receive(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has computed a gradient of the parameter."""
        if self._gate is not None:
            self._gate.check_use(index)
        gradient = parameter.grad
        # A second backward has added to the offloaded gradient by itself (``add_``).
        if gradient is not None and type(gradient) is not OffloadedGradient:
            self.land(index, gradient)
            parameter.grad = self.gradients[index]
        if self._ahead is not None:
            landed = partial(self._ahead.landed, index)
            if self._descent is None:
                landed()
            else:
                self._descent.after(landed)

    def collect(self) -> npt.NDArray[np.bool_]:
        """Which parameters have a gradient; dense ones that the user assigned are landed first."""
        active = np.zeros(len(self._parameters), np.bool_)
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient is not self.gradients[index]:
                if type(gradient) is OffloadedGradient:
                    raise OffloadedGradientError(
                        f"the gradient of {self.name(index)} is that of another parameter. "
                        "Assign grad.to_dense() to copy a gradient"
                    )
                self.land(index, gradient)
                parameter.grad = self.gradients[index]
            active[index] = True
        self.settle()
        return active

    def name(self, index: int) -> str:
        """The parameter's dotted name."""
        return self.layout.parameters[index].name

    @property
    def pending(self) -> Sequence[Pending]:
        """By parameter: factor, low and high that the kernel has to apply."""
        return self._pending

    # --- what happens to a gradient ---------------------------------------------------------

    def land(self, index: int, gradient: torch.Tensor) -> None:
        """Send a dense gradient to the devices, replacing what had landed."""
        self._send(index, gradient, lambda zone, *part, start: zone.land(*part, start))

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Add a dense gradient to the landed one, in fp32."""
        pending = self._pending[index]
        self._send(
            index, gradient, lambda zone, *part, start: zone.accumulate(*part, pending, start)
        )

    def _send(self, index: int, gradient: torch.Tensor, store: Callable[..., int]) -> None:
        """Carry a gradient to the devices.

        ``store(zone, run, form, words, start=)`` keeps a part of a run and returns its peak.
        """
        self.guard()
        form = self._form(index, gradient)
        descent = self._descent if gradient.is_cuda else None
        most = descent.max_elements(gradient.dtype) if descent is not None else sys.maxsize
        parts = self._parts(index, most)
        if descent is None:
            self.settle()
        self._peaks[index], self._pending[index] = 0, NO_PENDING

        def land(number: int, words: torch.Tensor) -> None:
            device, run, begin, _ = parts[number]
            self._arrivals.wait(index)
            part = self._link.carry("gradients_to_device", words_of(words))
            start = begin - self.layout.devices[device].runs[run].start
            with self._timeline.landing(self._devices[device].path, self.name(index)):
                peak = store(self._devices[device].gradients, run, form, part, start=start)
            self._peaks[index] = max(self._peaks[index], peak)

        if descent is not None:
            descent.send(gradient, [(begin, end) for _, _, begin, end in parts], land)
            return
        flat = gradient.detach().cpu().contiguous().reshape(-1)
        for number, (_, _, begin, end) in enumerate(parts):
            land(number, flat[begin:end])

    def _parts(self, index: int, most: int) -> list[tuple[int, int, int, int]]:
        """(device, run, begin, end) of parts of a gradient, each run's from the last to the first.

        ``most`` elements each; begin and end are counted from the gradient's first element.
        """
        parts = []
        for device, run in self.layout.runs_of[index]:
            own = self.layout.devices[device].runs[run]
            stop = own.start + own.length
            for begin in reversed(range(own.start, stop, most)):
                parts.append((device, run, begin, min(begin + most, stop)))
        return parts

    def settle(self) -> None:
        """Wait for gradients that are on their way."""
        if self._descent is not None:
            self._descent.settle()

    def clear(self, index: int) -> None:
        """Make the landed gradient zero; it stays present."""
        self.guard()
        self.settle()
        self._arrivals.wait(index)
        for device, run in self.layout.runs_of[index]:
            self._devices[device].gradients.clear(run)
        self._peaks[index], self._pending[index] = 0, NO_PENDING

    def scale(self, index: int, by: float) -> None:
        """Record a factor."""
        self.guard()
        factor, low, high = self._pending[index]
        if by != 0 and math.isfinite(by) and not _is_modest(factor * by):
            # The kernel's factor is fp32: a product of extreme ones is taken step by step, as
            # torch takes it.
            self._fold(index)
            factor, low, high = NO_PENDING
        low, high = (_scaled(low, by), _scaled(high, by))
        self._pending[index] = (factor * by, min(low, high), max(low, high))
        if by != 0 and math.isfinite(by) and not _is_modest(by):
            self._fold(index)

    def clamp(self, index: int, low: float, high: float) -> None:
        """Record bounds; (factor, low, high) is closed under scaling and clamping."""
        self.guard()
        factor, old_low, old_high = self._pending[index]
        self._pending[index] = (
            factor,
            min(max(old_low, low), high),
            min(max(old_high, low), high),
        )

    def _fold(self, index: int) -> None:
        """Apply what is pending to the landed gradient, in fp32, on the devices."""
        self.settle()
        pending, peak = self._pending[index], 0
        if pending != NO_PENDING:
            self._arrivals.wait(index)
            for device, run in self.layout.runs_of[index]:
                peak = max(peak, self._devices[device].gradients.fold(run, pending))
            self._peaks[index], self._pending[index] = peak, NO_PENDING

    def norm(self, index: int, power: float) -> float:
        """The p-norm, as the step would use the gradient."""
        self.guard()
        self.settle()
        factor, low, high = self._pending[index]
        unbounded = low == -math.inf and high == math.inf
        if power == math.inf and unbounded:
            return _as_float(self._peaks[index]) * abs(factor)
        parts = []
        for device, run in self.layout.runs_of[index]:
            if power == 2.0 and unbounded:
                partials = self._devices[device].gradients.squares(run)
            else:
                partials = self._devices[device].gradients.norms(run, power, self._pending[index])
            parts.append(self._link.carry("control", partials))
        blocks = np.concatenate(parts) if parts else np.zeros(0)
        if not blocks.size:
            return 0.0
        if math.isinf(power):
            return float(blocks.max() if power > 0 else blocks.min())
        total = float(blocks.sum())
        if power == 0.0:
            return total
        if power == 2.0:
            return math.sqrt(total) * (abs(factor) if unbounded else 1.0)
        return total ** (1.0 / power) if total > 0 or power > 0 else math.inf

    def is_finite(self, index: int) -> bool:
        """Whether the gradient, as the step would use it, has no infinity and no NaN."""
        self.settle()
        factor, low, high = self._pending[index]
        if not math.isfinite(factor) or math.isnan(low) or math.isnan(high):
            return False
        peak = self._peaks[index]
        if peak < NONFINITE_BITS and _as_float(peak) * abs(factor) <= _FLOAT32_MAX:
            return True
        if low == -math.inf or high == math.inf:
            return False
        return math.isfinite(self.norm(index, math.inf))

    def are_finite(self, active: npt.NDArray[np.bool_], step: int) -> bool:
        """Whether all these gradients are; the first time that a step is skipped, say why."""
        for index in np.flatnonzero(active).tolist():
            if not self.is_finite(index):
                if not self._warned_of_skip:
                    self._warned_of_skip = True
                    logger.warning(
                        "step %d skipped: the gradient of %s is not finite; nothing moved. Later "
                        "skips are not logged, see optimizer.step_was_skipped",
                        step,
                        self.name(index),
                    )
                return False
        return True

    def to_dense(self, index: int) -> torch.Tensor:
        """Fetch a gradient as a dense fp32 tensor of the parameter's shape, to where it is."""
        self.guard()
        self.settle()
        shape = self.layout.parameters[index].shape
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        flat = out.view(-1).numpy()
        for device, run in self.layout.runs_of[index]:
            own = self.layout.devices[device].runs[run]
            values = self._devices[device].gradients.read(run, self._pending[index])
            flat[own.start : own.start + own.length] = self._link.carry("gradients_to_host", values)
        return out.to(self.gradients[index].device)

    def detach(self) -> None:
        """Take hooks and offloaded gradients off the parameters."""
        for handle in self._handles:
            handle.remove()
        if self._descent is not None:
            self._descent.close()
        for parameter, grad_dtype in zip(self._parameters, self._grad_dtypes, strict=True):
            if type(parameter.grad) is OffloadedGradient:
                parameter.grad = None
            if parameter.grad is None:
                parameter.grad_dtype = grad_dtype

    def _form(self, index: int, gradient: torch.Tensor) -> int:
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self.name(index)} is sparse ({gradient.layout}). Expected a "
                "dense gradient; build the embedding with sparse=False"
            )
        dtype = DTYPES.get(gradient.dtype)
        if dtype is None or gradient.shape != self.gradients[index].shape:
            raise OffloadedGradientError(
                f"the gradient of {self.name(index)} is {gradient.dtype} of shape "
                f"{tuple(gradient.shape)}. Expected float32, bfloat16 or float16 of shape "
                f"{tuple(self.gradients[index].shape)}"
            )
        return FORMAT_OF_DTYPE[dtype]


def _is_modest(factor: float) -> bool:
    """Whether fp32 holds a factor with room to spare."""
    return 2.0**-60 <= abs(factor) <= 2.0**60


def _as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _scaled(bound: float, by: float) -> float:
    # An absent bound stays absent, also when scaled by zero.
    return bound if math.isinf(bound) and by >= 0 else bound * by
