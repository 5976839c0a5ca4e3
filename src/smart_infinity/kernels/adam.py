"""Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), in torch's formulation.

One kernel serves both: Adam's L2 term is ``g + l2 * p``, AdamW's decay ``p * (1 - lr * wd)``; the
one that is not meant is 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit

from smart_infinity.kernels.formats import (
    BF16,
    F32,
    JIT,
    bf16_to_f32,
    flush_denormals,
    fma,
    restore_denormals,
)
from smart_infinity.kernels.frame import (
    CHUNK,
    P_FORMAT,
    P_GRAD16,
    P_GRAD32,
    P_LENGTH,
    P_OFFSET,
    P_PARAMETER,
    P_RUN,
    T_ACTIVE,
    T_FACTOR,
    T_HIGH,
    T_LOW,
    T_OWN,
    F32Array,
    load_gradient,
    store_weights,
    update_reference,
)

MOMENTS = ("exp_avg", "exp_avg_sq")

T_L2, T_DECAY, T_ONE_MINUS_BETA1, T_BETA2, T_ONE_MINUS_BETA2, T_INV_BC2, T_EPS, T_STEP_SIZE = range(
    T_OWN, T_OWN + 8
)


def row(group: Mapping[str, Any], step: int) -> list[float]:
    """The optimizer's own table columns for the parameters of ``group`` at their ``step``-th step.

    Computed in double precision, as torch computes its scalars.
    """
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    weight_decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    return [
        0.0 if decoupled else weight_decay,
        1.0 - lr * weight_decay if decoupled else 1.0,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        float(group["eps"]),
        lr / (1.0 - beta1**step),
    ]


@njit(inline="always", **JIT)
def _element(master: Any, m: Any, v: Any, g: Any, row: Any) -> Any:
    g = fma(row[T_L2], master, g)
    m = fma(row[T_ONE_MINUS_BETA1], g - m, m)
    v = fma(row[T_ONE_MINUS_BETA2] * g, g, v * row[T_BETA2])
    denominator = fma(np.sqrt(v), row[T_INV_BC2], row[T_EPS])
    return fma(master, row[T_DECAY], -row[T_STEP_SIZE] * m / denominator), m, v


@njit(**JIT)
def _update_bf16(master: Any, m: Any, v: Any, grads: Any, row: Any) -> None:
    for i in range(grads.size):
        g = bf16_to_f32(grads[i]) * row[T_FACTOR]
        master[i], m[i], v[i] = _element(master[i], m[i], v[i], g, row)


@njit(**JIT)
def _update_f32(master: Any, m: Any, v: Any, grads: Any, factor: Any, row: Any) -> None:
    for i in range(grads.size):
        g = grads[i] * factor
        master[i], m[i], v[i] = _element(master[i], m[i], v[i], g, row)


@njit(**JIT)
def update(
    state: Any,
    length: Any,
    grads16: Any,
    grads32: Any,
    run_formats: Any,
    pieces: Any,
    table: Any,
    words16: Any,
    words32: Any,
) -> None:
    """Update one record; see ``frame.UpdateKernel``.

    bf16 and fp32 gradients without bounds are read in the same pass as the update; every other
    case is decoded into a scratch chunk first. Encoding is a second loop over the chunk, still in
    cache: fused into one loop, the conversion to 16 bits costs the processor more than it saves.
    """
    control_word = flush_denormals()
    scratch = np.empty(CHUNK, np.float32)
    one = np.float32(1.0)
    for s in range(pieces.shape[0]):
        own = table[pieces[s, P_PARAMETER]]
        if own[T_ACTIVE] == 0:
            continue
        form = run_formats[pieces[s, P_RUN]]
        fused = own[T_LOW] == -np.inf and own[T_HIGH] == np.inf
        for begin in range(0, pieces[s, P_LENGTH], CHUNK):
            n = min(CHUNK, pieces[s, P_LENGTH] - begin)
            offset = pieces[s, P_OFFSET] + begin
            at16, at32 = pieces[s, P_GRAD16] + begin, pieces[s, P_GRAD32] + begin
            master = state[offset : offset + n]
            m = state[length + offset : length + offset + n]
            v = state[2 * length + offset : 2 * length + offset + n]
            if fused and form == BF16:
                _update_bf16(master, m, v, grads16[at16 : at16 + n], own)
            elif fused and form == F32:
                _update_f32(master, m, v, grads32[at32 : at32 + n], own[T_FACTOR], own)
            else:
                load_gradient(form, grads16, grads32, at16, at32, own, scratch[:n])
                _update_f32(master, m, v, scratch[:n], one, own)
            store_weights(pieces[s, P_FORMAT], master, pieces[s, P_OFFSET], begin, words16, words32)
    restore_denormals(control_word)


def update_numpy(*args: Any) -> None:
    """The same in plain NumPy; see ``frame.update_reference``."""
    update_reference(_step_numpy, *args)


def _step_numpy(tensors: list[F32Array], g: F32Array, row: F32Array) -> None:
    master, m, v = tensors
    g = g + row[T_L2] * master
    m += row[T_ONE_MINUS_BETA1] * (g - m)
    v[:] = v * row[T_BETA2] + row[T_ONE_MINUS_BETA2] * g * g
    denominator = np.sqrt(v) * row[T_INV_BC2] + row[T_EPS]
    master[:] = master * row[T_DECAY] - row[T_STEP_SIZE] * m / denominator
