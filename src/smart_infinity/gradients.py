"""Gradients that live on the devices.

`GradientStream` hangs a hook on every parameter: as soon as autograd has produced a gradient, the
hook sends it over the host link into the landing zones of the devices and leaves an
`OffloadedGradient` in ``param.grad``. That object has no storage; it understands what training
loops do to gradients and refuses the rest by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from smart_infinity.devices.base import NO_PENDING, Device, Pending
from smart_infinity.errors import OffloadedGradientError, UnsupportedError
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.landing import NONFINITE_BITS
from smart_infinity.layout import Layout
from smart_infinity.link import HostLink
from smart_infinity.weights import DTYPES, words_of

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class GradientStream:
    """Hands gradients over to the devices and answers for them afterwards.

    Args:
        layout: the layout; parameter indices are its own.
        parameters: by index.
        devices: by index.
        link: the host link.
        guard: called before anything touches a device; raises where the engine must not be used.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.nn.Parameter],
        devices: Sequence[Device],
        link: HostLink,
        guard: Callable[[], None],
    ) -> None:
        self.layout = layout
        self._parameters, self._devices, self._link = parameters, devices, link
        self.guard = guard
        # What each landed gradient still has to be multiplied and clamped with, and its largest
        # magnitude bits.
        self._pending: list[Pending] = [NO_PENDING] * len(parameters)
        self._peaks = [0] * len(parameters)
        self.gradients = [OffloadedGradient(self, i, p) for i, p in enumerate(parameters)]
        self._grad_dtypes = [parameter.grad_dtype for parameter in parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]
        for parameter in parameters:
            # The gradient is fp32 whatever the weight is, so that norms are not rounded to 16
            # bits; autograd must accept that.
            parameter.grad_dtype = None

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        own = self.gradients[index]

        def hand_over(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            # A second backward has added to the offloaded gradient by itself (``add_``).
            if gradient is not None and type(gradient) is not OffloadedGradient:
                self.land(index, gradient)
                parameter.grad = own

        return hand_over

    def collect(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
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
        return active

    def name(self, index: int) -> str:
        """The parameter's dotted name."""
        return self.layout.parameters[index].name

    def pending(self, index: int) -> Pending:
        """Factor, low and high that the kernel has to apply."""
        return self._pending[index]

    # --- what happens to a gradient ---------------------------------------------------------

    def land(self, index: int, gradient: torch.Tensor) -> None:
        """Send a dense gradient to the devices, replacing what had landed."""
        self.guard()
        words, form = self._words(index, gradient)
        peak = 0
        for device, run in self.layout.runs_of[index]:
            own = self.layout.devices[device].runs[run]
            part = self._link.carry(
                "gradients_to_device", words[own.start : own.start + own.length]
            )
            peak = max(peak, self._devices[device].land_gradient(run, form, part))
        self._peaks[index], self._pending[index] = peak, NO_PENDING

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Add a dense gradient to the landed one, in fp32."""
        self.guard()
        words, form = self._words(index, gradient)
        pending, peak = self._pending[index], 0
        for device, run in self.layout.runs_of[index]:
            own = self.layout.devices[device].runs[run]
            part = self._link.carry(
                "gradients_to_device", words[own.start : own.start + own.length]
            )
            peak = max(peak, self._devices[device].accumulate_gradient(run, form, part, pending))
        self._peaks[index], self._pending[index] = peak, NO_PENDING

    def clear(self, index: int) -> None:
        """Make the landed gradient zero; it stays present."""
        self.guard()
        for device, run in self.layout.runs_of[index]:
            self._devices[device].clear_gradient(run)
        self._peaks[index], self._pending[index] = 0, NO_PENDING

    def scale(self, index: int, by: float) -> None:
        """Record a factor."""
        factor, low, high = self._pending[index]
        low, high = (_scaled(low, by), _scaled(high, by))
        self._pending[index] = (factor * by, min(low, high), max(low, high))

    def clamp(self, index: int, low: float, high: float) -> None:
        """Record bounds; (factor, low, high) is closed under scaling and clamping."""
        factor, old_low, old_high = self._pending[index]
        self._pending[index] = (
            factor,
            min(max(old_low, low), high),
            min(max(old_high, low), high),
        )

    def norm(self, index: int, power: float) -> float:
        """The p-norm, as the step would use the gradient."""
        self.guard()
        factor, low, high = self._pending[index]
        unbounded = low == -math.inf and high == math.inf
        if power == math.inf and unbounded:
            return _as_float(self._peaks[index]) * abs(factor)
        parts = []
        for device, run in self.layout.runs_of[index]:
            if power == 2.0 and unbounded:
                partials = self._devices[device].gradient_squares(run)
            else:
                partials = self._devices[device].gradient_norms(run, power, self._pending[index])
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
        factor, low, high = self._pending[index]
        if not math.isfinite(factor) or math.isnan(low) or math.isnan(high):
            return False
        peak = self._peaks[index]
        if peak < NONFINITE_BITS and _as_float(peak) * abs(factor) <= _FLOAT32_MAX:
            return True
        if low == -math.inf or high == math.inf:
            return False
        return math.isfinite(self.norm(index, math.inf))

    def landed_finite(self, index: int) -> bool:
        """Whether the gradient as it landed has no infinity and no NaN."""
        return self._peaks[index] < NONFINITE_BITS

    def to_dense(self, index: int) -> torch.Tensor:
        """Fetch a gradient as a dense fp32 tensor of the parameter's shape."""
        self.guard()
        out = torch.empty(self.layout.parameters[index].shape, dtype=torch.float32)
        flat = out.view(-1).numpy()
        for device, run in self.layout.runs_of[index]:
            own = self.layout.devices[device].runs[run]
            values = self._devices[device].read_gradient(run, self._pending[index])
            flat[own.start : own.start + own.length] = self._link.carry("gradients_to_host", values)
        return out

    def detach(self) -> None:
        """Take hooks and offloaded gradients off the parameters."""
        for handle in self._handles:
            handle.remove()
        for parameter, grad_dtype in zip(self._parameters, self._grad_dtypes, strict=True):
            if type(parameter.grad) is OffloadedGradient:
                parameter.grad = None
            if parameter.grad is None:
                parameter.grad_dtype = grad_dtype

    def _words(self, index: int, gradient: torch.Tensor) -> tuple[Any, int]:
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
        return words_of(gradient.detach().cpu().contiguous()), FORMAT_OF_DTYPE[dtype]


def _as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _scaled(bound: float, by: float) -> float:
    # An absent bound stays absent, also when scaled by zero.
    return bound if math.isinf(bound) and by >= 0 else bound * by


class OffloadedGradient(torch.Tensor):
    """A gradient on the storage devices: fp32, with its parameter's shape, without storage.

    Norms, scaling, clamping, accumulation, zeroing and AMP's unscaling work and stay on the
    devices. ``to_dense()`` fetches the values. Everything else raises `OffloadedGradientError`.
    """

    _stream: GradientStream
    _index: int

    # Nothing is to be done above the dispatcher: this makes each operation cheaper.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, stream: GradientStream, index: int, parameter: torch.Tensor
    ) -> OffloadedGradient:
        """Make the gradient object of one parameter; it is reused in every iteration."""
        own = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=torch.float32, device=parameter.device
        )
        own._stream, own._index = stream, index
        assert isinstance(own, OffloadedGradient)
        return own

    def __init__(self, stream: GradientStream, index: int, parameter: torch.Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer an operation, or refuse it by name."""
        handler = _HANDLERS.get(func)
        if handler is None:
            raise _refusal(func, args)
        return handler(func, *args, **(kwargs or {}))

    def to_dense(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Fetch the gradient as a dense fp32 tensor (counted as ``gradients_to_host``)."""
        return self._stream.to_dense(self._index)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: use ``to_dense().numpy()``."""
        raise _refusal("numpy", (self,))

    def tolist(self) -> Any:
        """Refused: use ``to_dense().tolist()``."""
        raise _refusal("tolist", (self,))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self._stream.name(self._index)
        return f"OffloadedGradient({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal("deepcopy", (self,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickle", (self,))


def _refusal(func: object, args: Sequence[Any]) -> OffloadedGradientError:
    flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
    names = [g._stream.name(g._index) for g in flat if isinstance(g, OffloadedGradient)]
    return OffloadedGradientError(
        f"{func} on the gradient of {names[0] if names else 'a parameter'}, which lives on the "
        "storage devices. Expected norm, mul_, div_ or clamp_ by a number, add_ of a dense tensor, "
        "zero_, or None; for anything else fetch it with grad.to_dense(), and assign the result "
        "to param.grad if the step is to use it"
    )


def _number(func: object, gradient: Any, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or type(value) is OffloadedGradient:
            raise _refusal(func, (gradient,))
        return float(value.item())
    return float(value)


def _norm(
    func: Any,
    gradient: Any,
    power: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> torch.Tensor:
    if type(gradient) is not OffloadedGradient:
        raise _refusal(func, (gradient,))
    if dim not in (None, [], ()) and len(dim) != gradient.dim():
        raise _refusal(func, (gradient,))
    value = gradient._stream.norm(gradient._index, 2.0 if power is None else float(power))
    shape = [1] * gradient.dim() if keepdim else []
    return torch.full(shape, value, dtype=dtype or torch.float32, device=gradient.device)


def _foreach_norm(
    func: Any, gradients: Any, power: Any = 2, dtype: Any = None
) -> list[torch.Tensor]:
    return [
        _norm(func, g, power, dtype=dtype)
        if type(g) is OffloadedGradient
        else torch.linalg.vector_norm(g, power, dtype=dtype)
        for g in gradients
    ]


def _mul(func: Any, gradient: Any, other: Any) -> Any:
    if type(gradient) is not OffloadedGradient:
        raise _refusal(func, (gradient, other))
    gradient._stream.scale(gradient._index, _number(func, gradient, other))
    return gradient


def _div(func: Any, gradient: Any, other: Any) -> Any:
    if type(gradient) is not OffloadedGradient:
        raise _refusal(func, (gradient, other))
    with np.errstate(divide="ignore"):
        inverse = float(np.float64(1.0) / np.float64(_number(func, gradient, other)))
    gradient._stream.scale(gradient._index, inverse)
    return gradient


def _each(single: Callable[..., Any], dense: Callable[..., Any]) -> Callable[..., None]:
    """The in-place list form of an operation; lists may also hold dense gradients."""

    def apply(func: Any, gradients: Any, *values: Any) -> None:
        for position, gradient in enumerate(gradients):
            own = [v[position] if isinstance(v, list | tuple) else v for v in values]
            if type(gradient) is OffloadedGradient:
                single(func, gradient, *own)
            else:
                dense(gradient, *own)

    return apply


def _clamp(func: Any, gradient: Any, low: Any = None, high: Any = None) -> Any:
    bounds = (
        -math.inf if low is None else _number(func, gradient, low),
        math.inf if high is None else _number(func, gradient, high),
    )
    gradient._stream.clamp(gradient._index, *bounds)
    return gradient


def _clamp_min(func: Any, gradient: Any, low: Any) -> Any:
    return _clamp(func, gradient, low=low)


def _clamp_max(func: Any, gradient: Any, high: Any) -> Any:
    return _clamp(func, gradient, high=high)


def _add(func: Any, gradient: Any, other: Any, *, alpha: Any = 1) -> Any:
    dense = isinstance(other, torch.Tensor) and type(other) is not OffloadedGradient
    if (
        type(gradient) is not OffloadedGradient
        or not dense
        or alpha != 1
        or other.shape != gradient.shape
    ):
        raise _refusal(func, (gradient, other))
    gradient._stream.accumulate(gradient._index, other)
    return gradient


def _zero(func: Any, gradient: Any) -> Any:
    gradient._stream.clear(gradient._index)
    return gradient


def _detach(func: Any, gradient: Any) -> Any:
    return gradient


def _unscale(func: Any, gradients: Any, found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    by = float(inverse.item())
    dense = [g for g in gradients if type(g) is not OffloadedGradient]
    if dense:
        func(dense, found_inf, inverse)
    for gradient in gradients:
        if type(gradient) is OffloadedGradient:
            if not gradient._stream.is_finite(gradient._index):
                found_inf.fill_(1.0)
            gradient._stream.scale(gradient._index, by)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten.norm.Scalar: _norm,
    _aten.norm.ScalarOpt_dim: _norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _mul,
    _aten.mul_.Scalar: _mul,
    _aten.div_.Tensor: _div,
    _aten.div_.Scalar: _div,
    _aten._foreach_mul_.Tensor: _each(_mul, torch.Tensor.mul_),
    _aten._foreach_mul_.Scalar: _each(_mul, torch.Tensor.mul_),
    _aten._foreach_mul_.ScalarList: _each(_mul, torch.Tensor.mul_),
    _aten._foreach_div_.Tensor: _each(_div, torch.Tensor.div_),
    _aten._foreach_div_.Scalar: _each(_div, torch.Tensor.div_),
    _aten._foreach_div_.ScalarList: _each(_div, torch.Tensor.div_),
    _aten.clamp_.default: _clamp,
    _aten.clamp_min_.default: _clamp_min,
    _aten.clamp_max_.default: _clamp_max,
    _aten._foreach_clamp_min_.Scalar: _each(_clamp_min, torch.Tensor.clamp_min_),
    _aten._foreach_clamp_max_.Scalar: _each(_clamp_max, torch.Tensor.clamp_max_),
    _aten.add_.Tensor: _add,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _each(_zero, torch.Tensor.zero_),
    _aten.detach.default: _detach,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
