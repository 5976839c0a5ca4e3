"""A set's masters and moments as safetensors files that anything can read.

OUT/model.safetensors       fp32 masters, by parameter name (sharded as Hugging Face does it)
OUT/optimizer.safetensors   moments, as ``state.<parameter name>.<torch's name>``
OUT/state.json              step, optimizer, groups, and each parameter's dtype and step count
OUT/committed               the host's part of the step: random states, buffers, registered objects
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from smart_infinity import plain, snapshots
from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    StateExistsError,
    UnsupportedError,
)
from smart_infinity.layout import Layout
from smart_infinity.storage.buffers import checksum
from smart_infinity.storage.ledger import LedgerRecord
from smart_infinity.storage.slots import free_nbytes, sync_directory
from smart_infinity.storage.store import RecordReader
from smart_infinity.tensorfile import TensorFileWriter, shard, shard_names
from smart_infinity.tools.sets import StoredSet, open_set

STATE_FILE, COMMITTED_FILE = "state.json", "committed"
STEMS = ("model", "optimizer")
EXPORT_VERSION = 1

# A tensor's name in the files -> (parameter, which of [master, moments...]).
Names = dict[str, tuple[int, int]]


def export_set(
    directories: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    snapshot: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> int:
    """Write the committed step, or a snapshot, as files; memory does not grow with the model.

    Args:
        directories: all of the set, in any order; no run may use them.
        out: a directory that does not exist yet, or is empty.
        snapshot: the name of one, instead of the committed step.
        max_shard_bytes: largest size of a file; a tensor is never cut.

    Returns:
        The step.

    Raises:
        CorruptStateError: a state record is damaged; nothing is left behind.
        DeviceFullError: there is no room for the files.
        StateExistsError: ``out`` holds something.
    """
    with open_set(directories, writable=False) as found, ExitStack() as stack:
        found.open_stores()
        readers, blob = _source(found, snapshot, stack)
        first = readers[0].record
        if first.step == 0:
            raise UnsupportedError(
                "the devices hold step 0, which is the model as it was given. Expected a step to "
                "export; train first"
            )
        model, counts = found.superblocks[0].model, first.counts.tolist()
        about = describe(found.layout, model, first.step, counts, blob)
        with new_directory(out) as directory:
            require_room(directory, found.layout)
            with tensor_files(directory, found.layout, max_shard_bytes) as write:
                for reader in readers:
                    _copy(found.layout, reader, write)
            write_plain(directory, about, blob)
        return first.step


def _source(
    found: StoredSet, snapshot: str | None, stack: ExitStack
) -> tuple[list[RecordReader], bytes]:
    """By device, a reader of the step to export; and what the host committed with it."""
    if snapshot is None:
        records = found.require_records()
        readers = [
            store.reader(record) for store, record in zip(found.stores, records, strict=True)
        ]
        newest = max(range(len(records)), key=lambda index: records[index].amendment)
        return readers, found.stores[newest].read_blob(records[newest])
    keepers = found.snapshots()
    snapshots.find(keepers, snapshot)
    readers = [stack.enter_context(keeper.reader(snapshot)) for keeper in keepers]
    return readers, keepers[0].read_blob(snapshot)


def _copy(layout: Layout, reader: RecordReader, write: Write) -> None:
    for own in reader.plan.records:
        state = reader.read(own)
        if state is None:
            raise _damaged(reader.record, reader.plan.index, own.index)
        for piece in own.pieces:
            place = slice(piece.record_offset, piece.record_offset + piece.length)
            for number in range(layout.num_state_tensors):
                write(piece.parameter, number, piece.start, state[number, place])


def _damaged(record: LedgerRecord, device: int, index: int) -> CorruptStateError:
    return CorruptStateError(
        f"device {device}: state record {index} differs from what step {record.step} committed. "
        "Expected the bytes that were written; export a snapshot with --snapshot. Nothing was "
        "left behind"
    )


# --- the files, also for a plain torch run -------------------------------------------------------


class Write:
    """Puts a flat range of a parameter's master or moment into its file."""

    def __init__(self, names: Mapping[tuple[int, int], tuple[TensorFileWriter, str]]) -> None:
        self._names = names

    def __call__(
        self, parameter: int, number: int, start: int, values: npt.NDArray[np.float32]
    ) -> None:
        """Write ``values`` from element ``start`` of tensor ``number`` of a parameter."""
        writer, name = self._names[parameter, number]
        writer.write(name, start, values)


