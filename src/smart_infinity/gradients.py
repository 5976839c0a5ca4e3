"""`OffloadedGradient`: a gradient that lives on the devices.

It has no storage; it understands what training loops do to gradients, and refuses the rest by
name. What it understands is the table ``_HANDLERS`` at the end; the work is done by the
`GradientStream` that it belongs to.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smart_infinity.errors import OffloadedGradientError

if TYPE_CHECKING:
    from smart_infinity.stream import GradientStream


class OffloadedGradient(torch.Tensor):
    """A gradient on the storage devices: fp32, with its parameter's shape, without storage.

    Norms, scaling, clamping, accumulation, zeroing and AMP's unscaling work and stay on the
    devices. ``to_dense()`` fetches the values. Everything else raises `OffloadedGradientError`.
    """

    _reference: weakref.ref[GradientStream]
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
        own._reference, own._index = weakref.ref(stream), index
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

    @property
    def _stream(self) -> GradientStream:
        stream = self._reference()
        if stream is None:
            raise OffloadedGradientError(
                "this gradient's optimizer is gone, and its values with it. Keep the optimizer "
                "that offload() returned for as long as its gradients are used"
            )
        return stream

    @property
    def data(self) -> OffloadedGradient:
        """The gradient itself; assigning a dense tensor replaces the landed values."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            if type(value) is OffloadedGradient:
                raise _refusal("data = another offloaded gradient", (self,))
            self._stream.land(self._index, value)

    def _refuse_storage(self, *args: Any, **kwargs: Any) -> Any:
        raise _refusal("access to the storage", (self,))

    # There is no memory behind these, and torch would read or move it all the same.
    share_memory_ = untyped_storage = storage = data_ptr = _refuse_storage
    __dlpack__ = __dlpack_device__ = pin_memory = _refuse_storage

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
    if func is _aten._to_copy.default:
        return OffloadedGradientError(
            f"the gradient of {names[0]} lives on the storage devices and cannot be converted or "
            "moved. Do not call model.to(), half() or the like after offload(); pass dtype= to "
            "offload(). To copy a gradient use grad.to_dense()"
        )
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
    if dtype in (None, torch.float32):
        with np.errstate(over="ignore"):  # beyond fp32 is infinite, as in torch
            value = float(np.float32(value))
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
