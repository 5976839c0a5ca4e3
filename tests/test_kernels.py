"""Optimizer kernels: against their NumPy references, against torch, and bit by bit over cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_infinity.kernels import OPTIMIZERS, OptimizerKernel, encode_record, merge_edits
from smart_infinity.kernels.formats import BF16, F16, F32
from smart_infinity.kernels.frame import (
    CHUNK,
    P_FORMAT,
    P_LENGTH,
    P_OFFSET,
    PIECE_COLUMNS,
    T_ACTIVE,
    T_FACTOR,
    T_HIGH,
    T_LOW,
    T_OWN,
    TABLE_COLUMNS,
    decode,
    decode_reference,
    encode,
    encode_reference,
)

FORMATS = {"fp32": F32, "bf16": BF16, "fp16": F16}
AWKWARD = (1, 7, 255, 2047, 2048, 2049, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1)
EPS32 = float(np.finfo(np.float32).eps)
NO_HALVES, NO_FLOATS = np.zeros(0, np.uint16), np.zeros(0, np.float32)

# (kernel, torch's hyper-parameters, step)
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "adamw": (
        "adamw",
        {
            "lr": 0.01,
            "betas": (0.9, 0.99),
            "eps": 1e-5,
            "weight_decay": 0.1,
            "decoupled_weight_decay": True,
        },
        3,
    ),
    "adam": ("adam", {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.03}, 1),
    "sgd-plain": (
        "sgd",
        {"lr": 0.1, "momentum": 0, "dampening": 0, "nesterov": False, "weight_decay": 0.01},
        1,
    ),
    "sgd-first": (
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "nesterov": False, "weight_decay": 0},
        1,
    ),
    "sgd-dampening": (
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "nesterov": False, "weight_decay": 0.02},
        5,
    ),
    "sgd-nesterov": (
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": True, "weight_decay": 0},
        5,
    ),
    "adagrad": ("adagrad", {"lr": 0.05, "lr_decay": 0.01, "eps": 1e-6, "weight_decay": 0.01}, 4),
}
PENDING = {
    "none": (1.0, -np.inf, np.inf),
    "factor": (-0.37, -np.inf, np.inf),
    "bounds": (0.7, -0.4, 0.3),
    "low": (1.3, -0.4, np.inf),
    "high": (1.0, -np.inf, 0.3),
}


@dataclass
class Case:
    """The arguments of an update kernel; gradients lie in one memory as in the landing zone."""

    kernel: OptimizerKernel
    state: np.ndarray
    length: int
    grads32: np.ndarray
    run_formats: np.ndarray
    pieces: np.ndarray
    table: np.ndarray
    words32: np.ndarray

    def __post_init__(self) -> None:
        self.words16 = np.zeros(self.words32.size, np.uint16)

    def args(self) -> tuple[Any, ...]:
        return (
            self.state,
            self.length,
            self.grads32.view(np.uint16),
            self.grads32,
            self.run_formats,
            self.pieces,
            self.table,
            self.words16,
            self.words32,
        )

    def copy(self) -> Case:
        twin = replace(self, state=self.state.copy(), words32=self.words32.copy())
        twin.words16 = self.words16.copy()
        return twin

    def run(self) -> Case:
        self.kernel.update(*self.args())
        return self

    def run_reference(self) -> Case:
        with np.errstate(all="ignore"):
            self.kernel.reference(*self.args())
        return self

    @property
    def tensors(self) -> np.ndarray:
        return self.state.reshape(-1, self.length)

    def words(self, piece: int) -> np.ndarray:
        row = self.pieces[piece]
        offset, n = row[P_OFFSET], row[P_LENGTH]
        if row[P_FORMAT] == F32:
            return self.words32[offset : offset + n]
        return self.words16[offset : offset + n]


def table_row(variant: str, pending: tuple[float, float, float] = PENDING["none"]) -> np.ndarray:
    name, group, step = VARIANTS[variant]
    own = OPTIMIZERS[name].row(group, step)
    row = np.zeros(TABLE_COLUMNS, np.float32)
    row[T_ACTIVE], row[T_FACTOR], row[T_LOW], row[T_HIGH] = 1, *pending
    row[T_OWN : T_OWN + len(own)] = own
    return row


def random_tensors(kernel: OptimizerKernel, length: int, rng: np.random.Generator) -> np.ndarray:
    """Master and moments; second moments are positive and far from zero."""
    tensors = rng.standard_normal((1 + len(kernel.moments), length)).astype(np.float32)
    if kernel.moments[-1] in {"exp_avg_sq", "sum"}:
        tensors[-1] = rng.uniform(0.3, 2.0, length)
    return tensors


def make_case(
    variant: str,
    lengths: Sequence[int],
    grad_formats: Sequence[int],
    weight_formats: Sequence[int],
    rows: Sequence[np.ndarray],
    seed: int = 0,
) -> Case:
    """One record with a piece per length, each of a parameter and a run of its own."""
    rng = np.random.default_rng(seed)
    kernel = OPTIMIZERS[VARIANTS[variant][0]]
    total = sum(lengths)
    grads32 = np.zeros(total, np.float32)
    pieces = np.zeros((len(lengths), PIECE_COLUMNS), np.int64)
    offset = 0
    for i, n in enumerate(lengths):
        pieces[i] = (i, i, n, offset, 2 * offset, offset, weight_formats[i])
        put_gradient(grads32, offset, grad_formats[i], rng.standard_normal(n).astype(np.float32))
        offset += n
    return Case(
        kernel,
        random_tensors(kernel, total, rng).reshape(-1),
        total,
        grads32,
        np.array(grad_formats, np.int64),
        pieces,
        np.stack(rows),
        np.full(total, np.nan, np.float32),
    )


def put_gradient(grads32: np.ndarray, offset: int, form: int, values: np.ndarray) -> None:
    if form == F32:
        grads32[offset : offset + values.size] = values
    else:
        words = encode_reference(form, values)
        grads32.view(np.uint16)[2 * offset : 2 * offset + values.size] = words


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    kind = np.uint16 if actual.dtype == np.uint16 else np.uint32
    np.testing.assert_array_equal(actual.view(kind), expected.view(kind))


# --- against the reference of the same signature -------------------------------------------------


@pytest.mark.parametrize("pending", PENDING)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("gradients", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_update_equals_its_reference(
    variant: str, gradients: str, weights: str, pending: str
) -> None:
    count = len(AWKWARD)
    rows = [table_row(variant, PENDING[pending])] * count
    before = make_case(
        variant, AWKWARD, [FORMATS[gradients]] * count, [FORMATS[weights]] * count, rows
    )
    ours, reference = before.copy().run(), before.copy().run_reference()
    assert not np.array_equal(ours.state, before.state)
    # A fused multiply-add rounds once where NumPy rounds twice; all terms are of order one.
    np.testing.assert_allclose(ours.state, reference.state, rtol=4 * EPS32, atol=4 * EPS32)
    for piece, n in enumerate(AWKWARD):
        offset = ours.pieces[piece, P_OFFSET]
        masters = ours.state[offset : offset + n]
        assert_same_bits(ours.words(piece), encode_reference(FORMATS[weights], masters))


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_one_record_keep_to_themselves(variant: str) -> None:
    """Every mixture of formats, hyper-parameters and pending factors in one record."""
    lengths = [5, CHUNK + 1, 64, 1, 4097, 300, 31, CHUNK, 77]
    grad_formats = [g for g in FORMATS.values() for _ in FORMATS]
    weight_formats = [w for _ in FORMATS for w in FORMATS.values()]
    rows = [table_row(variant, (0.5 + i / 8, -0.9 if i % 3 else -np.inf, 0.8)) for i in range(9)]
    before = make_case(variant, lengths, grad_formats, weight_formats, rows)
    together = before.copy().run()
    np.testing.assert_allclose(
        together.state, before.copy().run_reference().state, rtol=4 * EPS32, atol=4 * EPS32
    )
    for i, n in enumerate(lengths):
        alone = before.copy()
        alone.pieces = before.pieces[i : i + 1]
        alone.run()
        offset = before.pieces[i, P_OFFSET]
        own = slice(offset, offset + n)
        assert_same_bits(alone.tensors[:, own].copy(), together.tensors[:, own].copy())
        assert_same_bits(alone.words(0), together.words(i))


@pytest.mark.parametrize("variant", VARIANTS)
def test_inactive_parameters_are_left_alone(variant: str) -> None:
    rows = [table_row(variant) for _ in range(3)]
    rows[1][T_ACTIVE] = 0
    middle = slice(10, CHUNK + 30)
    before = make_case(variant, [10, CHUNK + 20, 20], [BF16, BF16, F32], [BF16, BF16, F32], rows)
    after = before.copy().run()
    assert_same_bits(after.tensors[:, middle].copy(), before.tensors[:, middle].copy())
    assert_same_bits(after.words(1), before.words(1))
    assert (after.tensors[0, :10] != before.tensors[0, :10]).all()
    assert (after.tensors[0, middle.stop :] != before.tensors[0, middle.stop :]).all()


def test_sgd_without_momentum_needs_no_buffer() -> None:
    case = make_case("sgd-plain", [3000], [F32], [F32], [table_row("sgd-plain")])
    with_buffer = case.copy().run()
    case.state = case.state[:3000].copy()
    assert_same_bits(case.run().state, with_buffer.state[:3000])


# --- against torch.optim -------------------------------------------------------------------------

TORCH_CONFIGS: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "eps": 1e-5, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {"lr": 0.03, "betas": (0.0, 0.5), "weight_decay": 0}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
    (
        "adagrad",
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.5, "eps": 1e-3},
    ),
]


@pytest.mark.parametrize(("name", "kind", "options"), TORCH_CONFIGS)
def test_five_steps_follow_torchs_formula(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    n, kernel = CHUNK + 333, OPTIMIZERS[name]
    rng = np.random.default_rng(5)
    start = rng.standard_normal(n).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start).double())
    reference = kind([parameter], **options)
    state = np.zeros((1 + len(kernel.moments), n), np.float32)
    state[0], state[1:] = start, options.get("initial_accumulator_value", 0)
    pieces = np.array([[0, 0, n, 0, 0, 0, F32]], np.int64)
    words = np.zeros(n, np.float32)
    for step in range(1, 6):
        gradient = rng.standard_normal(n).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient).double()
        reference.step()
        own = kernel.row(reference.param_groups[0], step)
        table = np.zeros((1, TABLE_COLUMNS), np.float32)
        table[0, :T_OWN] = 1, 1, -np.inf, np.inf
        table[0, T_OWN : T_OWN + len(own)] = own
        formats = np.array([F32], np.int64)
        kernel.update(
            state.reshape(-1),
            n,
            gradient.view(np.uint16),
            gradient,
            formats,
            pieces,
            table,
            words.view(np.uint16),
            words,
        )
    expected = parameter.detach().numpy()
    assert np.linalg.norm(state[0] - expected) < 1e-6 * np.linalg.norm(expected)
    np.testing.assert_array_equal(words, state[0])
    for moment, own in zip(kernel.moments, state[1:], strict=True):
        theirs = reference.state[parameter].get(moment)
        if theirs is not None:
            theirs = theirs.numpy()
            assert np.linalg.norm(own - theirs) < 1e-6 * np.linalg.norm(theirs)


# --- bit-identical under any cut -----------------------------------------------------------------


def cut_run(whole: Case, form: int, cuts: Sequence[int], paddings: Sequence[int]) -> Case:
    """``whole`` (one piece) done in pieces: each in a record and landing zone of its own."""
    out = whole.copy()
    weights = int(whole.pieces[0, P_FORMAT])
    for begin, end, padding in zip(cuts[:-1], cuts[1:], paddings, strict=True):
        n = end - begin
        length = n + padding
        tensors = np.full((whole.tensors.shape[0], length), 3.0, np.float32)
        tensors[:, padding:] = whole.tensors[:, begin:end]
        zone = np.full(length, 5.0, np.float32)
        if form == F32:
            zone[padding:] = whole.grads32[begin:end]
        else:
            source = whole.grads32.view(np.uint16)[begin:end]
            zone.view(np.uint16)[2 * padding : 2 * padding + n] = source
        part = Case(
            whole.kernel,
            tensors.reshape(-1),
            length,
            zone,
            whole.run_formats,
            np.array([[0, 0, n, padding, 2 * padding, padding, weights]], np.int64),
            whole.table,
            np.full(length, 7.0, np.float32),
        ).run()
        assert (part.tensors[:, :padding] == 3.0).all(), "a piece wrote before its beginning"
        out.tensors[:, begin:end] = part.tensors[:, padding:]
        out.words(0)[begin:end] = part.words(0)
    return out


@st.composite
def cuts_of(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    n = draw(st.one_of(st.integers(1, 300), st.integers(1, 2 * CHUNK + 999)))
    inner = draw(st.lists(st.integers(0, n), max_size=6, unique=True))
    cuts = sorted({0, n, *inner})
    paddings = [draw(st.integers(0, 40)) for _ in cuts[1:]]
    return cuts, paddings


@pytest.mark.parametrize("gradients", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=25, deadline=None)
@given(
    plan=cuts_of(),
    pending=st.sampled_from(sorted(PENDING)),
    weights=st.sampled_from(sorted(FORMATS)),
)
def test_cuts_change_no_bit(
    variant: str, gradients: str, plan: tuple[list[int], list[int]], pending: str, weights: str
) -> None:
    cuts, paddings = plan
    form = FORMATS[gradients]
    row = table_row(variant, PENDING[pending])
    before = make_case(variant, [cuts[-1]], [form], [FORMATS[weights]], [row], seed=cuts[-1])
    whole = before.copy().run()
    parts = cut_run(before, form, cuts, paddings)
    assert_same_bits(parts.state, whole.state)
    assert_same_bits(parts.words(0), whole.words(0))


# --- non-finite values stay visible --------------------------------------------------------------

# Quiet and signalling, both signs; the first two become infinity or zero in a careless rounding.
NAN_BITS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFF8000]


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_no_nan_payload_is_rounded_away(weights: str) -> None:
    source = np.array(NAN_BITS, np.uint32).view(np.float32)
    words = np.zeros(source.size, np.uint16)
    encode(FORMATS[weights], source, words, NO_FLOATS)
    assert np.isnan(decode_reference(FORMATS[weights], words, NO_FLOATS, words.size)).all()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("gradients", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nonfinite_gradients_stay_visible(variant: str, gradients: str, weights: str) -> None:
    for pending in PENDING.values():
        rows = [table_row(variant, pending)]
        n = CHUNK + 100
        case = make_case(variant, [n], [FORMATS[gradients]], [FORMATS[weights]], rows)
        values = np.ones(n, np.float32)
        at = [0, 17, CHUNK - 1, CHUNK, n - 1]
        values[at] = np.nan
        put_gradient(case.grads32, 0, FORMATS[gradients], values)
        case.run()
        masters = case.tensors[0]
        decoded = decode_reference(FORMATS[weights], case.words(0), case.words(0), n)
        for found in (masters, decoded):
            assert np.flatnonzero(~np.isfinite(found)).tolist() == at


@pytest.mark.parametrize("variant", VARIANTS)
def test_infinite_gradients_do_not_pass_for_numbers(variant: str) -> None:
    case = make_case(variant, [100], [F32], [BF16], [table_row(variant)])
    case.grads32[7] = np.inf
    case.run()
    assert np.flatnonzero(~np.isfinite(case.tensors).all(axis=0)).tolist() == [7]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", NAN_BITS)
def test_nan_masters_stay_nan_in_the_words(variant: str, bits: int) -> None:
    for form in FORMATS.values():
        case = make_case(variant, [40], [BF16], [form], [table_row(variant)])
        case.state.view(np.uint32)[11] = bits
        case.run()
        assert np.isnan(case.tensors[0, 11])
        assert np.isnan(decode_reference(form, case.words(0), case.words(0), 40)[11])


# --- denormals -----------------------------------------------------------------------------------


def without_denormals(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_denormals_count_as_zero(variant: str, gradients: str) -> None:
    case = make_case(variant, [5000], [FORMATS[gradients]], [BF16], [table_row(variant)])
    rng = np.random.default_rng(9)
    if variant == "sgd-plain":
        case.state = case.state[:5000].copy()  # it has no moment to touch
    case.state[rng.random(case.state.size) < 0.5] = 1e-40
    gradient = rng.standard_normal(5000).astype(np.float32)
    gradient[rng.random(5000) < 0.5] = -3e-39
    zeroed = case.copy()
    zeroed.state = without_denormals(case.state).astype(np.float32)
    zeroed.grads32 = np.zeros_like(case.grads32)
    put_gradient(case.grads32, 0, FORMATS[gradients], gradient)
    put_gradient(zeroed.grads32, 0, FORMATS[gradients], without_denormals(gradient))
    # Not bit by bit: a flushed negative number is a negative zero.
    np.testing.assert_array_equal(case.run().state, zeroed.run().state)
    np.testing.assert_array_equal(case.words(0) << 1, zeroed.words(0) << 1)
    assert (case.state == without_denormals(case.state)).all(), "a denormal came out"


@pytest.mark.parametrize("variant", VARIANTS)
def test_denormal_fp16_gradients_are_numbers(variant: str) -> None:
    """What fp16 calls denormal is a normal number in fp32, and must count."""
    ours = make_case(variant, [512], [F16], [F16], [table_row(variant)])
    ours.state[:] = 0
    ours.grads32.view(np.uint16)[:512] = np.arange(1, 513)
    wide = ours.copy()
    wide.grads32 = np.arange(1, 513, dtype=np.uint16).view(np.float16).astype(np.float32)
    wide.run_formats = np.array([F32], np.int64)
    assert_same_bits(ours.run().state, wide.run().state)
    assert (ours.tensors[0] != 0).all()


def denormals_work() -> bool:
    tiny = np.full(64, 1e-30, np.float32)
    scale = torch.full((64,), 1e-10)
    return bool((tiny * np.float32(1e-10) > 0).all() and (torch.from_numpy(tiny) * scale > 0).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_processors_mode_is_restored(variant: str) -> None:
    case = make_case(variant, [3000], [BF16], [BF16], [table_row(variant)])
    assert denormals_work()
    case.run()
    assert denormals_work()
    case.table[0, T_ACTIVE] = 0
    case.run()
    assert denormals_work()
    # A user's own choice is kept as well.
    torch.set_flush_denormal(True)
    try:
        case.run()
        assert not denormals_work()
    finally:
        torch.set_flush_denormal(False)
    assert denormals_work()


# --- number formats ------------------------------------------------------------------------------

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_decoding_is_exact_for_all_words(name: str) -> None:
    words = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    ours = np.zeros(65536, np.float32)
    decode(FORMATS[name], words, NO_FLOATS, ours)
    theirs = torch.from_numpy(words.view(np.int16)).view(TORCH_DTYPES[name]).float().numpy()
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    assert_same_bits(ours[~nan], theirs[~nan])
    np.testing.assert_array_equal(
        decode_reference(FORMATS[name], words, NO_FLOATS, 65536), ours, strict=True
    )
    # Words of a format survive the way through fp32.
    back = np.zeros(65536, np.uint16)
    encode(FORMATS[name], ours, back, NO_FLOATS)
    np.testing.assert_array_equal(back[~nan], words[~nan])


def values_to_round() -> tuple[np.ndarray, ...]:
    """Every 16-bit boundary with its neighbours and ties, and random bit patterns."""
    rng = np.random.default_rng(3)
    high = np.arange(65536, dtype=np.uint32) << 16
    near = [high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    about = [np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))]
    edges = np.array([65504, 65519.99, 65520, 65536, 1e30, 3.4e38, np.inf], np.float32)
    positive = np.concatenate([halves, *about, edges])
    random = rng.integers(0, 1 << 32, 300_000, dtype=np.uint32)
    return np.concatenate([*near, random]).view(np.float32), positive, -positive


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_encoding_rounds_as_torch_does(name: str) -> None:
    for values in values_to_round():
        ours = np.zeros(values.size, np.uint16)
        encode(FORMATS[name], values, ours, NO_FLOATS)
        theirs = torch.from_numpy(values).to(TORCH_DTYPES[name])
        nan = np.isnan(values)
        decoded = decode_reference(FORMATS[name], ours, NO_FLOATS, ours.size)
        np.testing.assert_array_equal(np.isnan(decoded), nan)
        words = theirs.view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(ours[~nan], words[~nan])
        reference = encode_reference(FORMATS[name], values)
        np.testing.assert_array_equal(reference[~nan], ours[~nan])


def test_fp32_passes_through_with_all_its_bits() -> None:
    values = np.array([*NAN_BITS, 0x80000000, 1, 0x7F800000], np.uint32).view(np.float32)
    out = np.zeros_like(values)
    encode(F32, values, NO_HALVES, out)
    assert_same_bits(out, values)
    out[:] = 0
    decode(F32, NO_HALVES, values, out)
    assert_same_bits(out, values)


# --- words and masters ---------------------------------------------------------------------------


@pytest.mark.parametrize("weights", FORMATS)
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5000),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merging_replaces_exactly_the_masters_whose_word_differs(
    weights: str, n: int, share: float, seed: int
) -> None:
    form = FORMATS[weights]
    rng = np.random.default_rng(seed)
    masters = rng.standard_normal(n).astype(np.float32)
    special = np.array([0.0, -0.0, np.nan, np.inf, 1e-40, 7e4], np.float32)
    masters[rng.random(n) < 0.1] = rng.choice(special)
    words = encode_reference(form, masters)
    kind = np.uint32 if form == F32 else np.uint16
    edited = rng.random(n) < share
    words.view(kind)[edited] ^= rng.integers(1, 1 << 15, edited.sum()).astype(kind)
    expected = masters.copy()
    expected[edited] = decode_reference(form, words[edited], words[edited], int(edited.sum()))
    source = (NO_HALVES, words) if form == F32 else (words, NO_FLOATS)
    merge_edits(form, masters, *source)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(masters), nan)
    assert_same_bits(masters[~nan], expected[~nan])


def test_a_changed_sign_of_zero_is_an_edit() -> None:
    masters = np.zeros(3, np.float32)
    merge_edits(BF16, masters, np.array([0, 0x8000, 0], np.uint16), NO_FLOATS)
    assert np.signbit(masters).tolist() == [False, True, False]


def test_encode_record_writes_every_piece_in_its_own_format() -> None:
    lengths = [3, 2049, 500]
    forms = [F32, BF16, F16]
    case = make_case("adamw", lengths, [F32] * 3, forms, [table_row("adamw")] * 3)
    args = case.args()
    encode_record(case.state, case.pieces, args[-2], args[-1])
    offset = 0
    for piece, (n, form) in enumerate(zip(lengths, forms, strict=True)):
        expected = encode_reference(form, case.tensors[0, offset : offset + n])
        assert_same_bits(case.words(piece), expected)
        offset += n
