"""Plain data to bytes and back: types and bits are kept, code is neither kept nor run."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import random
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

import processes
from smart_infinity.errors import CorruptStateError, UnsupportedError
from smart_infinity.plain import MAX_DEPTH, decode, encode

PAIRED = (dict, OrderedDict, Counter, defaultdict)


def bits(value: Any) -> Any:
    """A form in which equal means the same types and the same bits, all the way down."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, PAIRED):
        factory = value.default_factory if kind is defaultdict else None
        return kind, factory, [(bits(key), bits(own)) for key, own in value.items()]
    if kind in (set, frozenset):
        return kind, sorted(map(repr, map(bits, value)))
    if isinstance(value, list | tuple | deque):  # torch.Size is a tuple
        return kind, getattr(value, "maxlen", None), [bits(own) for own in value]
    if isinstance(value, torch.Tensor):
        tensor = value.detach().resolve_conj().resolve_neg()
        if tensor.dtype.itemsize == 1:
            tensor = tensor.view(torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex32
            raw = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return kind, value.dtype, value.shape, value.device, raw.numpy().tobytes()
    if kind is np.str_ or kind is np.bytes_:
        return kind, list(value)  # whose other methods overlook trailing zeros
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype, value.dtype.char, value.shape, value.tobytes()
    return kind, value


def round_trip(value: Any) -> Any:
    data = encode(value, "a value")
    assert len(data) % 8 == 0
    decoded = decode(memoryview(data))
    assert bits(decoded) == bits(value)
    return decoded


# --- round trips ---------------------------------------------------------------------------------

DTYPES = sorted({own for own in vars(torch).values() if isinstance(own, torch.dtype)}, key=str)
DENSE_DTYPES = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list((data or b"\0") * (nbytes + 1))[:nbytes], dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


any_text = st.text(st.characters(), max_size=6)  # with lone surrogates
array_dtypes = st.one_of(
    st_numpy.scalar_dtypes(),
    st.sampled_from([np.dtype(name) for name in ("q", ">Q", "S3", "<U2", ">U1", ">M8[25s]")]),
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
tensors = st.builds(tensor_of, st.sampled_from(DENSE_DTYPES), shapes, st.binary(max_size=9))
hashable_atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers().map(lambda number: number << 2000),
    st.floats(),
    st.complex_numbers(),
    any_text,
    st.binary(max_size=9),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    shapes.map(torch.Size),
    any_text.map(np.str_),
    st.binary(max_size=9).map(np.bytes_),
    st_numpy.from_dtype(np.dtype("f8")),
    st.sampled_from([np.longlong(3), np.int64(3), np.bool_(True), np.float16(2), np.longdouble(2)]),
    st.sampled_from([np.datetime64("2026-01-02"), np.timedelta64(5, "s"), np.datetime64("nat")]),
)
atoms = st.one_of(
    hashable_atoms, tensors, array_dtypes.flatmap(lambda dtype: st_numpy.arrays(dtype, shapes))
)
keys = st.recursive(hashable_atoms, lambda own: st.lists(own, max_size=3).map(tuple), max_leaves=4)
FACTORIES = [None, int, float, list, dict, set, str]


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(values, max_size=4)
    dicts = st.dictionaries(keys, values, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        lists.map(lambda own: deque(own, 5)),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(Counter),
        st.builds(defaultdict, st.sampled_from(FACTORIES), dicts),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.lists(st.integers(), max_size=9),  # all of one type
        st.lists(st.floats(), max_size=9).map(tuple),
        st.lists(any_text, max_size=9),
    )


values = st.recursive(atoms, containers, max_leaves=12)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(values)
def test_every_plain_value_comes_back_as_it_was(value: Any) -> None:
    round_trip(value)


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape, bytes(range(7)))
    decoded = round_trip(tensor)
    assert decoded.is_contiguous()
    assert not decoded._is_view()
    round_trip({"a": tensor.permute(tuple(reversed(range(tensor.dim())))), "b": tensor[..., None]})


