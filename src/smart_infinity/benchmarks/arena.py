"""Synthetic state records in memory, and the kernels' calls on them as a device makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from smart_infinity.kernels import OPTIMIZERS, landing
from smart_infinity.kernels.formats import BF16, F16, F32
from smart_infinity.kernels.frame import (
    PIECE_COLUMNS,
    T_ACTIVE,
    T_FACTOR,
    T_HIGH,
    T_LOW,
    T_OWN,
    TABLE_COLUMNS,
    F32Array,
    U16Array,
)
from smart_infinity.storage.buffers import reserve

# What torch's constructors fill in, for the columns of a kernel's table.
HYPER_PARAMETERS: dict[str, Mapping[str, Any]] = {
    "adamw": {
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decoupled_weight_decay": True,
    },
    "sgd": {
        "lr": 1e-4,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    },
    "adagrad": {"lr": 1e-4, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
}

WORKERS = 2

# By number: what to do with one record.
Call = Callable[[int], object]


class Arena:
    """Gradients, state and words of ``num_records`` records of ``length`` elements.

    Words have a place per worker, as in a device: worker ``i`` of ``WORKERS`` takes the records
    ``i``, ``i + WORKERS``, ...
    """

    def __init__(self, optimizer: str, form: int, num_records: int, length: int) -> None:
        self._kernel, self._form, self._length = OPTIMIZERS[optimizer], form, length
        num_tensors = 1 + len(self._kernel.moments)
        state = reserve(4 * num_tensors * num_records * length).view(np.float32)
        self.state = state[: num_tensors * num_records * length].reshape(num_records, -1)
        self.grads32 = _floats(num_records * length)
        self.grads16 = self.grads32.view(np.uint16)
        words = reserve(4 * WORKERS * length).view(np.float32)[: WORKERS * length]
        self._words32 = words.reshape(WORKERS, length)
        self._words16 = words.view(np.uint16).reshape(WORKERS, 2 * length)
        self._forms = np.full(num_records, form, np.int64)
        self._pieces = np.zeros((num_records, 1, PIECE_COLUMNS), np.int64)
        for index in range(num_records):
            at = index * length
            self._pieces[index, 0] = (0, index, length, 0, 2 * at, at, form)
        self._table = np.zeros((1, TABLE_COLUMNS), np.float32)
        row = self._kernel.row(HYPER_PARAMETERS[optimizer], 10)
        self._table[0, T_ACTIVE] = self._table[0, T_FACTOR] = 1
        self._table[0, T_LOW], self._table[0, T_HIGH] = -np.inf, np.inf
        self._table[0, T_OWN : T_OWN + len(row)] = row

    def fill(self) -> None:
        """Usual values: masters and gradients of common size, moments at zero."""
        generator = np.random.default_rng(0)
        gradients = (generator.standard_normal(self._length) * 1e-3).astype(np.float32)
        for index in range(len(self.state)):
            self.state[index] = 0
            self.state[index, : self._length] = 20 * np.roll(gradients, index + 1)
            self.gradient(index)[:] = _words(self._form, gradients)

    def fill_with_denormals(self) -> None:
        """Every gradient and every number of the state denormal; a step flushes them to zero."""
        generator = np.random.default_rng(0)
        mantissas = generator.integers(1, 1 << 23, self._length, np.uint32)
        for index in range(len(self.state)):
            bits = self.state[index].view(np.uint32).reshape(-1, self._length)
            bits[:] = mantissas
            gradient = self.gradient(index)
            gradient[:] = mantissas >> 16 if self._form == BF16 else mantissas.view(np.float32)

    def gradient(self, index: int) -> U16Array | F32Array:
        """A record's landed gradient."""
        begin = index * self._length
        if self._form == F32:
            return self.grads32[begin : begin + self._length]
        return self.grads16[2 * begin : 2 * begin + self._length]

    def update(self, index: int) -> None:
        """One record's update."""
        self._kernel.update(
            self.state[index],
            self._length,
            self.grads16,
            self.grads32,
            self._forms,
            self._pieces[index],
            self._table,
            self._words16[index % WORKERS],
            self._words32[index % WORKERS],
        )


class LandingArena:
    """bf16 gradients as backward leaves them, and the places where they land, by record."""

    def __init__(self, num_records: int, length: int) -> None:
        self._length = length
        values = np.random.default_rng(0).standard_normal(length).astype(np.float32)
        self._source = np.tile(_words(BF16, values), num_records).reshape(num_records, length)
        self._zone32 = _floats(num_records * length).reshape(num_records, length)
        blocks = -(-length // landing.BLOCK)
        self._squares = np.zeros((num_records, blocks), np.float64)
        self._no_halves, self._no_floats = np.zeros(0, np.uint16), np.zeros(0, np.float32)

    def land(self, index: int) -> None:
        """The first gradient of an iteration."""
        landing.land(
            BF16,
            self._source[index],
            self._no_floats,
            self._zone32[index].view(np.uint16)[: self._length],
            self._no_floats,
            self._squares[index],
        )

    def accumulate(self, index: int) -> None:
        """A third or later one: the sum is in fp32 already."""
        landing.accumulate(
            F32,
            self._no_halves,
            self._zone32[index],
            np.float32(1),
            np.float32(-np.inf),
            np.float32(np.inf),
            BF16,
            self._source[index],
            self._no_floats,
            self._squares[index],
        )


def _floats(count: int) -> F32Array:
    """Memory as the landing zone and the host have it: without huge pages."""
    return reserve(4 * count, huge_pages=False).view(np.float32)[:count]


def _words(form: int, values: F32Array) -> U16Array | F32Array:
    if form == F32:
        return values
    if form == F16:
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
