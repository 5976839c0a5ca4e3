"""safetensors files in constant memory: whole files sized first, then flat ranges of elements.

The safetensors package writes whole tensors from memory only; here a tensor may be larger than
memory. A file is the length of its header (8 bytes, little-endian), the header in JSON, padded
with spaces to 8 bytes, and the tensors' bytes one behind the other, in the order of the header.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from smart_infinity.errors import CorruptStateError, UnsupportedError

TensorSpec = tuple[str, str, tuple[int, ...]]  # name, dtype as safetensors names it, shape

# By dtype: the NumPy type of its elements; unsigned integers stand for those that NumPy lacks.
_DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E4M3FNUZ": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E5M2FNUZ": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
_PACKED = {"F4", "F6_E2M3", "F6_E3M2"}  # whose elements are no whole bytes
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors package reads
_MAX_BYTES = 1 << 62
_MAX_DIMENSIONS = 64  # as in NumPy


def shard(tensors: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Split ``tensors`` in order; one that is larger than the limit gets a shard of its own."""
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in tensors:
        nbytes = _nbytes(spec)
        if not shards or filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += nbytes
    return shards


def shard_names(stem: str, count: int) -> list[str]:
    """The file names that Hugging Face gives to ``count`` shards."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


class TensorFileWriter:
    """Makes a file of ``tensors``, whose elements are then written in any order.

    As a context manager, it closes the file at the end and removes it after an exception. A file
    of that name is overwritten from the start: write beside it and rename, where it matters. One
    thread at a time.

    Raises:
        UnsupportedError: a name or a dtype that a safetensors file cannot hold.
        OSError: the file cannot be made at its full size; none is left.
    """

    def __init__(
        self, path: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        header, begins = _plan(path, tensors, metadata)
        self._begins = {name: len(header) + begin for name, begin in begins.items()}
        self._specs = {spec[0]: spec for spec in tensors}
        self._missing = {name: math.prod(shape) for name, _, shape in tensors}
        nbytes = len(header) + sum(map(_nbytes, tensors))
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
            self._write(memoryview(header), 0)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, start: int, values: npt.NDArray[Any]) -> None:
        """Write ``values`` from flat element ``start`` of a tensor on."""
        data = _range(self._specs, name, start, values)
        self._write(data, self._begins[name] + start * values.itemsize)
        self._missing[name] -= values.size

    def close(self) -> None:
        """Make the file durable. Raises `ValueError`, and removes it, if elements are missing."""
        if self._fd < 0:
            return
        wrong = {name: count for name, count in self._missing.items() if count}
        if wrong:
            self.discard()
            name, count = next(iter(wrong.items()))
            seen = f"{abs(count)} elements {'missing' if count > 0 else 'written twice'}"
            raise ValueError(
                f"{self.path}: {len(wrong)} of {len(self._missing)} tensors are not complete, "
                f"first {name!r} with {seen}. Expected every element to be written once; "
                "the file was removed"
            )
        try:
            os.fsync(self._fd)
        except BaseException:
            self.discard()
            raise
        fd, self._fd = self._fd, -1
        os.close(fd)

    def discard(self) -> None:
        """Close and remove the file, unless it is closed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _write(self, data: memoryview, offset: int) -> None:
        if not _transfer(os.pwritev, self._fd, data, offset):
            raise OSError(errno.EIO, "nothing was written", self.path)


class TensorFileReader:
    """Reads flat ranges of the tensors of a file.

    Attributes:
        tensors: (dtype, shape) by name, in the order of the header.
        metadata: the file's own strings.

    Raises:
        CorruptStateError: the file is cut or its header is wrong.
        UnsupportedError: the elements of a tensor are no whole bytes.
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` from flat element ``start`` of a tensor on."""
        data = _range(self._specs, name, start, out)
        self._read(data, self._begins[name] + start * out.itemsize)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, data: memoryview, offset: int) -> None:
        if not _transfer(os.preadv, self._fd, data, offset):
            raise self._corrupt(f"it ends before byte {offset + len(data)}")

    def _read_header(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < _LENGTH.size:
            raise self._corrupt(f"it has {size} bytes and no header")
        head = bytearray(_LENGTH.size)
        self._read(memoryview(head), 0)
        (length,) = _LENGTH.unpack(head)
        if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
            raise self._corrupt(f"it has {size} bytes, but its header claims {length}")
        text = bytearray(length)
        self._read(memoryview(text), _LENGTH.size)
        try:
            header = json.loads(text.decode(), object_pairs_hook=_unique)
            self.metadata = _checked_metadata(header)
            ranges = {name: _checked_tensor(name, entry) for name, entry in header.items()}
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.path}: {error}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise self._corrupt(f"its header is wrong ({error})") from error
        self._specs = {name: spec for name, (spec, _, _) in ranges.items()}
        self.tensors = {name: (dtype, shape) for name, dtype, shape in self._specs.values()}
        base = _LENGTH.size + length
        self._begins = {name: base + begin for name, (_, begin, _) in ranges.items()}
        end = 0
        for (name, _, _), begin, own_end in sorted(ranges.values(), key=lambda own: own[1:]):
            if begin != end:
                raise self._corrupt(f"tensor {name!r} begins at byte {begin} and not at {end}")
            end = own_end
        if base + end != size:
            raise self._corrupt(f"it has {size} bytes, but its tensors end at {base + end}")

    def _corrupt(self, seen: str) -> CorruptStateError:
        return CorruptStateError(
            f"{self.path} is no whole safetensors file: {seen}. Expected a header whose tensors "
            "fill the file without gaps; fetch or write the file again"
        )


