"""Who a directory is: its superblock and its layout, each in two checksummed copies."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from smart_infinity.errors import CorruptStateError, DeviceIOError, StateMismatchError
from smart_infinity.layout import FORMAT_VERSION
from smart_infinity.storage.slots import COPY_OF, LAYOUT, SUPERBLOCK, write_durably

_CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a directory says about itself. ``model`` is a class name, for people."""

    format_version: int
    set_uuid: str
    device_index: int
    num_devices: int
    layout_hash: str
    optimizer: str
    model: str


def write_superblock(directory: str, superblock: Superblock, layout: dict[str, Any]) -> None:
    """Write layout and then superblock, so that a superblock never speaks of a missing layout."""
    for name, content in ((LAYOUT, layout), (SUPERBLOCK, asdict(superblock))):
        data = encode_document(content)
        for copy in (name, COPY_OF[name]):
            write_durably(directory, os.path.join(directory, copy), data)


def read_superblock(directory: str, notes: list[str] | None = None) -> Superblock | None:
    """The directory's superblock, or None where there is none.

    Args:
        directory: the device's directory.
        notes: receives a sentence for each copy that is damaged.
    """
    content = _read(directory, SUPERBLOCK, notes)
    if content is None:
        return None
    try:
        return Superblock(**content)
    except TypeError as error:
        raise _damaged(directory, SUPERBLOCK, str(error)) from error


def read_layout(directory: str, notes: list[str] | None = None) -> dict[str, Any]:
    """The directory's layout, as ``Layout.to_json`` wrote it; ``notes`` as above."""
    content = _read(directory, LAYOUT, notes)
    if content is None:
        raise _damaged(directory, LAYOUT, "the file is missing")
    return content


def mend_documents(directory: str) -> None:
    """Write damaged or missing copies of superblock and layout anew from the whole ones."""
    for name in (LAYOUT, SUPERBLOCK):
        notes: list[str] = []
        content = _read(directory, name, notes)
        if content is not None and notes:
            for copy in (name, COPY_OF[name]):
                write_durably(directory, os.path.join(directory, copy), encode_document(content))


def encode_document(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of its content."""
    return json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1).encode() + b"\n"


def decode_document(data: bytes) -> dict[str, Any] | None:
    """The content of a document, or None if it is not whole."""
    try:
        content = json.loads(data)
    except ValueError:
        return None
    if not isinstance(content, dict) or content.pop(_CHECKSUM, None) != _checksum(content):
        return None
    return content


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _read(directory: str, name: str, notes: list[str] | None) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None
    bad: dict[str, str] = {}
    version: object = None
    for copy in (name, COPY_OF[name]):
        path = os.path.join(directory, copy)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            bad[copy] = "is missing"
            continue
        except OSError as error:
            raise DeviceIOError(directory, path, "read", None, error.errno or 0) from error
        content = decode_document(data)
        if content is None:
            bad[copy] = "is damaged"
            version = _version(data) if version is None else version
        elif content.get("format_version") != FORMAT_VERSION:
            version = content.get("format_version")
            bad[copy] = "is of another version"
        elif found is None:
            found = content
    if found is None:
        if all(state == "is missing" for state in bad.values()):
            return None
        if version not in (None, FORMAT_VERSION):
            raise StateMismatchError(
                f"device {directory}: its state has format version {version}, this release of "
                f"smart-infinity reads version {FORMAT_VERSION}. Use the release that wrote it, "
                "or discard the state with offload(..., resume=False)"
            )
        raise _damaged(directory, name, "no copy of it is whole")
    if notes is not None:
        notes += [f"{copy} {state}; its other copy is whole" for copy, state in bad.items()]
    return found


def _version(data: bytes) -> object:
    """The format version that a document without a right checksum names, if it names one."""
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(data).get("format_version")
    return None


def _damaged(directory: str, name: str, detail: str) -> CorruptStateError:
    return CorruptStateError(
        f"device {directory}: {name} is damaged or not of this program ({detail}). Expected the "
        "file that offload() wrote; restore it, or discard the state with resume=False"
    )
