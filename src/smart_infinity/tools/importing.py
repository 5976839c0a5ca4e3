"""Devices made from an export: of another set, of another number of devices, or of plain torch."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from smart_infinity import plain
from smart_infinity.devices import check_specs
from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.kernels import OPTIMIZERS
from smart_infinity.layout import FORMAT_VERSION, Layout, ParameterSpec, plan_layout
from smart_infinity.storage import slots
from smart_infinity.storage.buffers import checksum, reserve
from smart_infinity.storage.lock import DeviceLock
from smart_infinity.storage.store import Commit, Store
from smart_infinity.storage.superblock import Superblock, read_superblock, write_superblock
from smart_infinity.tensorfile import TensorFileReader
from smart_infinity.tools.export import (
    COMMITTED_FILE,
    EXPORT_VERSION,
    STATE_FILE,
    STEMS,
    tensor_names,
)


class Export:
    """The files of an export, open for reading.

    Attributes:
        about: the content of ``state.json``.
        committed: the host's part of the step.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.path = os.fspath(source)
        self.about = self._about()
        with open(os.path.join(self.path, COMMITTED_FILE), "rb") as file:
            self.committed = file.read()
        plain.decode(self.committed)  # refused now if it is damaged
        self._files: dict[str, TensorFileReader] = {}
        self._where: dict[str, TensorFileReader] = {}
        for name in sorted(os.listdir(self.path)):
            if name.endswith(".safetensors") and name.startswith(STEMS):
                self._files[name] = TensorFileReader(os.path.join(self.path, name))
                self._where.update(dict.fromkeys(self._files[name].tensors, self._files[name]))

    def _about(self) -> dict[str, Any]:
        path = os.path.join(self.path, STATE_FILE)
        try:
            with open(path, encoding="utf-8") as file:
                about = json.load(file)
            version = about["export_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateMismatchError(
                f"{self.path} is not an export ({STATE_FILE}: {error}). Expected a directory that "
                "smart-infinity export or smart_infinity.save_export wrote"
            ) from error
        if version != EXPORT_VERSION:
            raise StateMismatchError(
                f"{self.path} has export version {version}, this release reads version "
                f"{EXPORT_VERSION}. Use the release that wrote it"
            )
        return about  # type: ignore[no-any-return]

    def layout(self, num_devices: int) -> Layout:
        """The layout of this state on a number of devices."""
        about = self.about
        if about["optimizer"] not in OPTIMIZERS:
            raise StateMismatchError(
                f"{self.path} is of optimizer {about['optimizer']!r}. Expected one of "
                f"{sorted(OPTIMIZERS)}"
            )
        specs = [
            ParameterSpec(own["name"], tuple(own["shape"]), own["dtype"])
            for own in about["parameters"]
        ]
        layout = plan_layout(specs, about["optimizer"], about["moments"], num_devices)
        self._check_tensors(layout)
        return layout

    def _check_tensors(self, layout: Layout) -> None:
        for names in tensor_names(layout):
            for name, (index, _) in names.items():
                expected = ("F32", layout.parameters[index].shape)
                seen = self._where[name].tensors[name] if name in self._where else "no such tensor"
                if seen != expected:
                    raise CorruptStateError(
                        f"{self.path}: tensor {name} is {seen}. Expected {expected}; export again"
                    )

    def counts(self) -> list[int]:
        """Each parameter's own step count."""
        return [int(own["step"]) for own in self.about["parameters"]]

    def read(self, name: str, start: int, out: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Fill ``out`` from a flat range of a tensor."""
        self._where[name].read(name, start, out)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def import_set(
    source: str | os.PathLike[str],
    directories: Sequence[str | os.PathLike[str]],
    *,
    discard: bool = False,
) -> int:
    """Make a set of devices that holds an export's state; ``resume=True`` continues it.

    Args:
        source: the directory of the export.
        directories: 1 to 16 existing directories, one per drive.
        discard: remove a state that they hold.

    Returns:
        The step.

    Raises:
        StateExistsError: a directory holds a state.
        DeviceFullError: there is no room for the state. In each case nothing half-done remains.
    """
    paths = check_specs(directories)
    with ExitStack() as stack:
        export = Export(source)
        stack.callback(export.close)
        layout = export.layout(len(paths))
        for path in paths:
            slots.require_directory(path)
            stack.callback(DeviceLock(path).release)
            if not discard and read_superblock(path) is not None:
                raise StateExistsError(
                    f"device {path} holds a state. Expected an empty directory; pass --fresh to "
                    "discard it"
                )
        _require_room(paths, layout)
        set_uuid, attempt = str(uuid.uuid4()), os.urandom(16)
        step = int(export.about["step"])
        counts = np.array(export.counts(), np.int64)
        try:
            for index, path in enumerate(paths):
                slots.discard(path)
                store = Store(path, layout, index, direct=False)
                stack.callback(store.close)
                store.create(in_place=False)
                store.reserve_blob(len(export.committed))
                written = _write_state(store, export)
                store.commit(Commit((0, step, attempt), counts, export.committed), written)
            for index, path in enumerate(paths):
                superblock = Superblock(
                    FORMAT_VERSION,
                    set_uuid,
                    index,
                    len(paths),
                    layout.hash(),
                    layout.optimizer,
                    export.about["model"],
                )
                write_superblock(path, superblock, layout.to_json())
        except BaseException:
            for path in paths:
                slots.discard(path)
            raise
        return step


def _write_state(store: Store, export: Export) -> Mapping[int, tuple[int, int]]:
    """Write all records of a device to place 0; record -> (place, checksum)."""
    layout, plan = store.layout, store.layout.devices[store.device]
    masters, moments = tensor_names(layout)
    name_of = {where: name for name, where in (*masters.items(), *moments.items())}
    longest = max((record.length for record in plan.records), default=0)
    buffer = reserve(layout.record_nbytes(longest))
    written: dict[int, tuple[int, int]] = {}
    for record in plan.records:
        data = buffer[: layout.record_nbytes(record.length)]
        floats = data.view(np.float32)
        floats[record.length * layout.num_state_tensors :] = 0
        for piece in record.pieces:
            for number in range(layout.num_state_tensors):
                begin = number * record.length + piece.record_offset
                name = name_of[piece.parameter, number]
                export.read(name, piece.start, floats[begin : begin + piece.length])
        store.files[0].write_from(data, record.index * layout.record_stride)
        written[record.index] = 0, checksum(data)
    return written


def _require_room(paths: Sequence[str], layout: Layout) -> None:
    needed: dict[int, int] = {}
    for index, path in enumerate(paths):
        file_system = os.stat(path).st_dev
        needed[file_system] = needed.get(file_system, 0) + 2 * layout.state_nbytes(index)
        free = slots.free_nbytes(path)
        if free < needed[file_system]:
            raise DeviceFullError(
                f"device {path}: the state needs {needed[file_system]} bytes on this file system "
                f"and {free} are free. Free some space, or use more drives; nothing was changed"
            )