def test_tensors_that_are_not_as_they_look() -> None:
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    assert not round_trip([leaf * 2, leaf])[0].requires_grad
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    expanded = torch.tensor([1.5, -0.0]).expand(3, 2)
    for tensor in (numbers.conj(), numbers.conj().imag, leaf[:, ::2], leaf.T[1:], expanded):
        round_trip(tensor)
    with torch.device("meta"):
        data = encode(torch.ones(3, device="cpu"), "a tensor")
        assert decode(data).device == torch.device("cpu")


def test_decoded_arrays_and_tensors_are_the_callers_own() -> None:
    tensor = torch.arange(3)
    data = encode({"a": np.arange(3), "t": tensor}, "a value")
    decoded = decode(data)
    decoded["a"] += 1
    decoded["t"].add_(1).resize_(9)
    tensor.resize_(9)  # nor did the encoder pin it
    assert decode(data)["a"].tolist() == [0, 1, 2]
    assert decode(data)["t"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        0x7FF4_0000_0000_0001,  # a signalling NaN
        0xFFF8_0000_0000_00FF,
        0x8000_0000_0000_0000,
        1,
    ],
)
def test_floats_keep_their_bits(value: int) -> None:
    (number,) = struct.unpack("<d", struct.pack("<Q", value))
    round_trip([number, (number, number), complex(number, -number), np.float64(number)])


def test_what_looks_alike_stays_apart() -> None:
    round_trip([True, 1, 1.0, np.True_, np.int64(1), np.longlong(1), np.float64(1), np.float32(1)])
    round_trip(["a", b"a", np.str_("a"), np.bytes_(b"a\0\0"), np.bytes_(b""), np.str_("a\0")])
    round_trip(["\ud83d\ude00", "\U0001f600", "\udc80", "\0\n\"\\'"])
    round_trip([torch.Size([2]), (2,), [2], {"list": [2]}, {"tuple": [2]}, {}, (), [], set()])
    round_trip([10**5000, -(10**5000), [10**5000], 2**64, True])
    round_trip(np.arange(6, dtype=">i4").reshape(2, 3).T)
    round_trip([np.array([b"a\0b", b"", b"\0"], "S3"), np.array([b"a\0b", b""], "V3")])
    round_trip([np.void(b"abc"), np.array("2026", "M8[Y]"), np.array(["a", ""]), np.zeros((0, 3))])


# --- what there is to save -----------------------------------------------------------------------


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.2)]
    return torch.optim.SGD(groups, momentum=0.9)


class Decay:
    """A callable with a state, as LambdaLR saves it."""

    def __init__(self) -> None:
        self.rate = 0.5

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


lrs = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda own: lrs.StepLR(own, 2),
    "MultiStepLR": lambda own: lrs.MultiStepLR(own, [1, 1, 3]),
    "LambdaLR": lambda own: lrs.LambdaLR(own, [lambda epoch: 0.9**epoch, Decay()]),
    "MultiplicativeLR": lambda own: lrs.MultiplicativeLR(own, lambda epoch: 0.9),
    "ConstantLR": lambda own: lrs.ConstantLR(own),
    "LinearLR": lambda own: lrs.LinearLR(own),
    "ExponentialLR": lambda own: lrs.ExponentialLR(own, 0.9),
    "PolynomialLR": lambda own: lrs.PolynomialLR(own),
    "CosineAnnealingLR": lambda own: lrs.CosineAnnealingLR(own, 5),
    "CosineAnnealingWarmRestarts": lambda own: lrs.CosineAnnealingWarmRestarts(own, 2),
    "OneCycleLR": lambda own: lrs.OneCycleLR(own, 0.3, 12),
    "CyclicLR": lambda own: lrs.CyclicLR(own, 0.1, 0.2),
    "ReduceLROnPlateau": lambda own: lrs.ReduceLROnPlateau(own),
    "SequentialLR": lambda own: lrs.SequentialLR(
        own, [lrs.LinearLR(own), lrs.MultiStepLR(own, [1])], [2]
    ),
    "ChainedScheduler": lambda own: lrs.ChainedScheduler(
        [lrs.ConstantLR(own), lrs.ExponentialLR(own, 0.9)]
    ),
    "SWALR": lambda own: torch.optim.swa_utils.SWALR(own, 0.05),
}


