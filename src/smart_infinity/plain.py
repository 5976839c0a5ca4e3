"""Plain data to bytes and back without pickle: decoding builds values and never runs code.

For what the host commits with a step: states of schedulers and samplers, random states, buffers.

The bytes are the length of a JSON text (8 bytes, little-endian), the text, padded with spaces to
8 bytes, and raw attachments, each padded to 8 bytes, in the order in which the text names them.
In the text, None, bool, int, finite float, str and list stand for themselves; everything else is
an object of one key, its tag: ``{"tuple": [1, 2]}``, ``{"dict": [[keys], [values]]}``,
``{"array": [dtype, shape, offset, length]}``. Types and bits come back as they were; that two
places held the same object does not.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from smart_infinity.errors import CorruptStateError, UnsupportedError

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 100

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_ALIGNMENT = 8
_AS_IS = {str, bool, type(None)}
# Python refuses to read or write decimal numbers of many digits; larger ones are in hexadecimal.
_INT_LIMIT = 1 << 2000
_FACTORIES: dict[str, type | None] = {"int": int, "float": float, "list": list}
_FACTORIES |= {"dict": dict, "set": set, "str": str, "": None}
# NumPy's names of the types that are bytes without a structure; "q" and "Q" are (u)long long,
# which is another type than int64 and prints like it.
_DTYPE = re.compile(r"[<>|](?:[biufcSUMmV][1-9][0-9]*(?:\[[0-9A-Za-z]+\])?|[qQ])")
_DEVICE = re.compile(r"[a-z0-9_]+(?::[0-9]{1,5})?")
# What the parts of the decoder and NumPy and torch raise when they are given nonsense.
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RuntimeError, struct.error)

_names = reprlib.Repr()
_names.maxstring = _names.maxother = 120  # of parameters and buffers, which are long

_D = TypeVar("_D", np.dtype[Any], "torch.dtype")


def encode(value: object, what: str) -> bytes:
    """The bytes of ``value``; ``what`` names it in messages.

    Raises:
        UnsupportedError: it holds something that is not plain data.
    """
    encoder = _Encoder()
    try:
        packed = encoder.pack(value)
    except _RefusedError as refused:
        path = "".join(reversed(refused.path))
        where = f" at {path.strip()}" if path else ""
        raise UnsupportedError(
            f"{what} holds {refused.seen}{where}, which cannot be saved with a step. Expected "
            "plain data: state_dict() must return tensors, arrays, numbers, strings and "
            "containers of them"
        ) from None
    # Lone surrogates pass as they are: escaped, two of them would come back as one character.
    text = _JSON.encode(packed).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([_LENGTH.pack(len(text)), text, *encoder.attachments])


def decode(data: bytes | memoryview) -> Any:
    """The value that `encode` was given; tensors are on the CPU, arrays are in C order.

    Raises:
        CorruptStateError: the bytes are not what `encode` writes.
    """
    content = memoryview(data).cast("B")
    try:
        return _Decoder(content).value()
    except _MALFORMED as error:
        raise CorruptStateError(
            f"{len(content)} bytes of saved plain data cannot be decoded "
            f"({type(error).__name__}: {str(error)[:200]}). Expected them as encode() wrote them: "
            "take them from an undamaged copy, or go back to an older snapshot"
        ) from error


_JSON = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


class _RefusedError(Exception):
    """``seen`` is not plain; ``path`` grows while the exception leaves the containers."""

    def __init__(self, seen: str) -> None:
        super().__init__(seen)
        self.seen = seen
        self.path: list[str] = []  # innermost first


class _Encoder:
    """Turns a value into what JSON can hold, and collects the attachments."""

    def __init__(self) -> None:
        self.attachments: list[bytes | memoryview] = []
        self._nbytes = 0
        self._open: set[int] = set()  # containers around the value in hand
        self._in_key = False

    def pack(self, value: Any) -> object:
        kind = type(value)
        if kind in _AS_IS:
            return value
        if kind is int:
            return value if -_INT_LIMIT < value < _INT_LIMIT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": _FLOAT.pack(value).hex()}
        container = _CONTAINERS.get(kind)
        if container is not None:
            if id(value) in self._open:
                raise _RefusedError(f"a {kind.__name__} that contains itself")
            if len(self._open) == MAX_DEPTH:
                raise _RefusedError(f"containers nested more than {MAX_DEPTH} deep")
            self._open.add(id(value))
            content = container(self, value)
            self._open.remove(id(value))
            return content
        if kind is np.ndarray:
            return self._array(value)
        if kind is bytes:
            return {"bytes": self._attach(value)}
        if kind is complex:
            return {"complex": _COMPLEX.pack(value.real, value.imag).hex()}
        if isinstance(value, np.generic):
            return self._scalar(value)
        torch = sys.modules.get("torch")  # where it was never imported, nothing is of its types
        if torch is not None:
            if kind is torch.Tensor:
                return self._tensor(value)
            if kind is torch.Size:
                return {"Size": list(value)}
            if kind is torch.dtype:
                return {"dtype": str(value).removeprefix("torch.")}
            if kind is torch.device:
                return {"device": str(value)}
        raise _RefusedError(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def items(
        self, values: Collection[Any], label: Callable[[int], str] = "[{}]".format
    ) -> list[object]:
        """All of a container; ``label`` is how messages name the one at an index."""
        kinds = set(map(type, values))
        if (
            kinds <= _AS_IS
            or (kinds == {int} and min(values) > -_INT_LIMIT and max(values) < _INT_LIMIT)
            or (kinds == {float} and all(map(math.isfinite, values)))
        ):
            return list(values)
        packed = []
        for index, value in enumerate(values):
            try:
                packed.append(self.pack(value))
            except _RefusedError as refused:
                refused.path.append(label(index))
                raise
        return packed

    def hashed(self, values: Collection[Any], noun: str = "element") -> list[object]:
        """The elements of a set, or the keys of a dict."""
        outer, self._in_key = self._in_key, True
        packed = self.items(values, lambda index: f" {noun} {_names.repr(list(values)[index])}")
        self._in_key = outer
        return packed

    def pairs(self, value: dict[Any, Any]) -> list[object]:
        keys = self.hashed(value.keys(), "key")
        values = self.items(value.values(), lambda i: f"[{_names.repr(list(value)[i])}]")
        return [keys, values]

    def default(self, value: defaultdict[Any, Any]) -> list[object]:
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return [name, *self.pairs(value)]
        seen = _names.repr(value.default_factory)
        raise _RefusedError(f"a defaultdict whose factory {seen} is no plain type")

    def _attach(self, data: bytes | memoryview) -> list[int]:
        offset, length = self._nbytes, len(data)
        self.attachments += [data, bytes(-length % _ALIGNMENT)]
        self._nbytes += length + -length % _ALIGNMENT
        return [offset, length]

    def _array(self, value: npt.NDArray[Any]) -> object:
        name = _dtype_name(value.dtype)
        if name is None:
            raise _RefusedError(f"a NumPy array of dtype {value.dtype}")
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return {"array": [name, list(value.shape), *self._attach(data)]}

    def _scalar(self, value: Any) -> object:
        kind = type(value)
        # NumPy's own methods drop the trailing zeros of these two; those of their bases do not.
        if kind is np.str_:
            return {"str_": str.__str__(value)}
        if kind is np.bytes_:
            return {"bytes_": self._attach(bytes(value))}
        name = _dtype_name(value.dtype)
        if name is None or kind is not value.dtype.type:
            raise _RefusedError(f"a NumPy scalar of type {kind.__module__}.{kind.__qualname__}")
        return {"scalar": [name, value.tobytes().hex()]}

    def _tensor(self, value: torch.Tensor) -> object:
        torch = _torch()
        if self._in_key:
            raise _RefusedError("a tensor, which is known by its identity,")
        dense = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
        if value.is_meta or not dense:
            seen = f"layout {value.layout}, dtype {value.dtype}, device {value.device}"
            raise _RefusedError(f"a tensor without dense data ({seen})")
        # As integers, since torch cannot copy every type; complex128 is copied as it is.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensor = value.detach().resolve_conj().resolve_neg()
        tensor = tensor.view(integers.get(tensor.dtype.itemsize, tensor.dtype)).cpu()
        # A clone: numpy() takes away a tensor's ability to be resized.
        data = tensor.contiguous().reshape(-1).view(torch.uint8).clone().numpy().data
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, list(value.shape), *self._attach(data)]}


_CONTAINERS: dict[type, Callable[[_Encoder, Any], object]] = {
    list: lambda encoder, value: encoder.items(value),
    tuple: lambda encoder, value: {"tuple": encoder.items(value)},
    dict: lambda encoder, value: {"dict": encoder.pairs(value)},
    set: lambda encoder, value: {"set": encoder.hashed(value)},
    frozenset: lambda encoder, value: {"frozenset": encoder.hashed(value)},
    OrderedDict: lambda encoder, value: {"OrderedDict": encoder.pairs(value)},
    Counter: lambda encoder, value: {"Counter": encoder.pairs(value)},
    defaultdict: lambda encoder, value: {"defaultdict": encoder.default(value)},
    deque: lambda encoder, value: {"deque": [value.maxlen, encoder.items(value)]},
}


def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    """A name from which NumPy makes the same type again, or None if its bytes are not all of it."""
    name = f"{dtype.str[0]}{dtype.char}" if dtype.char in "qQ" else dtype.str
    if not _DTYPE.fullmatch(name):
        return None
    again = np.dtype(name)  # a structured type and one of an extension print as plain bytes
    return name if again == dtype and again.char == dtype.char else None


class _Decoder:
    """Builds a value from its bytes; raises any of ``_MALFORMED``.

    Attachments are accepted only in the order in which the text names them, one behind the other:
    so a value is never larger than its bytes suggest.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._base = 0  # where attachments begin
        self._next = 0  # where the next one must lie, from there

    def value(self) -> Any:
        if len(self._data) < _LENGTH.size:
            raise ValueError("no length at the start")
        (length,) = _LENGTH.unpack_from(self._data)
        if length % _ALIGNMENT or length > len(self._data) - _LENGTH.size:
            raise ValueError(f"a text of {length} bytes does not fit")
        self._base = _LENGTH.size + length
        text = str(self._data[_LENGTH.size : self._base], "utf-8", "surrogatepass")
        value = json.loads(text, object_hook=self._unpack, parse_constant=_refuse)
        if self._base + self._next != len(self._data):
            raise ValueError(f"attachments end at {self._base + self._next}")
        return value

    def _unpack(self, tagged: dict[str, Any]) -> Any:
        """Called for every object of the text, inner ones first, in the order of the text."""
        if len(tagged) != 1:
            raise ValueError(f"an object of {len(tagged)} keys")
        ((tag, content),) = tagged.items()
        return _UNPACKERS[tag](self, content)

    def pairs(self, content: Any) -> zip[tuple[Any, Any]]:
        keys, values = _fields(content, list, list)
        return zip(keys, values, strict=True)

    def default(self, content: Any) -> defaultdict[Any, Any]:
        name, *pairs = _exact(content, list)
        return defaultdict(_FACTORIES[name], self.pairs(pairs))

    def deque(self, content: Any) -> deque[Any]:
        maxlen, items = _exact(content, list)
        return deque(_exact(items, list), maxlen)

    def attached(self, offset: int, length: int) -> memoryview:
        """An attachment, where the last one ended."""
        begin = self._base + self._next
        if offset != self._next or not 0 <= length <= len(self._data) - begin:
            raise ValueError(f"no attachment of {length} bytes at {offset}")
        self._next += length + -length % _ALIGNMENT
        return self._data[begin : begin + length]

    def blob(self, content: Any) -> bytes:
        return bytes(self.attached(*_fields(content, int, int)))

    def shaped(self, content: Any, dtype_of: Callable[[str], _D]) -> tuple[_D, Any, memoryview]:
        name, shape, offset, length = _fields(content, str, list, int, int)
        dtype = dtype_of(name)
        if any(_exact(size, int) < 0 for size in shape) or (
            math.prod(shape) * dtype.itemsize != length
        ):
            raise ValueError(f"the shape {shape} of {name} does not take {length} bytes")
        return dtype, shape, self.attached(offset, length)

    def array(self, content: Any) -> npt.NDArray[Any]:
        dtype, shape, data = self.shaped(content, _dtype)
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def scalar(self, content: Any) -> Any:
        name, digits = _fields(content, str, str)
        (value,) = np.frombuffer(bytes.fromhex(digits), _dtype(name)).copy()
        return value

    def tensor(self, content: Any) -> Any:
        torch = _torch()
        dtype, shape, data = self.shaped(content, _torch_dtype)
        raw = torch.tensor(np.frombuffer(data, np.uint8), device="cpu")
        return raw.view(dtype).reshape(shape).data  # .data: no view of another tensor


_UNPACKERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "int": lambda _, content: int(_exact(content, str), 16),
    "float": lambda _, content: _FLOAT.unpack(bytes.fromhex(content))[0],
    "complex": lambda _, content: complex(*_COMPLEX.unpack(bytes.fromhex(content))),
    "bytes": _Decoder.blob,
    "tuple": lambda _, content: tuple(_exact(content, list)),
    "dict": lambda decoder, content: dict(decoder.pairs(content)),
    "set": lambda _, content: set(_exact(content, list)),
    "frozenset": lambda _, content: frozenset(_exact(content, list)),
    "OrderedDict": lambda decoder, content: OrderedDict(decoder.pairs(content)),
    "Counter": lambda decoder, content: Counter(dict(decoder.pairs(content))),
    "defaultdict": _Decoder.default,
    "deque": _Decoder.deque,
    "array": _Decoder.array,
    "scalar": _Decoder.scalar,
    "str_": lambda _, content: np.str_(_exact(content, str)),
    "bytes_": lambda decoder, content: np.bytes_(decoder.blob(content)),
    "tensor": _Decoder.tensor,
    "Size": lambda _, content: _torch().Size(_exact(content, list)),
    "dtype": lambda _, content: _torch_dtype(_exact(content, str)),
    "device": lambda _, content: _torch().device(_matched(content, _DEVICE)),
}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _fields(content: Any, *kinds: type) -> list[Any]:
    return [_exact(*pair) for pair in zip(_exact(content, list), kinds, strict=True)]


def _matched(name: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(name):
        raise ValueError(f"{name!r} is not of the form {pattern.pattern}")
    return name


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(_matched(name, _DTYPE))


def _torch_dtype(name: str) -> torch.dtype:
    # Not getattr, which would import what torch imports lazily.
    return _exact(vars(_torch())[name], _torch().dtype)  # type: ignore[no-any-return]


def _torch() -> Any:
    import torch

    return torch
