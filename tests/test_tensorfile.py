"""safetensors files by ranges: the same files as the safetensors package's, and damaged ones."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smart_infinity import tensorfile
from smart_infinity.errors import CorruptStateError, UnsupportedError
from smart_infinity.tensorfile import (
    TensorFileReader,
    TensorFileWriter,
    TensorSpec,
    shard,
    shard_names,
)

DTYPES = tensorfile._DTYPES
IN_NUMPY = sorted(name for name in DTYPES if name != "BF16" and not name.startswith("F8"))


def values_of(spec: TensorSpec) -> npt.NDArray[Any]:
    """Arbitrary bits, the same at every call."""
    name, dtype, shape = spec
    rng = np.random.default_rng(len(name))
    if dtype == "BOOL":
        return rng.integers(0, 2, shape).astype("?")
    raw = rng.integers(0, 256, math.prod(shape) * DTYPES[dtype].itemsize, np.uint8)
    return raw.view(DTYPES[dtype]).reshape(shape)


def write(path: Path, tensors: list[TensorSpec], metadata: dict[str, str] | None = None) -> None:
    with TensorFileWriter(str(path), tensors, metadata or {}) as writer:
        for spec in tensors:
            writer.write(spec[0], 0, values_of(spec))


def assert_same(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
tables = st.dictionaries(names, st.tuples(st.sampled_from(IN_NUMPY), shapes), max_size=6).map(
    lambda entries: [(name, dtype, shape) for name, (dtype, shape) in entries.items()]
)
texts = st.dictionaries(names, names, max_size=3)
each_time = [HealthCheck.function_scoped_fixture]


# --- whole files ---------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, suppress_health_check=each_time)
@given(tables, texts, st.data())
def test_ranges_in_any_order_make_the_file_that_the_package_reads(
    tmp_path: Path, tensors: list[TensorSpec], metadata: dict[str, str], data: st.DataObject
) -> None:
    path = tmp_path / "model.safetensors"
    ranges = []
    for spec in tensors:
        flat = values_of(spec).reshape(-1)
        cuts = data.draw(st.lists(st.integers(0, flat.size), max_size=3))
        edges = sorted({0, flat.size, *cuts})
        ranges += [(spec[0], a, flat[a:b]) for a, b in pairwise(edges)]
    with TensorFileWriter(str(path), tensors, metadata) as writer:
        for name, begin, values in data.draw(st.permutations(ranges)):
            writer.write(name, begin, values)
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == {name for name, _, _ in tensors}
    for spec in tensors:
        assert_same(loaded[spec[0]], values_of(spec))
    with safetensors.safe_open(path, "np") as file:
        assert (file.metadata() or {}) == metadata
    with TensorFileReader(str(path)) as reader:
        assert reader.metadata == metadata
        assert reader.tensors == {name: (dtype, shape) for name, dtype, shape in tensors}
        assert list(reader.tensors) == [name for name, _, _ in tensors]


@settings(max_examples=120, deadline=None, suppress_health_check=each_time)
@given(tables, texts, st.data())
def test_files_of_the_package_are_read_by_ranges(
    tmp_path: Path, tensors: list[TensorSpec], metadata: dict[str, str], data: st.DataObject
) -> None:
    path = str(tmp_path / "model.safetensors")
    whole = {spec[0]: values_of(spec) for spec in tensors}
    safetensors.numpy.save_file(whole, path, metadata or None)
    with TensorFileReader(path) as reader:
        assert reader.metadata == metadata
        assert reader.tensors == {name: (dtype, shape) for name, dtype, shape in tensors}
        for name, values in whole.items():
            begin = data.draw(st.integers(0, values.size))
            end = data.draw(st.integers(begin, values.size))
            out = np.empty(end - begin, values.dtype)
            reader.read(name, begin, out)
            assert_same(out, values.reshape(-1)[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_the_one_torch_loads(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    # The odd byte in front puts the tensor where no alignment is.
    tensors: list[TensorSpec] = [("odd", "U8", (1,)), ("a", dtype, (2, 3)), ("b", dtype, ())]
    write(path, tensors)
    loaded = safetensors.torch.load_file(path)
    for spec in tensors:
        tensor = loaded[spec[0]]
        assert tuple(tensor.shape) == spec[2]
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert raw.tobytes() == values_of(spec).tobytes()
    again = tmp_path / "again.safetensors"
    safetensors.torch.save_file(loaded, again)
    with TensorFileReader(str(again)) as reader:
        for name, own, shape in tensors:
            assert reader.tensors[name] == (own, shape)
            out = np.empty(shape, f"<u{DTYPES[own].itemsize}")  # bits are taken for any dtype
            reader.read(name, 0, out)
            assert out.tobytes() == values_of((name, own, shape)).tobytes()


def test_the_data_begin_aligned_and_in_the_given_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, [("z", "U8", (3,)), ("a", "F32", (2,))], {"format": "pt"})
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert list(header) == ["__metadata__", "z", "a"]
    assert header["z"] == {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    assert header["a"]["data_offsets"] == [3, 11]
    assert len(data) == 8 + length + 11


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, [])
    assert safetensors.numpy.load_file(path) == {}
    with TensorFileReader(str(path)) as reader:
        assert (reader.tensors, reader.metadata) == ({}, {})


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def short(fd: int, buffers: list[memoryview], offset: int, real: Any = real) -> int:
            return int(real(fd, [buffers[0][:7]], offset))

        monkeypatch.setattr(tensorfile.os, name, short)
    path = tmp_path / "model.safetensors"
    spec: TensorSpec = ("a", "F64", (5, 5))
    write(path, [spec])
    assert_same(safetensors.numpy.load_file(path)["a"], values_of(spec))
    out = np.empty((5, 5))
    with TensorFileReader(str(path)) as reader:
        reader.read("a", 0, out)
    assert_same(out, values_of(spec))


# --- what is not written -------------------------------------------------------------------------

TWO: list[TensorSpec] = [("a", "F32", (2, 3)), ("b", "BF16", (4,))]


@pytest.mark.parametrize(
    ("writes", "seen"),
    [
        ([], r"2 of 2 tensors .* 'a' with 6 elements missing"),
        ([("a", 0, 6)], r"1 of 2 tensors .* 'b' with 4 elements missing"),
        ([("a", 0, 6), ("b", 1, 3)], r"'b' with 1 elements missing"),
        ([("a", 0, 6), ("b", 0, 4), ("b", 2, 2)], r"'b' with 2 elements written twice"),
    ],
)
def test_missing_elements_are_an_error_and_leave_no_file(
    tmp_path: Path, writes: list[tuple[str, int, int]], seen: str
) -> None:
    path = tmp_path / "model.safetensors"
    writer = TensorFileWriter(str(path), TWO, {})
    for name, start, count in writes:
        writer.write(name, start, np.zeros(count, "f4" if name == "a" else "u2"))
    with pytest.raises(ValueError, match=seen) as caught:
        writer.close()
    assert str(path) in str(caught.value)
    assert not path.exists()
    writer.close()  # again is harmless


def test_tensors_without_elements_need_no_write(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors: list[TensorSpec] = [("a", "F32", (0,)), ("b", "F32", ()), ("c", "BF16", (3, 0))]
    with TensorFileWriter(str(path), tensors, {}) as writer:
        writer.write("b", 0, np.float32([2]))
        writer.write("b", 1, np.empty(0, np.float32))
    assert safetensors.torch.load_file(path)["c"].shape == (3, 0)
    with TensorFileReader(str(path)) as reader:
        reader.read("a", 0, np.empty(0, np.float32))


def test_an_exception_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="no tensor"), TensorFileWriter(str(path), TWO, {}) as own:
        own.write("absent", 0, np.zeros(1))
    assert not path.exists()


def test_the_file_has_its_full_size_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    writer = TensorFileWriter(str(path), TWO, {})
    size = path.stat().st_size
    assert path.stat().st_blocks * 512 >= size
    for spec in TWO:
        writer.write(spec[0], 0, values_of(spec))
    writer.close()
    writer.discard()  # too late to remove it
    assert path.stat().st_size == size


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "fsync"])
def test_a_full_disk_leaves_no_file(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "model.safetensors"
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(tensorfile.os, call, full)
        with pytest.raises(OSError, match="No space") as caught:
            write(path, TWO)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_the_disk_holds_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match=r"space|large"):
        TensorFileWriter(str(path), [("a", "F32", (1 << 58,))], {})
    assert not path.exists()


@pytest.mark.parametrize(
    ("tensors", "metadata", "seen"),
    [
        ([("__metadata__", "F32", ())], {}, "which safetensors reserves"),
        ([("a", "F32", ()), ("a", "F32", (1,))], {}, "'a', which another one is"),
        ([("a", "F4", (2,))], {}, "'F4', whose elements cannot"),
        ([("a", "float32", (2,))], {}, "Expected one of BOOL"),
        ([("\udc80", "F32", (2,))], {}, "no Unicode text"),
        ([], {"key": "\udc80"}, "no Unicode text"),
        ([], {"key": "x" * 100_000_000}, "Split the tensors"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(
    tmp_path: Path, tensors: list[TensorSpec], metadata: dict[str, str], seen: str
) -> None:
    with pytest.raises(UnsupportedError, match=seen):
        TensorFileWriter(str(tmp_path / "model.safetensors"), tensors, metadata)
    assert not any(tmp_path.iterdir())


BAD_RANGES: dict[str, tuple[str, int, npt.NDArray[Any], str]] = {
    "name": ("c", 0, np.zeros(1, "f4"), "no tensor 'c'"),
    "dtype": ("a", 0, np.zeros(1, "f8"), "dtype float64"),
    "integers": ("a", 0, np.zeros(1, "i4"), "dtype int32"),
    "order": ("a", 0, np.zeros(1, ">f4"), "dtype >f4"),
    "strides": ("a", 0, np.zeros((3, 2), "f4").T, "Expected contiguous"),
    "negative": ("a", -1, np.zeros(1, "f4"), "elements -1 to 0"),
    "behind": ("a", 5, np.zeros(2, "f4"), "elements 5 to 7"),
    "far behind": ("a", 9, np.zeros(0, "f4"), "elements 9 to 9"),
}


@pytest.mark.parametrize("case", BAD_RANGES)
def test_ranges_that_are_none_of_the_tensor_are_refused(tmp_path: Path, case: str) -> None:
    name, start, values, seen = BAD_RANGES[case]
    path = tmp_path / "model.safetensors"
    write(path, TWO)
    before = path.read_bytes()
    calls: list[Callable[..., None]] = []
    with TensorFileReader(str(path)) as reader:
        calls.append(reader.read)
        writer = TensorFileWriter(str(tmp_path / "other"), TWO, {})
        calls.append(writer.write)
        for call in calls:
            with pytest.raises(ValueError, match=seen):
                call(name, start, values)
        writer.discard()
    assert path.read_bytes() == before


# --- damaged files -------------------------------------------------------------------------------


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 63),
        struct.pack("<Q", 3) + b"{}",
        file_of(b""),
        file_of(b"{"),
        file_of(b"\xff\xfe{}"),
        file_of(b"[" * 100_000),
        file_of([]),
        file_of({"a": [1]}),
        file_of({"__metadata__": {"a": 1}}),
        file_of({"__metadata__": []}),
        file_of({"a": {"dtype": "U8", "shape": [1]}}, b"1"),
        file_of({"a": entry(0, 1) | {"more": 1}}, b"1"),
        file_of({"a": entry(0, 1, "X8")}, b"1"),
        file_of({"a": entry(0, 1, shape="1")}, b"1"),
        file_of({"a": entry(0, 1, shape=[True])}, b"1"),
        file_of({"a": entry(0, 1, shape=[1.0])}, b"1"),
        file_of({"a": entry(0, 1, shape=[-1, -1])}, b"1"),
        file_of({"a": entry(0, 1, shape=[1] * 100_000)}, b"1"),
        file_of({"a": entry(0, 1, shape=[1 << 70, 0])}, b"1"),
        file_of({"a": entry(0, 1) | {"data_offsets": [0]}}, b"1"),
        file_of({"a": entry(0, 1) | {"data_offsets": [0, "1"]}}, b"1"),
        file_of({"a": entry(0, 1) | {"data_offsets": None}}, b"1"),
        file_of({"a": entry(0, 4, "F32", [2])}, b"1234"),  # size
        file_of({"a": entry(4, 0, "U8", [0])}, b"1234"),
        file_of({"a": entry(0, 4)}, b"123"),  # cut
        file_of({"a": entry(0, 4)}, b"12345"),  # surplus
        file_of({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"),  # overlap
        file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"),  # the same
        file_of({"a": entry(0, 2), "b": entry(3, 6)}, b"123456"),  # gap
        file_of({"a": entry(1, 3)}, b"123"),  # gap at the start
        file_of(b'{"a":' + json.dumps(entry(0, 0)).encode() + b',"a":{}}'),  # twice
    ],
)
def test_damaged_headers_are_refused_by_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptStateError, match="is no whole safetensors file") as caught:
        TensorFileReader(str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(os.listdir("/proc/self/fd")) == before


def test_elements_of_less_than_a_byte_are_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"a": entry(0, 1, "F4", [2])}, b"1"))
    with pytest.raises(UnsupportedError, match=r"model\.safetensors: .*'F4'"):
        TensorFileReader(str(path))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TensorFileReader(str(tmp_path / "absent"))


def test_a_file_that_is_cut_while_open_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, TWO)
    with TensorFileReader(str(path)) as reader:
        os.truncate(path, path.stat().st_size - 3)
        with pytest.raises(CorruptStateError, match="it ends before byte"):
            reader.read("b", 0, np.empty(4, np.uint16))
        reader.read("a", 0, np.empty(6, np.float32))


@settings(max_examples=400, deadline=None, suppress_health_check=each_time)
@given(st.integers(0, 1 << 20), st.integers(0, 255), st.integers(0, 30), st.booleans())
def test_flips_and_cuts_give_a_file_or_one_error(
    tmp_path: Path, at: int, byte: int, cut: int, end: bool
) -> None:
    path = tmp_path / "model.safetensors"
    write(path, TWO, {"format": "pt"})
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at] = byte
    if end:
        del data[len(data) - cut :]
    else:
        del data[at : at + cut]
    path.write_bytes(data)
    with contextlib.suppress(CorruptStateError), TensorFileReader(str(path)) as reader:
        for name, (dtype, shape) in reader.tensors.items():
            reader.read(name, 0, np.empty(shape, DTYPES[dtype]))
        path.unlink()


# --- shards --------------------------------------------------------------------------------------


def test_shards_are_cut_greedily_and_in_order() -> None:
    sizes = {"a": 3, "b": 3, "c": 4, "huge": 30, "d": 1, "e": 0, "f": 9, "g": 1}
    tensors: list[TensorSpec] = [(name, "U8", (size,)) for name, size in sizes.items()]
    cut = [[name for name, _, _ in own] for own in shard(tensors, 10)]
    assert cut == [["a", "b", "c"], ["huge"], ["d", "e", "f"], ["g"]]
    assert [len(own) for own in shard(tensors, 1000)] == [8]
    assert shard([], 10) == []


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(1, 30))
def test_shards_hold_everything_and_no_more_than_the_limit(sizes: list[int], limit: int) -> None:
    tensors: list[TensorSpec] = [(str(i), "F16", (size,)) for i, size in enumerate(sizes)]
    shards = shard(tensors, limit)
    assert [spec for own in shards for spec in own] == tensors
    for own in shards:
        nbytes = [2 * math.prod(shape) for _, _, shape in own]
        assert sum(nbytes) <= limit or max(nbytes) == sum(nbytes)
        assert own


def test_shard_names_are_those_of_hugging_face() -> None:
    assert shard_names("model", 1) == ["model.safetensors"]
    assert shard_names("model", 3) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]
    assert shard_names("model", 0) == []
