"""The landing zone: the part of device memory where gradients wait for the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from smart_infinity.devices.base import NO_PENDING, GradientMemory, Pending, Words
from smart_infinity.errors import DeviceMemoryError
from smart_infinity.kernels import landing
from smart_infinity.kernels.formats import F32
from smart_infinity.kernels.frame import decode, scale_and_clamp
from smart_infinity.layout import DevicePlan, Run
from smart_infinity.storage.buffers import reserve

_NO_HALVES = np.zeros(0, np.uint16)
_NO_FLOATS = np.zeros(0, np.float32)


def landing_zone_nbytes(plan: DevicePlan) -> int:
    """Address space of a device's landing zone: 4 bytes per element, plus 8 per block."""
    return 4 * plan.num_elements + 8 * plan.num_blocks


def num_buffers(path: str, budget: int | None, zone: int, each: int, wanted: int) -> int:
    """How many transfer buffers a budget leaves room for.

    Args:
        path: the device's directory, for the error.
        budget: ``device_memory`` in bytes, or None.
        zone: bytes for gradients and weights that wait for the update.
        each: bytes of a buffer; 0 on a device that holds nothing.
        wanted: as many as are of use.
    """
    if budget is None or (not each and budget >= zone):
        return wanted
    if budget < zone + each:
        raise DeviceMemoryError(
            f"device {path}: device_memory is {budget} bytes, but the landing zone for gradients "
            f"needs {zone} and one transfer buffer {each}. Expected at least {zone + each} bytes; "
            "raise device_memory or add devices"
        )
    return min(wanted, (budget - zone) // each)


class LandingZone(GradientMemory):
    """Gradients of one device, by run.

    A run owns 4 bytes per element. A 16-bit gradient lies in the first half of its run's place,
    and is widened to fp32 where it lies when a second backward adds to it. Pages cost memory only
    once touched, so training without accumulation touches half of the zone.
    """

    def __init__(self, plan: DevicePlan) -> None:
        self._runs = plan.runs
        memory = reserve(4 * plan.num_elements, huge_pages=False)
        self.grads16: npt.NDArray[np.uint16] = memory.view(np.uint16)
        self.grads32: npt.NDArray[np.float32] = memory.view(np.float32)
        self.formats = np.zeros(len(plan.runs), np.int64)
        # By run; goes up before and after each change of a landed gradient, so that who has read
        # one knows whether it was the one that lies here.
        self.versions = np.zeros(len(plan.runs), np.int64)
        self._squares = np.zeros(plan.num_blocks, np.float64)

    def land(self, index: int, form: int, words: Words, start: int = 0) -> int:
        """See `GradientMemory.land`."""
        run, stop = self._runs[index], start + words.size
        source16, source32 = word_sources(form, words)
        squares = self._block_squares(run, start, stop)
        with self._changing(index):
            self.formats[index] = form
            zone16, zone32 = self._zones(run, form)
            target16, target32 = zone16[start:stop], zone32[start:stop]
            return int(landing.land(form, source16, source32, target16, target32, squares))

    def accumulate(
        self, index: int, form: int, words: Words, pending: Pending, start: int = 0
    ) -> int:
        """See `GradientMemory.accumulate`."""
        run, stop = self._runs[index], start + words.size
        old_form = int(self.formats[index])
        zone16 = self._zones(run, old_form)[0][start:stop]
        zone32 = self.grads32[run.device_offset + start : run.device_offset + stop]
        source16, source32 = word_sources(form, words)
        squares = self._block_squares(run, start, stop)
        factor, low, high = _as_float32(pending)
        with self._changing(index):
            if start == 0:  # all parts are fp32 now
                self.formats[index] = F32
            return int(
                landing.accumulate(
                    old_form,
                    zone16,
                    zone32,
                    factor,
                    low,
                    high,
                    form,
                    source16,
                    source32,
                    squares,
                )
            )

    def fold(self, index: int, pending: Pending) -> int:
        """See `GradientMemory.fold`."""
        return self.land(index, F32, self.read(index, pending))

    def clear(self, index: int) -> None:
        """See `GradientMemory.clear`."""
        run = self._runs[index]
        with self._changing(index):
            zone16, zone32 = self._zones(run, int(self.formats[index]))
            zone16[:] = 0
            zone32[:] = 0
            self._block_squares(run, 0, run.length)[:] = 0

    def squares(self, index: int) -> npt.NDArray[np.float64]:
        """See `GradientMemory.squares`."""
        run = self._runs[index]
        return self._block_squares(run, 0, run.length)

    def norms(self, index: int, power: float, pending: Pending) -> npt.NDArray[np.float64]:
        """See `GradientMemory.norms`."""
        run, form = self._runs[index], int(self.formats[index])
        zone16, zone32 = self._zones(run, form)
        out = np.empty(run.num_blocks, np.float64)
        factor, low, high = _as_float32(pending)
        landing.block_norms(form, zone16, zone32, factor, low, high, float(power), out)
        return out

    def read(self, index: int, pending: Pending) -> npt.NDArray[np.float32]:
        """See `GradientMemory.read`."""
        run, form = self._runs[index], int(self.formats[index])
        out = np.empty(run.length, np.float32)
        decode(form, *self._zones(run, form), out)
        if pending != NO_PENDING:
            scale_and_clamp(out, *_as_float32(pending))
        return out

    @contextlib.contextmanager
    def _changing(self, index: int) -> Iterator[None]:
        self.versions[index] += 1
        try:
            yield
        finally:
            self.versions[index] += 1

    def _zones(self, run: Run, form: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
        if form == F32:
            return _NO_HALVES, self.grads32[run.device_offset : run.device_offset + run.length]
        begin = 2 * run.device_offset
        return self.grads16[begin : begin + run.length], _NO_FLOATS

    def _block_squares(self, run: Run, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Those of a part, which begins at a block."""
        first = run.first_block + start // landing.BLOCK
        return self._squares[first : run.first_block - (-stop // landing.BLOCK)]


def _as_float32(pending: Pending) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # beyond fp32 is infinite, as in torch
        return np.array(pending, np.float32)


def word_sources(form: int, words: Words) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
    """Words as the kernels take them: (16-bit source, fp32 source), of which one is empty."""
    return (_NO_HALVES, words) if form == F32 else (words, _NO_FLOATS)
