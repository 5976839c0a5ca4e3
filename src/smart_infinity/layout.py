"""Where every element of every parameter lives: pure planning, without tensors and without I/O.

    parameters -> units -> blocks -> runs (one device's part of a unit) -> state records

A *unit* is the smallest piece of the model that moves at once. A *block* is 4096 consecutive
elements of one parameter, counted from the parameter's start; nothing that must not depend on the
number of devices (cuts between devices, norm partials) is finer than a block. A unit's blocks are
split evenly over all devices. A *run* is a contiguous stretch of one parameter on one device; a
device's runs, in forward order, are its *element space*, which is cut into *state records* of
``RECORD_ELEMENTS`` elements. A *piece* is the part of a run inside one record.

The plan is a function of names, shapes and the number of devices alone, so that its hash
identifies a state on disk. Parameters added later append a generation (a new list of units whose
element spaces begin at fresh records); this version writes exactly one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK_ELEMENTS = 4096
RECORD_ELEMENTS = 1 << 20
UNIT_MIN_ELEMENTS = 64 * 1024
PAGE_BYTES = 4096
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One trainable parameter: its dotted name, shape, and dtype name (``"bfloat16"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim parameter."""
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be partial."""
        return -(-self.numel // BLOCK_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive parameters that move together; ``parameters`` are indices into the layout's."""

    name: str
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous stretch of one parameter on one device.

    ``start`` counts elements from the parameter's start and is a multiple of a block;
    ``device_offset`` is the run's place in the device's element space, ``first_block`` its first
    block among all blocks of the device.
    """

    parameter: int
    start: int
    length: int
    device_offset: int
    first_block: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the run; the last one may be partial."""
        return -(-self.length // BLOCK_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of run number ``run`` that lies in one record, at ``record_offset``."""

    run: int
    parameter: int
    start: int
    length: int
    record_offset: int


@dataclass(frozen=True, slots=True)
class Record:
    """One state record: ``length`` elements of a device's element space."""

    index: int
    length: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """All of one device: its runs in forward order and the records they are cut into."""

    index: int
    num_elements: int
    num_blocks: int
    runs: tuple[Run, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole plan. ``moments`` names the optimizer's state tensors, by torch's names."""

    parameters: tuple[ParameterSpec, ...]
    units: tuple[Unit, ...]
    optimizer: str
    moments: tuple[str, ...]
    devices: tuple[DevicePlan, ...]
    record_elements: int = RECORD_ELEMENTS
    # By parameter: (device, index into the device's runs), in order of the parameter's elements.
    runs_of: tuple[tuple[tuple[int, int], ...], ...] = field(default=(), compare=False)

    @property
    def num_elements(self) -> int:
        """Elements of all parameters together."""
        return sum(spec.numel for spec in self.parameters)

    @property
    def num_state_tensors(self) -> int:
        """fp32 values per element in a record: the master and the moments."""
        return 1 + len(self.moments)

    def record_nbytes(self, length: int) -> int:
        """Bytes of a record of ``length`` elements on storage, padded to a page."""
        return -(-length * 4 * self.num_state_tensors // PAGE_BYTES) * PAGE_BYTES

    @property
    def record_stride(self) -> int:
        """Distance in bytes between two records in a state file."""
        return self.record_nbytes(self.record_elements)

    def state_nbytes(self, device: int) -> int:
        """Size of one of the device's two state files."""
        records = self.devices[device].records
        if not records:
            return 0
        return (len(records) - 1) * self.record_stride + self.record_nbytes(records[-1].length)

    def to_json(self) -> dict[str, object]:
        """What ``layout.json`` holds: enough to plan the same layout again, and no more."""
        return {
            "format_version": FORMAT_VERSION,
            "optimizer": self.optimizer,
            "moments": list(self.moments),
            "num_devices": len(self.devices),
            "block_elements": BLOCK_ELEMENTS,
            "record_elements": self.record_elements,
            "generations": [
                {
                    "parameters": [
                        {"name": p.name, "shape": list(p.shape), "dtype": p.dtype}
                        for p in self.parameters
                    ],
                    "units": [
                        {"name": u.name, "parameters": list(u.parameters)} for u in self.units
                    ],
                    "records": [len(device.records) for device in self.devices],
                }
            ],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` described. Raises `ValueError` if it cannot be planned."""
        try:
            (generation,) = content["generations"]
            specs = [
                ParameterSpec(own["name"], tuple(own["shape"]), own["dtype"])
                for own in generation["parameters"]
            ]
            layout = plan_layout(
                specs,
                content["optimizer"],
                content["moments"],
                content["num_devices"],
                content["record_elements"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{error!r}") from error
        if layout.to_json() != content:
            raise ValueError("units, records or constants differ from what this release plans")
        return layout

    def hash(self) -> str:
        """SHA-256 of the canonical JSON form: equal hashes mean interchangeable states."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def unit_name(parameter_name: str) -> str:
    """The unit that a parameter's name suggests.

    ``transformer.h.3.attn.weight`` belongs to block ``transformer.h.3`` (the path up to the first
    number); a name without a number belongs to the module that owns it.
    """
    match = re.match(r"(.*?(?:^|\.)\d+)\.", parameter_name)
    if match:
        return match.group(1)
    return parameter_name.rpartition(".")[0] or parameter_name


def plan_units(parameters: Sequence[ParameterSpec]) -> tuple[Unit, ...]:
    """Group consecutive parameters into units; units below 64 Ki elements join a neighbour."""
    groups: list[tuple[str, list[int]]] = []
    for index, spec in enumerate(parameters):
        name = unit_name(spec.name)
        if groups and groups[-1][0] == name:
            groups[-1][1].append(index)
        else:
            groups.append((name, [index]))
    merged: list[tuple[str, list[int], int]] = []
    for name, members in groups:
        size = sum(parameters[i].numel for i in members)
        if merged and (size < UNIT_MIN_ELEMENTS or merged[-1][2] < UNIT_MIN_ELEMENTS):
            head, together, size_before = merged[-1]
            larger = head if size_before >= size else name
            together.extend(members)
            merged[-1] = (larger, together, size_before + size)
        else:
            merged.append((name, members, size))
    return tuple(Unit(name, tuple(members)) for name, members, _ in merged)


def plan_layout(
    parameters: Iterable[ParameterSpec],
    optimizer: str,
    moments: Sequence[str],
    num_devices: int,
    record_elements: int = RECORD_ELEMENTS,
) -> Layout:
    """Plan the layout of ``parameters`` (in forward order) over ``num_devices`` devices."""
    specs = tuple(parameters)
    units = plan_units(specs)
    runs: list[list[Run]] = [[] for _ in range(num_devices)]
    elements = [0] * num_devices
    blocks = [0] * num_devices
    runs_of: list[list[tuple[int, int]]] = [[] for _ in specs]
    rotation = 0
    for unit in units:
        num_blocks = sum(specs[i].num_blocks for i in unit.parameters)
        share, remainder = divmod(num_blocks, num_devices)
        # The devices that get one block more than the others rotate from unit to unit, so that
        # a model of many small units is balanced as well as one of few large ones.
        counts = [
            share + ((device - rotation) % num_devices < remainder) for device in range(num_devices)
        ]
        rotation = (rotation + remainder) % num_devices
        device = 0
        for parameter in unit.parameters:
            start = 0
            while start < specs[parameter].numel:
                while counts[device] == 0:
                    device += 1
                length = min(counts[device] * BLOCK_ELEMENTS, specs[parameter].numel - start)
                run = Run(parameter, start, length, elements[device], blocks[device])
                runs_of[parameter].append((device, len(runs[device])))
                runs[device].append(run)
                elements[device] += length
                blocks[device] += run.num_blocks
                counts[device] -= run.num_blocks
                start += length
    devices = tuple(
        DevicePlan(
            index, elements[index], blocks[index], tuple(own), _cut_records(own, record_elements)
        )
        for index, own in enumerate(runs)
    )
    return Layout(
        specs,
        units,
        optimizer,
        tuple(moments),
        devices,
        record_elements,
        tuple(tuple(own) for own in runs_of),
    )


def _cut_records(runs: Sequence[Run], record_elements: int) -> tuple[Record, ...]:
    records: list[Record] = []
    pieces: list[Piece] = []
    filled = 0
    for number, run in enumerate(runs):
        done = 0
        while done < run.length:
            length = min(run.length - done, record_elements - filled)
            pieces.append(Piece(number, run.parameter, run.start + done, length, filled))
            filled += length
            done += length
            if filled == record_elements:
                records.append(Record(len(records), filled, tuple(pieces)))
                pieces, filled = [], 0
    if filled:
        records.append(Record(len(records), filled, tuple(pieces)))
    return tuple(records)
