"""The frame that every optimizer kernel stands in: decode a gradient block, update, encode.

A kernel runs over one state record in chunks of ``CHUNK`` elements that stay in the L2 cache.
Rows of *pieces* (int64) tell where things are; the columns are the ``P_*`` constants. Rows of
*table* (float32), one per parameter, hold what changes from step to step: the first columns are
common to all optimizers (``T_*``), those from ``T_OWN`` on belong to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from smart_infinity.kernels.formats import (
    BF16,
    F16,
    F32,
    JIT,
    bf16_to_f32,
    f16_to_f32,
    f32_as_bits,
    f32_to_bf16,
    f32_to_f16,
)

# Large enough that the processor's prefetchers, which begin anew with every chunk, are mostly at
# full speed; small enough that encoding finds the masters of its chunk in the L2 cache.
CHUNK = 16384

P_PARAMETER, P_RUN, P_LENGTH, P_OFFSET, P_GRAD16, P_GRAD32, P_FORMAT = range(7)
PIECE_COLUMNS = 7

T_ACTIVE, T_FACTOR, T_LOW, T_HIGH, T_OWN = range(5)
TABLE_COLUMNS = 16

U16Array = npt.NDArray[np.uint16]
F32Array = npt.NDArray[np.float32]
I64Array = npt.NDArray[np.int64]

# (state, length, grads16, grads32, run_formats, pieces, table, words16, words32): the update of
# one record of `length` elements, in place. `state` is [master | moments...] of `length` each.
UpdateKernel = Callable[
    [F32Array, int, U16Array, F32Array, I64Array, I64Array, F32Array, U16Array, F32Array], None
]


@njit(**JIT)
def decode(form: Any, source16: Any, source32: Any, target: Any) -> None:
    """Widen a block of any format into the fp32 ``target``; only one source is read."""
    if form == F32:
        for i in range(target.size):
            target[i] = source32[i]
    elif form == BF16:
        for i in range(target.size):
            target[i] = bf16_to_f32(source16[i])
    else:
        for i in range(target.size):
            target[i] = f16_to_f32(source16[i])


@njit(**JIT)
def encode(form: Any, source: Any, target16: Any, target32: Any) -> None:
    """Round fp32 values to a format; only one target is written."""
    if form == F32:
        for i in range(source.size):
            target32[i] = source[i]
    elif form == BF16:
        for i in range(source.size):
            target16[i] = f32_to_bf16(source[i])
    else:
        for i in range(source.size):
            target16[i] = f32_to_f16(source[i])


@njit(**JIT)
def scale_and_clamp(values: Any, factor: Any, low: Any, high: Any) -> None:
    """``clamp(values * factor, low, high)`` in place; NaN stays NaN."""
    for i in range(values.size):
        value = values[i] * factor
        value = low if value < low else value
        values[i] = high if value > high else value


@njit(**JIT)
def load_gradient(
    form: Any, grads16: Any, grads32: Any, at16: Any, at32: Any, row: Any, target: Any
) -> None:
    """Decode one chunk of a landed gradient, with its pending factor and bounds applied."""
    n = target.size
    decode(form, grads16[at16 : at16 + n], grads32[at32 : at32 + n], target)
    scale_and_clamp(target, row[T_FACTOR], row[T_LOW], row[T_HIGH])


@njit(**JIT)
def store_weights(
    form: Any, masters: Any, offset: Any, begin: Any, words16: Any, words32: Any
) -> None:
    """Encode masters that begin ``begin`` elements into the piece at ``offset`` of its record.

    Words lie where their element is in the record, in the buffer of their size.
    """
    at, n = offset + begin, masters.size
    encode(form, masters, words16[at : at + n], words32[at : at + n])


@njit(**JIT)
def encode_record(state: Any, pieces: Any, words16: Any, words32: Any) -> None:
    """Encode all masters of a record: what a resume sends to the host."""
    for s in range(pieces.shape[0]):
        offset, n = pieces[s, P_OFFSET], pieces[s, P_LENGTH]
        store_weights(pieces[s, P_FORMAT], state[offset : offset + n], offset, 0, words16, words32)


@njit(**JIT)
def load_masters(form: Any, masters: Any, words16: Any, words32: Any) -> None:
    """Take masters from words as they are: the beginning of a state."""
    decode(form, words16, words32, masters)


@njit(**JIT)
def merge_edits(form: Any, masters: Any, words16: Any, words32: Any) -> None:
    """Replace exactly the masters whose word differs from the cast of the present master.

    Loading the very weights that are there must not cost the masters their low bits.
    """
    for i in range(masters.size):
        if form == F32:
            if f32_as_bits(words32[i]) != f32_as_bits(masters[i]):
                masters[i] = words32[i]
        elif form == BF16:
            if words16[i] != f32_to_bf16(masters[i]):
                masters[i] = bf16_to_f32(words16[i])
        elif words16[i] != f32_to_f16(masters[i]):
            masters[i] = f16_to_f32(words16[i])


# --- plain NumPy references of the same signatures ------------------------------------------


def decode_reference(form: int, source16: U16Array, source32: F32Array, n: int) -> F32Array:
    """NumPy's version of ``decode``; returns a new array."""
    if form == F32:
        return source32[:n].astype(np.float32)
    if form == F16:
        return source16[:n].view(np.float16).astype(np.float32)
    return (source16[:n].astype(np.uint32) << 16).view(np.float32)


def encode_reference(form: int, source: F32Array) -> npt.NDArray[Any]:
    """NumPy's version of ``encode``; returns uint16 words, or fp32 for ``F32``."""
    if form == F32:
        return source.copy()
    if form == F16:
        with np.errstate(over="ignore"):
            return source.astype(np.float16).view(np.uint16)
    bits = source.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(source), 0x7FC0, rounded).astype(np.uint16)


def update_reference(
    step: Callable[[list[F32Array], F32Array, F32Array], None],
    state: F32Array,
    length: int,
    grads16: U16Array,
    grads32: F32Array,
    run_formats: I64Array,
    pieces: I64Array,
    table: F32Array,
    words16: U16Array,
    words32: F32Array,
) -> None:
    """The frame in NumPy: ``step(tensors, gradient, row)`` updates the piece's tensors in place."""
    tensors = state[: state.size // length * length].reshape(-1, length)
    for parameter, run, n, offset, at16, at32, form in pieces.tolist():
        row = table[parameter]
        if row[T_ACTIVE] == 0:
            continue
        gradient = decode_reference(run_formats[run], grads16[at16:], grads32[at32:], n)
        gradient = np.clip(gradient * row[T_FACTOR], row[T_LOW], row[T_HIGH])
        step([tensor[offset : offset + n] for tensor in tensors], gradient, row)
        words = encode_reference(form, tensors[0, offset : offset + n])
        if form == F32:
            words32[offset : offset + n] = words
        else:
            words16[offset : offset + n] = words
