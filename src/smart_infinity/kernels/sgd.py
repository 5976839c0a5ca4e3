"""SGD with momentum, dampening and Nesterov's variant, in torch's formulation."""

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

MOMENTS = ("momentum_buffer",)

T_LR, T_L2, T_MOMENTUM, T_KEEP, T_TAKE, T_NESTEROV = range(T_OWN, T_OWN + 6)


def row(group: Mapping[str, Any], step: int) -> list[float]:
    """The optimizer's own table columns; ``step`` counts the steps taken *with momentum*.

    torch begins a momentum buffer as a copy of the gradient, without dampening: at step 1 the
    old buffer (zeros) keeps a share of 0 and the gradient enters with a share of 1.
    """
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    first = step <= 1
    return [
        float(group["lr"]),
        float(group["weight_decay"]),
        momentum,
        0.0 if first else momentum,
        1.0 if first else 1.0 - dampening,
        float(bool(group["nesterov"])),
    ]


@njit(**JIT)
def _update_plain(master: Any, grads: Any, row: Any) -> None:
    for i in range(grads.size):
        g = fma(row[T_L2], master[i], grads[i])
        master[i] = fma(-row[T_LR], g, master[i])


@njit(**JIT)
def _update_momentum(master: Any, buffer: Any, grads: Any, row: Any) -> None:
    nesterov = row[T_NESTEROV]
    for i in range(grads.size):
        g = fma(row[T_L2], master[i], grads[i])
        b = fma(row[T_TAKE], g, buffer[i] * row[T_KEEP])
        buffer[i] = b
        direction = fma(row[T_MOMENTUM], b, g) if nesterov != 0 else b
        master[i] = fma(-row[T_LR], direction, master[i])


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
            if own[T_MOMENTUM] == 0:
                _update_plain(master, scratch[:n], own)
            else:
                buffer = state[length + offset : length + offset + n]
                _update_momentum(master, buffer, scratch[:n], own)
            store_weights(pieces[s, P_FORMAT], master, pieces[s, P_OFFSET], begin, words16, words32)
    restore_denormals(control_word)


def update_numpy(*args: Any) -> None:
    """The same in plain NumPy; see ``frame.update_reference``."""
    update_reference(_step_numpy, *args)


def _step_numpy(tensors: list[F32Array], g: F32Array, row: F32Array) -> None:
    master = tensors[0]
    g = g + row[T_L2] * master
    if row[T_MOMENTUM] != 0:
        buffer = tensors[1]
        buffer[:] = buffer * row[T_KEEP] + row[T_TAKE] * g
        g = g + row[T_MOMENTUM] * buffer if row[T_NESTEROV] else buffer
    master -= row[T_LR] * g
