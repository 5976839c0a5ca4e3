"""Number formats: decoding gradients and encoding weights, and the processor's denormal mode.

A format is a small integer so that kernels can branch on it once per piece: 0 is fp32, 1 bf16,
2 fp16. All arithmetic is in fp32.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

F32, BF16, F16 = 0, 1, 2
FORMAT_OF_DTYPE = {"float32": F32, "bfloat16": BF16, "float16": F16}
ITEMSIZE = {F32: 4, BF16: 2, F16: 2}

# error_model="numpy": with Python's division checks a loop stays scalar. No fastmath: an element's
# result must not depend on where a loop was cut, and even "contract" lets the compiler fuse the
# vectorized loop and its scalar remainder differently. Kernels say ``fma`` where they mean it.
JIT: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

_MXCSR_FLUSH = 0x8040  # flush-to-zero | denormals-are-zero
_FPCR_FLUSH = 1 << 24  # FZ, both directions
_IS_X86 = platform.machine().lower() in {"x86_64", "amd64", "i686"}
_IS_ARM = platform.machine().lower() in {"aarch64", "arm64"}


@intrinsic
def bits_as_f32(typingctx: Any, bits: Any) -> Any:
    """Reinterpret a uint32 as a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def f32_as_bits(typingctx: Any, value: Any) -> Any:
    """Reinterpret a float32 as a uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def f16_to_f32(typingctx: Any, bits: Any) -> Any:
    """Widen the fp16 number with these bits (exact, denormals included)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_f16(typingctx: Any, value: Any) -> Any:
    """Round to fp16, to nearest even; returns the bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in fp32, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    one = types.float32
    return one(one, one, one), codegen


@njit(inline="always", **JIT)
def bf16_to_f32(bits: Any) -> Any:
    """Widen the bf16 number with these bits (exact)."""
    return bits_as_f32(np.uint32(bits) << np.uint32(16))


@njit(inline="always", **JIT)
def f32_to_bf16(value: Any) -> Any:
    """Round to bf16, to nearest even; NaN stays NaN. Returns the bits."""
    bits = f32_as_bits(value)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    return np.uint16(rounded if value == value else np.uint32(0x7FC0))


@intrinsic
def flush_denormals(typingctx: Any) -> Any:
    """Make denormals count as zero on this thread; returns the control word to restore.

    Moments of rows that no batch touches decay into denormals within some hundred steps, and
    arithmetic on those is about ten times slower.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            slot = builder.alloca(ir.IntType(32))
            pointer = builder.bitcast(slot, ir.IntType(8).as_pointer())
            _mxcsr(builder, "stmxcsr", pointer)
            old = builder.load(slot)
            builder.store(builder.or_(old, ir.Constant(ir.IntType(32), _MXCSR_FLUSH)), slot)
            _mxcsr(builder, "ldmxcsr", pointer)
            return builder.zext(old, ir.IntType(64))
        if _IS_ARM:
            old = builder.asm(ir.FunctionType(ir.IntType(64), []), "mrs $0, fpcr", "=r", [], True)
            new = builder.or_(old, ir.Constant(ir.IntType(64), _FPCR_FLUSH))
            _write_fpcr(builder, new)
            return old
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(), codegen


@intrinsic
def restore_denormals(typingctx: Any, control_word: Any) -> Any:
    """Undo ``flush_denormals``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            slot = builder.alloca(ir.IntType(32))
            builder.store(builder.trunc(args[0], ir.IntType(32)), slot)
            _mxcsr(builder, "ldmxcsr", builder.bitcast(slot, ir.IntType(8).as_pointer()))
        elif _IS_ARM:
            _write_fpcr(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _mxcsr(builder: Any, operation: str, pointer: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
    function = builder.module.declare_intrinsic(f"llvm.x86.sse.{operation}", fnty=kind)
    builder.call(function, [pointer])


def _write_fpcr(builder: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.asm(kind, "msr fpcr, $0", "r", [value], True)
