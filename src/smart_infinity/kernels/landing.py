"""Gradients as they land: copying, accumulating, and the norm partials taken on the way.

Partials belong to blocks of 4096 elements of one parameter, so they do not depend on how the
parameter was cut between devices. Sums run in fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from smart_infinity.kernels.formats import F32, JIT, f32_as_bits
from smart_infinity.kernels.frame import (
    F32Array,
    U16Array,
    decode,
    decode_reference,
    scale_and_clamp,
)

BLOCK = 4096
NONFINITE_BITS = 0x7F800000  # magnitude bits of fp32 from here on are infinities and NaNs

# Reassociation lets the sums vectorize. It is harmless here: a block is never cut, so the same
# code sums the same elements in the same order whatever the number of devices.
_REDUCE: dict[str, Any] = {**JIT, "fastmath": {"contract", "nsz", "reassoc"}}


@njit(**_REDUCE)
def _sum_of_squares(values: Any) -> Any:
    total = 0.0
    for i in range(values.size):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@njit(**JIT)
def _peak_bits(values: Any) -> Any:
    peak = np.uint32(0)
    for i in range(values.size):
        peak = max(peak, f32_as_bits(values[i]) & np.uint32(0x7FFFFFFF))
    return peak


@njit(**JIT)
def _copy(source: Any, target: Any) -> None:
    # Not a slice assignment: Numba's formats an error message for shapes that differ, and
    # compiling its string functions takes a quarter of a first start.
    for i in range(target.size):
        target[i] = source[i]


@njit(**JIT)
def land(
    form: Any,
    source16: Any,
    source32: Any,
    target16: Any,
    target32: Any,
    squares: Any,
) -> Any:
    """Copy one run of a gradient into the landing zone and take its partials.

    ``squares`` (fp64) has one entry per block. Returns the
    largest magnitude bits of the run.
    """
    scratch = np.empty(BLOCK, np.float32)
    size = source32.size if form == F32 else source16.size
    highest = np.uint32(0)
    for block in range(squares.size):
        begin = block * BLOCK
        end = min(begin + BLOCK, size)
        values = scratch[: end - begin]
        if form == F32:
            _copy(source32[begin:end], target32[begin:end])
            decode(form, source16, source32[begin:end], values)
        else:
            _copy(source16[begin:end], target16[begin:end])
            decode(form, source16[begin:end], source32, values)
        squares[block] = _sum_of_squares(values)
        highest = max(highest, _peak_bits(values))
    return highest


@njit(**JIT)
def accumulate(
    old_form: Any,
    old16: Any,
    zone32: Any,
    factor: Any,
    low: Any,
    high: Any,
    form: Any,
    source16: Any,
    source32: Any,
    squares: Any,
) -> Any:
    """Add a gradient to a landed one in fp32: ``zone32 = clamp(old * factor, low, high) + new``.

    A 16-bit landed gradient occupies the first half of the run's place and is widened where it
    lies, from the last block to the first, so that nothing is overwritten before it was read.
    """
    ours = np.empty(BLOCK, np.float32)
    theirs = np.empty(BLOCK, np.float32)
    highest = np.uint32(0)
    for block in range(squares.size - 1, -1, -1):
        begin = block * BLOCK
        end = min(begin + BLOCK, zone32.size)
        values, added = ours[: end - begin], theirs[: end - begin]
        if old_form == F32:
            decode(old_form, old16, zone32[begin:end], values)
        else:
            decode(old_form, old16[begin:end], zone32, values)
        scale_and_clamp(values, factor, low, high)
        if form == F32:
            decode(form, source16, source32[begin:end], added)
        else:
            decode(form, source16[begin:end], source32, added)
        for i in range(values.size):
            values[i] += added[i]
        _copy(values, zone32[begin:end])
        squares[block] = _sum_of_squares(values)
        highest = max(highest, _peak_bits(values))
    return highest


@njit(**_REDUCE)
def _power_sum(values: Any, power: Any) -> Any:
    total = 0.0
    if power == 0.0:
        for i in range(values.size):
            total += 1.0 if values[i] != 0 else 0.0
    elif power == 1.0:
        for i in range(values.size):
            total += abs(np.float64(values[i]))
    elif power == 2.0:
        total = _sum_of_squares(values)
    else:
        for i in range(values.size):
            total += abs(np.float64(values[i])) ** power
    return total


@njit(**JIT)
def block_norms(
    form: Any,
    zone16: Any,
    zone32: Any,
    factor: Any,
    low: Any,
    high: Any,
    power: Any,
    out: Any,
) -> None:
    """A pass over a landed run: per block the sum of ``|x| ** power``, or the extreme magnitude.

    ``power`` of +inf gives the largest, -inf the smallest magnitude, 0 counts non-zeros.
    """
    scratch = np.empty(BLOCK, np.float32)
    size = zone32.size if form == F32 else zone16.size
    for block in range(out.size):
        begin = block * BLOCK
        end = min(begin + BLOCK, size)
        values = scratch[: end - begin]
        if form == F32:
            decode(form, zone16, zone32[begin:end], values)
        else:
            decode(form, zone16[begin:end], zone32, values)
        scale_and_clamp(values, factor, low, high)
        if np.isinf(power):
            extreme = abs(np.float64(values[0]))
            for i in range(values.size):
                value = abs(np.float64(values[i]))
                if np.isnan(value) or (value > extreme if power > 0 else value < extreme):
                    extreme = value
                if np.isnan(extreme):
                    break
            out[block] = extreme
        else:
            out[block] = _power_sum(values, power)


# --- plain NumPy references ------------------------------------------------------------------


def partials_reference(
    form: int, source16: U16Array, source32: F32Array, size: int
) -> tuple[npt.NDArray[np.float64], int]:
    """Squares per block of a gradient and its largest magnitude bits, as ``land`` takes them."""
    values = decode_reference(form, source16, source32, size)
    blocks = [values[i : i + BLOCK] for i in range(0, size, BLOCK)]
    squares = np.array([np.sum(b.astype(np.float64) ** 2) for b in blocks])
    peak = int((values.view(np.uint32) & 0x7FFFFFFF).max(initial=0))
    return squares, peak


def accumulate_reference(
    old: F32Array, factor: float, low: float, high: float, new: F32Array
) -> F32Array:
    """``clamp(old * factor, low, high) + new`` in fp32."""
    scaled = np.clip(old * np.float32(factor), np.float32(low), np.float32(high))
    return np.asarray(scaled + new, np.float32)