def advance(scheduler: Any, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        scheduler.optimizer.step()
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0 + step % 3)
        else:
            scheduler.step()
        rates += [group["lr"] for group in scheduler.optimizer.param_groups]
    return rates


def test_no_scheduler_of_torch_is_left_out() -> None:
    theirs = {name for name in lrs.__all__ if name != "LRScheduler"}
    assert theirs <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_if_never_saved(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls step() in a way torch warns of
        scheduler = SCHEDULERS[name](optimizer())
        advance(scheduler, 4)
        state = round_trip(scheduler.state_dict())
        optimizer_state = round_trip(scheduler.optimizer.state_dict())
        other = SCHEDULERS[name](optimizer())
        other.load_state_dict(state)
        other.optimizer.load_state_dict(optimizer_state)
        assert advance(other, 6) == advance(scheduler, 6)


def test_random_states_go_on_as_if_never_saved() -> None:
    python = random.Random(3)
    generators = [
        np.random.default_rng(3),
        *(
            np.random.Generator(kind(3))
            for kind in (np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM)
        ),
    ]
    legacy = np.random.RandomState(3)
    generator = torch.Generator().manual_seed(3)
    python.gauss(0, 1)
    legacy.normal()
    torch.rand(5, generator=generator)
    state = {
        "python": python.getstate(),
        "numpy": [own.bit_generator.state for own in generators],
        "legacy": [legacy.get_state(), legacy.get_state(legacy=False)],
        "torch": generator.get_state(),
    }
    decoded = round_trip(state)
    again = random.Random()
    again.setstate(decoded["python"])
    assert [again.gauss(0, 1) for _ in range(3)] == [python.gauss(0, 1) for _ in range(3)]
    for own, saved in zip(generators, decoded["numpy"], strict=True):
        expected = own.random(4).tolist()
        own.bit_generator.state = saved
        assert own.random(4).tolist() == expected
    expected = legacy.normal(size=4).tolist()
    for saved in decoded["legacy"]:
        legacy.set_state(saved)
        assert legacy.normal(size=4).tolist() == expected
    rows = torch.rand(5, generator=generator)
    assert torch.equal(rows, torch.rand(5, generator=torch.Generator().set_state(decoded["torch"])))


def test_other_states_of_torch() -> None:
    round_trip(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    round_trip(torch.nn.BatchNorm1d(3).state_dict())
    round_trip(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict())


# --- refusals ------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    HIGH = 1


class Named(dict[str, int]):
    pass


class Text(str):
    pass


class Double(np.float64):
    pass


class Special(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "path", "seen"),
    [
        (print, "", "type builtins.builtin_function_or_method"),
        ({"a": [1, 2, 3, print]}, r"['a'][3]", "builtin_function_or_method"),
        ({"a": {7: (1, Point(1, 2))}}, r"['a'][7][1]", "test_plain.Point"),
        ([Level.HIGH], "[0]", "test_plain.Level"),
        ([Named(a=1)], "[0]", "test_plain.Named"),
        ([Text("a")], "[0]", "test_plain.Text"),
        ([1.0, Double(1)], "[1]", "test_plain.Double"),
        (deque([1, object()]), "[1]", "builtins.object"),
        ({(1, Level.HIGH): 2}, "key (1, <Level.HIGH: 1>)[1]", "Level"),
        ([{1, Level(1), "b"} - {1} | {Level.HIGH}], "[0] element", "Level"),
        ({torch.ones(1): 2}, "key tensor", "known by its identity"),
        ({"x": Counter({"n": 1j, "m": bytearray()})}, "['x']['m']", "bytearray"),
        ([defaultdict(lambda: 3)], "[0]", "defaultdict whose factory"),
        ([np.array([None])], "[0]", "NumPy array of dtype object"),
        ([np.zeros(2, "i4,f8")], "[0]", "NumPy array of dtype"),
        ([np.zeros(2, "i4,f8")[0]], "[0]", "numpy.void"),
        ([np.ma.masked_array([1])], "[0]", "MaskedArray"),
        ([np.dtype("f4")], "[0]", "numpy.dtypes"),
        ([torch.ones(2).to_sparse()], "[0]", "torch.sparse_coo"),
        ([torch.ones(2, device="meta")], "[0]", "device meta"),
        ([torch.nn.Parameter(torch.ones(2))], "[0]", "torch.nn.parameter.Parameter"),
        ([torch.ones(2).as_subclass(Special)], "[0]", "test_plain.Special"),
        ([torch.nn.Linear(1, 1)], "[0]", "torch.nn.modules.linear.Linear"),
        ([range(3)], "[0]", "builtins.range"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_path(value: Any, path: str, seen: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        encode(value, "the state_dict of StepLR (registered object 0)")
    message = str(caught.value)
    assert message.startswith("the state_dict of StepLR (registered object 0) holds a ")
    assert f" at {path}" in message if path else " at " not in message
    assert seen in message
    assert "state_dict() must return tensors, arrays, numbers, strings and containers" in message


def test_cycles_and_depths_are_refused() -> None:
    cycle: list[Any] = [1]
    cycle.append({"a": (cycle,)})
    with pytest.raises(UnsupportedError, match=r"a list that contains itself at \[1\]\['a'\]\[0\]"):
        encode(cycle, "x")
    table: dict[str, Any] = {}
    table["self"] = table
    with pytest.raises(UnsupportedError, match="a dict that contains itself"):
        encode(table, "x")
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    round_trip(deep)
    with pytest.raises(UnsupportedError, match="nested more than 100 deep"):
        encode([deep], "x")
    twice = [1.5]
    assert decode(encode([twice, twice], "x")) == [twice, twice]  # no cycle


# --- hostile bytes -------------------------------------------------------------------------------

SAMPLE = {
    "a": [
        1,
        2.5,
        None,
        True,
        "text",
        b"bytes",
        10**3000,
        math.nan,
        1j,
        (1, 2),
        {3},
        frozenset("4"),
    ],
    "d": [deque([1], 3), Counter("aab"), OrderedDict(a=1), defaultdict(list, {1: [2]})],
    "n": [np.arange(5), np.array(2.5), np.float32(2), np.str_("s"), np.datetime64("2026-01-01")],
    "t": [torch.arange(4), torch.ones(2, dtype=torch.bfloat16), torch.float16, torch.Size([1, 2])],
    "e": torch.device("cuda:1"),
}
GOOD = encode(SAMPLE, "the sample")


def decode_or_refuse(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CorruptStateError):
            decode(data)


edits = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, len(GOOD) - 1), st.integers(0, 255)),
        st.tuples(st.just("cut"), st.integers(0, len(GOOD)), st.integers(0, 40)),
        st.tuples(st.just("double"), st.integers(0, len(GOOD)), st.integers(0, 40)),
        st.tuples(st.just("digit"), st.integers(0, len(GOOD) - 1), st.sampled_from(b"0123456789-")),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=600, deadline=None)
@given(edits)
def test_damaged_bytes_give_a_value_or_one_error(changes: list[tuple[str, int, int]]) -> None:
    data = bytearray(GOOD)
    for kind, at, what in changes:
        at = min(at, len(data))
        if kind == "set" or (kind == "digit" and data[at : at + 1].isdigit()):
            data[at : at + 1] = bytes([what])
        elif kind == "cut":
            del data[at : at + what]
        elif kind == "double":
            data[at:at] = data[at : at + what]
    decode_or_refuse(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_give_a_value_or_one_error(data: bytes) -> None:
    decode_or_refuse(data)
    text = data + b" " * (-len(data) % 8)
    decode_or_refuse(struct.pack("<Q", len(text)) + text)


def with_text(text: str, attachments: bytes = b"") -> bytes:
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + attachments


TAGS = [
    *("int", "float", "complex", "bytes", "tuple", "dict", "set", "frozenset", "OrderedDict"),
    *("Counter", "defaultdict", "deque", "array", "scalar", "str_", "bytes_", "tensor", "Size"),
    *("dtype", "device", "eval"),
]
NAMES = [
    "<f8",
    "float32",
    "|O",
    "O",
    "qint8",
    "f8,f8",
    "<M8[ns]",
    "list",
    "cpu",
    "Tensor",
    "ff",
    "",
]
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(),
        st.sampled_from(NAMES),
        st.sampled_from([0, 1, 2, 8, 16, -1, 2**40, 2**70]),
    ),
    lambda own: st.one_of(
        st.lists(own, max_size=4),
        st.dictionaries(st.sampled_from(TAGS), own, min_size=1, max_size=1),
        # The right number of parts, of any kind.
        st.lists(own, min_size=4, max_size=4).map(lambda parts: {"tensor": parts}),
        st.tuples(st.sampled_from(NAMES), st.lists(st.sampled_from([0, 1, 2**62]), max_size=3)).map(
            lambda parts: {"array": [*parts, 0, 0]}
        ),
        st.tuples(st.sampled_from(NAMES), st.lists(st.sampled_from([0, 1, 2**62]), max_size=3)).map(
            lambda parts: {"tensor": [*parts, 0, 0]}
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(json_values, st.sampled_from([0, 8, 16]))
def test_texts_of_the_right_form_give_a_value_or_one_error(content: Any, nbytes: int) -> None:
    decode_or_refuse(with_text(json.dumps(content), bytes(nbytes)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 8) + b"1",
        with_text("1", b"surplus!"),
        with_text("NaN"),
        with_text("[" * 100_000),
        with_text('{"tuple":[' * 50_000),
        with_text("9" * 10_000),
        with_text('{"tuple": [1], "list": []}'),
        with_text('{"tuple": {"bytes": [0, 0]}}'),
        with_text('{"__reduce__": ["os.system", "true"]}'),
        with_text('{"set": [[1]]}'),
        with_text('{"dict": [[1, 2], [3]]}'),
        with_text('{"deque": [1, [1, 2], 3]}'),
        with_text('{"defaultdict": ["eval", [], []]}'),
        with_text('{"array": ["|O", [1], 0, 8]}', bytes(8)),
        with_text('{"array": ["<f8", [4611686018427387904], 0, 8]}', bytes(8)),
        with_text('{"array": ["<f8", [-1, -1], 0, 8]}', bytes(8)),
        with_text('{"array": ["|S9000000000000", [1], 0, 9000000000000]}', bytes(8)),
        with_text('{"tensor": ["uint8", [9000000000000], 0, 9000000000000]}', bytes(8)),
        with_text('{"tensor": ["float32", [3], 0, 8]}', bytes(8)),
        with_text('{"tensor": ["_dynamo", [2], 0, 8]}', bytes(8)),
        with_text('[{"bytes": [0, 8]}, {"bytes": [0, 8]}]', bytes(8)),  # one attachment twice
        with_text('{"device": "nowhere:0"}'),
        with_text('{"Size": ["a"]}'),
        with_text('{"float": "00"}'),
        with_text('{"scalar": ["<f8", "00"]}'),
        with_text('{"scalar": ["<f8", ""]}'),
    ],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptStateError, match="cannot be decoded"):
        decode(data)


# --- without torch -------------------------------------------------------------------------------


def test_data_without_tensors_never_imports_torch() -> None:
    out = processes.run(
        """
import random
import numpy as np
from smart_infinity.plain import decode, encode
state = {"a": [1, 2.5, (3,)], "python": random.getstate(), "numpy": np.random.get_state()}
decoded = decode(encode(state, "a state"))
assert decoded["python"] == state["python"]
print("torch" in sys.modules)
"""
    )
    assert out == "False\n"


def test_it_can_be_imported_where_torch_is_not_installed() -> None:
    processes.run(
        """
sys.modules["torch"] = None  # importing it raises
from smart_infinity.plain import decode, encode
assert decode(encode({1: b"2"}, "a dict")) == {1: b"2"}
"""
    )


@pytest.fixture(autouse=True)
def _no_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is decoded in this file, nothing is evaluated or unpickled."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("code was run")

    with monkeypatch.context() as patch:
        for name in ("pickle.loads", "pickle.load", "torch.load"):
            patch.setattr(name, fail)
        yield
