"""bfloat16 models on processors without bfloat16 arithmetic.

Such a processor emulates bfloat16 matrix products, several times slower forward and far slower
backward than fp32 ones. ``UpcastMatmuls`` computes them in fp32 and rounds the results, which is
also what bfloat16 hardware does (it accumulates in fp32), so weights, activations and gradients
stay bfloat16 while the arithmetic is fast.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)


def matmul_context(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """The context for forward and backward of a model of ``dtype`` on this machine's CPU."""
    if dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return contextlib.nullcontext()
    logger.info(
        "this CPU has no bfloat16 arithmetic: matrix products are computed in fp32 and rounded "
        "to bfloat16; weights and gradients stay bfloat16"
    )
    return UpcastMatmuls()


class UpcastMatmuls(TorchFunctionMode):
    """Computes products of bfloat16 tensors in fp32 and rounds the results to bfloat16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every function of its Python interface."""
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is None or not _is_bfloat16(args[0] if args else None):
            return func(*args, **kwargs)
        return replacement(func, *args, **kwargs)


def _is_bfloat16(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _upcast(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The general case: fp32 copies of all bfloat16 operands, which autograd keeps."""
    args = tuple(arg.float() if _is_bfloat16(arg) else arg for arg in args)
    kwargs = {name: arg.float() if _is_bfloat16(arg) else arg for name, arg in kwargs.items()}
    return func(*args, **kwargs).to(torch.bfloat16)


def _linear(func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Any = None) -> Any:
    return _upcast_linear(input, weight, bias)


def _addmm(
    func: Callable[..., Any], input: Tensor, mat1: Tensor, mat2: Tensor, **scale: Any
) -> Any:
    # transformers' Conv1D, GPT-2's linear layer, is addmm(bias, x, weight).
    if scale or input.dim() != 1:
        return _upcast(func, input, mat1, mat2, **scale)
    return _upcast_linear(mat1, mat2.t(), input)


class _UpcastLinear(torch.autograd.Function):
    """A linear layer that keeps its bfloat16 operands for backward, not fp32 copies of them.

    Copies of the weights would hold twice the model's size from forward to backward.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        wide_bias = None if bias is None else bias.float()
        return F.linear(input.float(), weight.float(), wide_bias).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        wide_grad = grad_outputs[0].float()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = (wide_grad @ weight.float()).to(torch.bfloat16)
        rows = wide_grad.reshape(-1, wide_grad.shape[-1])
        if ctx.needs_input_grad[1]:
            wide_input = input.float().reshape(-1, input.shape[-1])
            grad_weight = (rows.t() @ wide_input).to(torch.bfloat16)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(torch.bfloat16)
        return grad_input, grad_weight, grad_bias


_upcast_linear: Callable[..., Tensor] = _UpcastLinear.apply

_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.matmul: _upcast,
    Tensor.matmul: _upcast,
    Tensor.__matmul__: _upcast,
    torch.bmm: _upcast,
    Tensor.bmm: _upcast,
    torch.baddbmm: _upcast,
    Tensor.baddbmm: _upcast,
    torch.mm: _upcast,
    Tensor.mm: _upcast,
    F.scaled_dot_product_attention: _upcast,
}