def tensor_names(layout: Layout) -> tuple[Names, Names]:
    """The names in the model's files, and those in the optimizer's."""
    masters = {spec.name: (index, 0) for index, spec in enumerate(layout.parameters)}
    moments = {
        f"state.{spec.name}.{moment}": (index, number)
        for index, spec in enumerate(layout.parameters)
        for number, moment in enumerate(layout.moments, start=1)
    }
    return masters, moments


@contextmanager
def tensor_files(directory: str, layout: Layout, max_shard_bytes: int) -> Iterator[Write]:
    """Make the files for all tensors; every element must be written by the end."""
    where: dict[tuple[int, int], tuple[TensorFileWriter, str]] = {}
    with ExitStack() as stack:
        for stem, names in zip(STEMS, tensor_names(layout), strict=True):
            if not names:
                continue  # SGD without momentum
            tensors = [
                (name, "F32", layout.parameters[index].shape) for name, (index, _) in names.items()
            ]
            shards = shard(tensors, max_shard_bytes)
            weight_map: dict[str, str] = {}
            for file, own in zip(shard_names(stem, len(shards)), shards, strict=True):
                path = os.path.join(directory, file)
                writer = stack.enter_context(TensorFileWriter(path, own, {"format": "pt"}))
                for name, _, _ in own:
                    where[names[name]] = writer, name
                    weight_map[name] = file
            if len(shards) > 1:
                total = 4 * layout.num_elements * (1 if stem == "model" else len(layout.moments))
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                _write_json(os.path.join(directory, f"{stem}.safetensors.index.json"), index)
        yield Write(where)


def describe(
    layout: Layout, model: str, step: int, counts: Sequence[int], blob: bytes
) -> dict[str, Any]:
    """The content of ``state.json``; ``blob`` is that of ``committed``."""
    committed = plain.decode(blob)
    return {
        "export_version": EXPORT_VERSION,
        "committed_checksum": checksum_of_committed(blob),
        "step": step,
        "model": model,
        "optimizer": layout.optimizer,
        "moments": list(layout.moments),
        "parameters": [
            {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "step": count}
            for spec, count in zip(layout.parameters, counts, strict=True)
        ],
        "param_groups": [
            {**_jsonable(group), "params": [layout.parameters[index].name for index in members]}
            for group, members in zip(committed["param_groups"], committed["members"], strict=True)
        ],
    }


def checksum_of_committed(blob: bytes) -> str:
    """xxh3 of ``committed``, in hexadecimal."""
    return f"{checksum(np.frombuffer(blob, np.uint8)):016x}"


def write_plain(directory: str, about: dict[str, Any], blob: bytes) -> None:
    """``committed`` and ``state.json``."""
    with open(os.path.join(directory, COMMITTED_FILE), "wb") as file:
        file.write(blob)
    _write_json(os.path.join(directory, STATE_FILE), about)


@contextmanager
def new_directory(out: str | os.PathLike[str]) -> Iterator[str]:
    """A hidden directory that gets its name when the block ends well, and else disappears."""
    path = os.path.abspath(os.fspath(out))
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise StateExistsError(
            f"{path} exists and is not an empty directory. Expected a new one for the export"
        )
    parent, name = os.path.split(path)
    hidden = os.path.join(parent, f".{name}.{os.getpid()}")
    try:
        os.makedirs(hidden)
        yield hidden
        sync_directory(hidden)
        os.rename(hidden, path)
        sync_directory(parent)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DeviceFullError(
                f"{parent}: the file system became full during the export. Free some space, or "
                "export to another drive; nothing was left behind"
            ) from error
        raise


def require_room(directory: str, layout: Layout) -> None:
    """Refuse a file system that cannot hold the files."""
    needed, free = 4 * layout.num_elements * layout.num_state_tensors, free_nbytes(directory)
    if free < needed:
        raise DeviceFullError(
            f"{os.path.dirname(directory)}: the export needs {needed} bytes and {free} are free. "
            "Free some space, or export to another drive"
        )


def _jsonable(group: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {key: value for key, value in group.items() if isinstance(value, kinds)}


def _write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
