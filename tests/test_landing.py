"""The landing zone: copies, accumulation in place, and norm partials by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_infinity.devices.base import NO_PENDING, Pending
from smart_infinity.devices.memory import LandingZone, landing_zone_nbytes
from smart_infinity.kernels.formats import BF16, F16, F32
from smart_infinity.kernels.frame import decode_reference, encode_reference
from smart_infinity.kernels.landing import (
    BLOCK,
    NONFINITE_BITS,
    accumulate,
    accumulate_reference,
    block_norms,
    land,
    partials_reference,
)
from smart_infinity.layout import BLOCK_ELEMENTS, DevicePlan, ParameterSpec, plan_layout

FORMATS = {"fp32": F32, "bf16": BF16, "fp16": F16}
SIZES = sorted({1, 7, 255} | {k * BLOCK + d for k in (1, 2, 3) for d in (-1, 0, 1)})
NO_HALVES, NO_FLOATS = np.zeros(0, np.uint16), np.zeros(0, np.float32)
PENDINGS = {
    "none": NO_PENDING,
    "factor": (-0.37, -np.inf, np.inf),
    "bounds": (0.7, -0.4, 0.3),
    "zero": (0.0, -np.inf, np.inf),
}


def gradient(form: int, size: int, seed: int = 0) -> np.ndarray:
    """Random words of a format."""
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return encode_reference(form, values)


def as_sources(form: int, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (NO_HALVES, words) if form == F32 else (words, NO_FLOATS)


def as_fp32(form: int, words: np.ndarray) -> np.ndarray:
    return decode_reference(form, *as_sources(form, words), words.size)


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def blocks_of(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[i : i + BLOCK] for i in range(0, values.size, BLOCK))


def float32s(pending: Pending) -> tuple[np.float32, ...]:
    return tuple(np.float32(value) for value in pending)


def assert_partials(values: np.ndarray, squares: np.ndarray, peak: int) -> None:
    expected_squares, expected_peak = partials_reference(F32, NO_HALVES, values, values.size)
    np.testing.assert_allclose(squares, expected_squares, rtol=1e-12)
    assert peak == expected_peak


def test_blocks_of_kernels_and_of_the_layout_agree() -> None:
    assert BLOCK == BLOCK_ELEMENTS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_land_copies_and_takes_partials(form: int, size: int) -> None:
    words = gradient(form, size)
    target = np.zeros_like(words)
    squares = np.zeros(num_blocks(size))
    highest = land(form, *as_sources(form, words), *as_sources(form, target), squares)
    np.testing.assert_array_equal(target, words)
    assert_partials(as_fp32(form, words), squares, highest)


@pytest.mark.parametrize("pending", PENDINGS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("old_form", FORMATS.values(), ids=FORMATS)
def test_accumulate_widens_where_the_gradient_lies(old_form: int, form: int, pending: str) -> None:
    for size in SIZES:
        # The run's place lies between two others, which must not change.
        memory = np.full(size + 2, -7.0, np.float32)
        zone32 = memory[1:-1]
        zone16 = memory.view(np.uint16)[2 : 2 + size]
        landed, added = gradient(old_form, size, seed=1), gradient(form, size, seed=2)
        (zone32 if old_form == F32 else zone16)[:] = landed
        squares = np.zeros(num_blocks(size))
        highest = accumulate(
            old_form,
            zone16,
            zone32,
            *float32s(PENDINGS[pending]),
            form,
            *as_sources(form, added),
            squares,
        )
        old, new = as_fp32(old_form, landed), as_fp32(form, added)
        expected = accumulate_reference(old, *PENDINGS[pending], new)
        np.testing.assert_array_equal(zone32, expected)
        assert_partials(zone32, squares, highest)
        assert memory[[0, -1]].tolist() == [-7.0, -7.0]


def norms(values: np.ndarray, power: float) -> list[float]:
    wide = np.abs(values.astype(np.float64))
    if power == np.inf:
        return [b.max() for b in blocks_of(wide)]
    if power == -np.inf:
        return [b.min() for b in blocks_of(wide)]
    if power == 0:
        return [float((b != 0).sum()) for b in blocks_of(wide)]
    return [(b**power).sum() for b in blocks_of(wide)]


@pytest.mark.parametrize("pending", PENDINGS)
@pytest.mark.parametrize("power", [2.0, 1.0, 3.0, 0.5, -1.0, 0.0, np.inf, -np.inf])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_block_norms(form: int, power: float, pending: str) -> None:
    for size in SIZES:
        words = gradient(form, size)
        words[size // 2] = 0
        factor, low, high = float32s(PENDINGS[pending])
        out = np.full(num_blocks(size), np.nan)
        block_norms(form, *as_sources(form, words), factor, low, high, power, out)
        with np.errstate(divide="ignore"):
            expected = norms(np.clip(as_fp32(form, words) * factor, low, high), power)
        np.testing.assert_allclose(out, expected, rtol=1e-11)


@pytest.mark.parametrize("power", [2.0, 1.0, 3.0, 0.5, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5, 4095])
def test_nan_makes_its_blocks_norm_nan_and_no_other(power: float, at: int) -> None:
    values = gradient(F32, 2 * BLOCK)
    values[at] = np.nan
    out = np.zeros(2)
    block_norms(F32, NO_HALVES, values, *float32s(NO_PENDING), power, out)
    assert np.isnan(out).tolist() == [True, False]
    # Clamping hides infinities, as in torch, but never NaN.
    block_norms(F32, NO_HALVES, values, *float32s((1.0, -1.0, 1.0)), power, out)
    assert np.isnan(out).tolist() == [True, False]


@pytest.mark.parametrize("form", [BF16, F16], ids=["bf16", "fp16"])
def test_the_peak_tells_nonfinite_from_finite_for_all_words(form: int) -> None:
    words = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    target, squares = np.zeros(1, np.uint16), np.zeros(1)
    found = [
        land(form, words[i : i + 1], NO_FLOATS, target, NO_FLOATS, squares) for i in range(65536)
    ]
    finite = np.isfinite(as_fp32(form, words))
    np.testing.assert_array_equal(np.array(found) < NONFINITE_BITS, finite)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 4095, 4096, 8999])
def test_one_nonfinite_element_is_seen_wherever_it_lies(bad: float, at: int) -> None:
    values = gradient(F32, 9000)
    squares = np.zeros(3)
    target = np.zeros_like(values)
    arguments = (F32, NO_HALVES, values, NO_HALVES, target, squares)
    assert land(*arguments) < NONFINITE_BITS
    values[at] = bad
    assert land(*arguments) >= NONFINITE_BITS


def test_an_overflow_while_accumulating_is_seen() -> None:
    zone = np.full(5, 3e38, np.float32)
    new = np.full(5, 3e38, np.float32)
    squares = np.zeros(1)
    factors = float32s(NO_PENDING)
    top = accumulate(F32, NO_HALVES, zone, *factors, F32, NO_HALVES, new, squares)
    assert top == NONFINITE_BITS


def test_squares_of_extreme_values_neither_overflow_nor_vanish() -> None:
    for value in (3e38, 1e-30, 1e-44):
        values = np.full(100, value, np.float32)
        squares = np.zeros(1)
        land(F32, NO_HALVES, values, NO_HALVES, np.zeros_like(values), squares)
        np.testing.assert_allclose(squares, [100 * float(values[0]) ** 2], rtol=1e-12)


# --- the zone of a device ------------------------------------------------------------------------


def device_plan(numels: list[int], num_devices: int = 1, device: int = 0) -> DevicePlan:
    specs = [ParameterSpec(f"p{i}", (n,), "bfloat16") for i, n in enumerate(numels)]
    return plan_layout(specs, "adamw", ("m", "v"), num_devices).devices[device]


def test_the_zone_takes_four_bytes_per_element_and_twelve_per_block() -> None:
    plan = device_plan([1, 5000, 70_000], num_devices=3, device=1)
    assert landing_zone_nbytes(plan) == 4 * plan.num_elements + 8 * plan.num_blocks
    assert LandingZone(plan).grads32.size >= plan.num_elements


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int, int, str, int | None]]]:
    numels = draw(st.lists(st.sampled_from([1, 3, 4096, 4097, 9000]), min_size=1, max_size=4))
    operation = st.tuples(
        st.sampled_from(["land", "accumulate", "accumulate", "clear"]),
        st.integers(0, len(numels) - 1),
        st.sampled_from(list(FORMATS.values())),
        st.sampled_from(list(PENDINGS)),
        st.sampled_from([None, 1, 2]),  # blocks of a part
    )
    return numels, draw(st.lists(operation, max_size=12))


@settings(max_examples=60, deadline=None)
@given(histories())
def test_any_history_of_landings_equals_plain_arithmetic(
    history: tuple[list[int], list[tuple[str, int, int, str, int | None]]],
) -> None:
    numels, operations = history
    plan = device_plan(numels)
    zone = LandingZone(plan)
    expected = [np.zeros(n, np.float32) for n in numels]
    for run in range(len(numels)):
        zone.land(run, F32, expected[run])
    for seed, (operation, run, form, pending, blocks) in enumerate(operations):
        words = gradient(form, numels[run], seed)
        size = numels[run] if blocks is None else blocks * BLOCK
        starts = range(0, numels[run], size)[::-1]
        parts = [(start, words[start : start + size]) for start in starts]
        if operation == "land":
            peak = max(zone.land(run, form, part, start) for start, part in parts)
            expected[run] = as_fp32(form, words)
        elif operation == "accumulate":
            own = PENDINGS[pending]
            peak = max(zone.accumulate(run, form, part, own, start) for start, part in parts)
            new = as_fp32(form, words)
            expected[run] = accumulate_reference(expected[run], *PENDINGS[pending], new)
        else:
            zone.clear(run)
            expected[run] = np.zeros(numels[run], np.float32)
            peak = 0
        assert peak == (expected[run].view(np.uint32) & 0x7FFFFFFF).max()
        for other, values in enumerate(expected):
            np.testing.assert_array_equal(zone.read(other, NO_PENDING), values)
            squares = [np.sum(b.astype(np.float64) ** 2) for b in blocks_of(values)]
            np.testing.assert_allclose(zone.squares(other), squares, rtol=1e-12)
    for run, values in enumerate(expected):
        factor, low, high = float32s(PENDINGS["bounds"])
        scaled = np.clip(values * factor, low, high)
        np.testing.assert_array_equal(zone.read(run, PENDINGS["bounds"]), scaled)
        np.testing.assert_allclose(
            zone.norms(run, 3.0, PENDINGS["bounds"]), norms(scaled, 3.0), rtol=1e-11
        )


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_partials_do_not_depend_on_the_number_of_devices(form: int) -> None:
    numel = 15 * BLOCK + 77
    words = gradient(form, numel)
    spec = [ParameterSpec("p", (numel,), "bfloat16")]
    squares = {}
    for count in (1, 2, 3, 7, 16):
        parts = []
        for plan in plan_layout(spec, "adamw", ("m", "v"), count).devices:
            zone = LandingZone(plan)
            for index, run in enumerate(plan.runs):
                zone.land(index, form, words[run.start : run.start + run.length])
                parts.append(zone.squares(index).copy())
        squares[count] = np.concatenate(parts)
    for count in squares:
        np.testing.assert_array_equal(squares[count], squares[1])
