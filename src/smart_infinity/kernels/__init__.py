"""The device's compute engine: Numba kernels, and beside each a plain NumPy reference.

``OPTIMIZERS`` is the table of optimizers that devices can run. An entry is one small module with
``MOMENTS`` (torch's names of its state tensors), ``row`` (what changes per step), ``update`` (the
kernel) and ``update_numpy`` (its reference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from smart_infinity.kernels.caching import kernel_cache

with kernel_cache():
    from smart_infinity.kernels import adagrad, adam, landing, sgd
    from smart_infinity.kernels.formats import F32
    from smart_infinity.kernels.frame import (
        PIECE_COLUMNS,
        TABLE_COLUMNS,
        UpdateKernel,
        encode_record,
        load_masters,
        merge_edits,
    )

__all__ = [
    "OPTIMIZERS",
    "OptimizerKernel",
    "encode_record",
    "load_masters",
    "merge_edits",
    "prepare",
]


@dataclass(frozen=True, slots=True)
class OptimizerKernel:
    """An optimizer as a device sees it."""

    name: str
    moments: tuple[str, ...]
    row: Callable[[Mapping[str, Any], int], list[float]]
    update: UpdateKernel
    reference: UpdateKernel


OPTIMIZERS = {
    kernel.name: kernel
    for kernel in (
        OptimizerKernel("adamw", adam.MOMENTS, adam.row, adam.update, adam.update_numpy),
        OptimizerKernel("adam", adam.MOMENTS, adam.row, adam.update, adam.update_numpy),
        OptimizerKernel("sgd", sgd.MOMENTS, sgd.row, sgd.update, sgd.update_numpy),
        OptimizerKernel(
            "adagrad", adagrad.MOMENTS, adagrad.row, adagrad.update, adagrad.update_numpy
        ),
    )
}


def prepare(optimizer: str) -> None:
    """Compile, or load from the cache, every kernel that a first step needs."""
    halves, floats = np.zeros(0, np.uint16), np.zeros(0, np.float32)
    pieces = np.zeros((0, PIECE_COLUMNS), np.int64)
    table = np.zeros((0, TABLE_COLUMNS), np.float32)
    OPTIMIZERS[optimizer].update(
        floats, 0, halves, floats, np.zeros(0, np.int64), pieces, table, halves, floats
    )
    landing.land(F32, halves, floats, halves, floats, np.zeros(0, np.float64))
    load_masters(F32, floats, halves, floats)
    merge_edits(F32, floats, halves, floats)
    encode_record(floats, pieces, halves, floats)