def _nbytes(spec: TensorSpec) -> int:
    name, dtype, shape = spec
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"tensor {name!r} has the dtype {dtype!r}, whose elements cannot be read or written "
            f"one by one. Expected one of {', '.join(_DTYPES)}"
        )
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _plan(
    path: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and where in the data each tensor begins."""
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for spec in tensors:
        name, dtype, shape = spec
        if name == _METADATA or name in begins:
            raise UnsupportedError(
                f"{path}: a tensor cannot be named {name!r}, "
                f"{'which another one is' if name in begins else 'which safetensors reserves'}. "
                "Expected names that differ; rename the tensor"
            )
        begins[name] = end
        end += _nbytes(spec)
        offsets = [begins[name], end]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"{path}: the name or metadata {error.object[error.start - 20 : error.end]!r} is no "
            "Unicode text. Expected names without lone surrogates; rename the tensor"
        ) from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{path}: the header takes {len(text)} bytes, and readers accept "
            f"{_MAX_HEADER_BYTES}. Split the tensors over more files"
        )
    return _LENGTH.pack(len(text)) + text, begins


def _range(
    specs: Mapping[str, TensorSpec], name: str, start: int, values: npt.NDArray[Any]
) -> memoryview:
    """The bytes of ``values``, if they can be elements of the tensor from ``start`` on."""
    if name not in specs:
        raise ValueError(f"there is no tensor {name!r}. Expected one of the file's {len(specs)}")
    _, dtype, shape = specs[name]
    expected = _DTYPES[dtype]
    bits = np.dtype(f"<u{expected.itemsize}")
    if values.dtype not in (expected, bits) or not values.flags.c_contiguous:
        raise ValueError(
            f"tensor {name!r}: values of dtype {values.dtype} with strides {values.strides}. "
            f"Expected contiguous ones of {expected}, or of {bits} for their bits"
        )
    numel = math.prod(shape)
    if not 0 <= start <= start + values.size <= numel:
        raise ValueError(
            f"tensor {name!r}: elements {start} to {start + values.size}. Expected a range of its "
            f"{numel} elements"
        )
    return values.reshape(-1).view(np.uint8).data


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, data: memoryview, offset: int
) -> bool:
    """Read or write all of ``data``, which the system may do in parts; False at the file's end."""
    while data:
        done = call(fd, [data], offset)
        if not done:
            return False
        data = data[done:]
        offset += done
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _checked_metadata(header: Any) -> dict[str, str]:
    """Taken out of the header."""
    if type(header) is not dict:
        raise TypeError("it is no JSON object")
    metadata = header.pop(_METADATA, {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise TypeError(f"{_METADATA} is no table of strings")
    return metadata


def _checked_tensor(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """The tensor and the range of its bytes in the data."""
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise TypeError(f"the entry of tensor {name!r} is not dtype, shape and data_offsets")
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in _DTYPES.keys() | _PACKED:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if (
        type(shape) is not list
        or len(shape) > _MAX_DIMENSIONS
        or any(type(own) is not int or not 0 <= own <= _MAX_BYTES for own in [*shape, begin, end])
    ):
        raise ValueError(f"the shape or the range of tensor {name!r} holds no sizes")
    nbytes = _nbytes((name, dtype, tuple(shape)))
    if end - begin != nbytes:
        raise ValueError(f"tensor {name!r} of {nbytes} bytes lies in bytes {begin} to {end}")
    return (name, dtype, tuple(shape)), begin, end
