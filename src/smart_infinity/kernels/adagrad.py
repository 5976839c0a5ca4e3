"""Adagrad (Duchi et al. 2011), in torch's formulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit

from smart_infinity.kernels.formats import JIT, flush_denormals, fma, restore_denormals
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
    T_OWN,
    F32Array,
    load_gradient,
    store_weights,
    update_reference,
)

MOMENTS = ("sum",)

T_RATE, T_L2, T_EPS = range(T_OWN, T_OWN + 3)


def row(group: Mapping[str, Any], step: int) -> list[float]:
    """The optimizer's own table columns at the ``step``-th step of the group's parameters."""
    rate = float(group["lr"]) / (1.0 + (step - 1) * float(group["lr_decay"]))
    return [rate, float(group["weight_decay"]), float(group["eps"])]


@njit(**JIT)
def _update(master: Any, total: Any, grads: Any, row: Any) -> None:
    for i in range(grads.size):
        g = fma(row[T_L2], master[i], grads[i])
        t = fma(g, g, total[i])
        total[i] = t
        master[i] = master[i] - row[T_RATE] * g / (np.sqrt(t) + row[T_EPS])


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
    """Update one record; see ``frame.UpdateKernel``."""
    control_word = flush_denormals()
    scratch = np.empty(CHUNK, np.float32)
    for s in range(pieces.shape[0]):
        own = table[pieces[s, P_PARAMETER]]
        if own[T_ACTIVE] == 0:
            continue
        form = run_formats[pieces[s, P_RUN]]
        for begin in range(0, pieces[s, P_LENGTH], CHUNK):
            n = min(CHUNK, pieces[s, P_LENGTH] - begin)
            offset = pieces[s, P_OFFSET] + begin
            at16, at32 = pieces[s, P_GRAD16] + begin, pieces[s, P_GRAD32] + begin
            load_gradient(form, grads16, grads32, at16, at32, own, scratch[:n])
            master = state[offset : offset + n]
            total = state[length + offset : length + offset + n]
            _update(master, total, scratch[:n], own)
            store_weights(pieces[s, P_FORMAT], master, pieces[s, P_OFFSET], begin, words16, words32)
    restore_denormals(control_word)


def update_numpy(*args: Any) -> None:
    """The same in plain NumPy; see ``frame.update_reference``."""
    update_reference(_step_numpy, *args)


def _step_numpy(tensors: list[F32Array], g: F32Array, row: F32Array) -> None:
    master, total = tensors
    g = g + row[T_L2] * master
    total += g * g
    master -= row[T_RATE] * g / (np.sqrt(total) + row[T_EPS])
