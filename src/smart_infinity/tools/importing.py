"""Devices made from an export: of another set, of another number of devices, or of plain torch."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from smart_infinity.devices import check_specs
from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.kernels import OPTIMIZERS
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.layout import FORMAT_VERSION, Layout, ParameterSpec, plan_layout
from smart_infinity.storage import slots
from smart_infinity.storage.buffers import reserve
from smart_infinity.storage.checksums import state_checksum
from smart_infinity.storage.lock import DeviceLock
from smart_infinity.storage.store import Commit, Store
from smart_infinity.storage.superblock import Superblock, read_superblock, write_superblock
from smart_infinity.tensorfile import TensorFileReader
from smart_infinity.tools.export import (
    COMMITTED_FILE,
    EXPORT_VERSION,
    STATE_FILE,
    STEMS,
    checksum_of_committed,
    tensor_names,
)


class Export:
    """The files of an export, open for reading.

    Attributes:
        step, model, optimizer, moments, specs: what it is of.
        counts: each parameter's own step count.
        committed: the host's part of the step.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.path = os.fspath(source)
        self._files: dict[str, TensorFileReader] = {}
        self._where: dict[str, TensorFileReader] = {}
        self._content = self._about()
        try:
            self._read_plain()
            for name in sorted(os.listdir(self.path)):
                if name.endswith(".safetensors") and name.startswith(STEMS):
                    file = TensorFileReader(os.path.join(self.path, name))
                    self._files[name] = file
                    self._where.update(dict.fromkeys(file.tensors, file))
        except (OSError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise CorruptStateError(
                f"{self.path} is a damaged export: {type(error).__name__}: {error}. Expected all "
                "that smart-infinity export wrote; export again"
            ) from error

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

    def _read_plain(self) -> None:
        """The step, the parameters, and the host's part; raises whatever is wrong with them."""
        about = self._content
        self.step, self.model = int(about["step"]), str(about["model"])
        self.optimizer, self.moments = str(about["optimizer"]), list(about["moments"])
        self.specs = [
            ParameterSpec(str(own["name"]), tuple(map(int, own["shape"])), str(own["dtype"]))
            for own in about["parameters"]
        ]
        self.counts = [int(own["step"]) for own in about["parameters"]]
        with open(os.path.join(self.path, COMMITTED_FILE), "rb") as file:
            self.committed = file.read()
        if checksum_of_committed(self.committed) != about["committed_checksum"]:
            raise ValueError(f"{COMMITTED_FILE} differs from its checksum")
        unknown = {spec.dtype for spec in self.specs} - set(FORMAT_OF_DTYPE)
        if unknown or self.step < 1:
            raise ValueError(f"step {self.step}, dtypes {sorted(unknown)}")

    def layout(self, num_devices: int) -> Layout:
        """The layout of this state on a number of devices."""
        if self.optimizer not in OPTIMIZERS:
            raise StateMismatchError(
                f"{self.path} is of optimizer {self.optimizer!r}. Expected one of "
                f"{sorted(OPTIMIZERS)}"
            )
        layout = plan_layout(self.specs, self.optimizer, self.moments, num_devices)
        masters, moments = tensor_names(layout)
        expected = {
            name: ("F32", layout.parameters[index].shape)
            for name, (index, _) in (*masters.items(), *moments.items())
        }
        for name in {*expected, *self._where}:
            seen = self._where[name].tensors[name] if name in self._where else None
            if seen != expected.get(name):
                raise CorruptStateError(
                    f"{self.path}: tensor {name} is {seen or 'missing'}. Expected "
                    f"{expected.get(name) or 'no such tensor'}; export again"
                )
        return layout

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
            held = Store(path, layout, 0, direct=False).ledger_contents().records
            if not discard and (read_superblock(path) is not None or any(r.step for r in held)):
                raise StateExistsError(
                    f"device {path} holds a state. Expected an empty directory; pass --fresh to "
                    "discard it"
                )
        _require_room(paths, layout)
        set_uuid, attempt = str(uuid.uuid4()), os.urandom(16)
        step = export.step
        counts = np.array(export.counts, np.int64)
        try:
            for index, path in enumerate(paths):
                slots.discard(path)
                store = Store(path, layout, index, direct=False)
                stack.callback(store.close)
                store.create(in_place=False)
                store.reserve_blob(len(export.committed))
                written = _write_state(store, export)
                store.commit(Commit((0, step, attempt), counts, export.committed), written)
                store.settle(store.record)
            for index, path in enumerate(paths):
                superblock = Superblock(
                    FORMAT_VERSION,
                    set_uuid,
                    index,
                    len(paths),
                    layout.hash(),
                    layout.optimizer,
                    export.model,
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
        written[record.index] = (
            0,
            state_checksum(data, record.length, layout.num_state_tensors),
        )
    return written


def _require_room(paths: Sequence[str], layout: Layout) -> None:
    """Refuse file systems that cannot hold the state, when what is there now has been removed."""
    freed = {
        os.stat(path).st_dev: nbytes
        for path, nbytes in slots.totals_by_file_system(
            (path, slots.disk_nbytes(path)) for path in paths
        )
    }
    needs = ((path, 2 * layout.state_nbytes(index)) for index, path in enumerate(paths))
    for path, needed in slots.totals_by_file_system(needs):
        free = slots.free_nbytes(path) + freed[os.stat(path).st_dev]
        if free < needed:
            raise DeviceFullError(
                f"device {path}: the state needs {needed} bytes on this file system "
                f"and {free} are free. Free some space, or use more drives; nothing was changed"
            )
