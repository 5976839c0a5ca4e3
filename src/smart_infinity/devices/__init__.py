"""Devices by kind. A specification that is a path is a `LocalDevice`. No torch in here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

from smart_infinity.devices.base import Device
from smart_infinity.devices.local import LocalDevice
from smart_infinity.errors import DeviceSpecError
from smart_infinity.layout import Layout
from smart_infinity.trace import Trace

MAX_DEVICES = 16


def check_specs(devices: object) -> list[str]:
    """The directories that ``devices`` names; raises `DeviceSpecError` where it does not."""
    if isinstance(devices, str | os.PathLike):
        raise DeviceSpecError(
            f"devices is the single path {os.fspath(devices)!r}. Expected a list of directories; "
            f"write [{os.fspath(devices)!r}]"
        )
    try:
        paths = [os.fspath(spec) for spec in devices]  # type: ignore[attr-defined]
    except TypeError as error:
        raise DeviceSpecError(
            f"devices is {devices!r}. Expected a list of 1 to {MAX_DEVICES} directories"
        ) from error
    if not 1 <= len(paths) <= MAX_DEVICES:
        raise DeviceSpecError(
            f"devices names {len(paths)} directories. Expected 1 to {MAX_DEVICES}: one per drive"
        )
    seen: dict[str, str] = {}
    for path in paths:
        if not isinstance(path, str):
            raise DeviceSpecError(f"device {path!r} is bytes. Expected a string or a Path")
        real = os.path.realpath(path)
        if real in seen:
            raise DeviceSpecError(
                f"devices names the same directory twice: {seen[real]} and {path}. Expected one "
                "directory for each device"
            )
        seen[real] = path
    return paths


def open_devices(
    specs: Sequence[str],
    layout: Layout,
    *,
    in_place: bool = False,
    check_reads: bool = False,
    works_ahead: bool = False,
    updates_early: bool = False,
    state_cache: int = 0,
    trace: Trace | None = None,
) -> Iterator[Device]:
    """Open the devices of the layout, in its order; for the options see `LocalDevice`.

    One drive is kept busy by three transfers at once, beside one record that is computed and one
    that waits for its turn. With more devices fewer do, since their turns to compute are shared.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    computing = threading.Semaphore(max(1, (cores or 1) - 1))
    for index, spec in enumerate(specs):
        yield LocalDevice(
            spec,
            layout,
            index,
            5 if len(specs) == 1 else 3,
            computing,
            trace,
            in_place=in_place,
            check_reads=check_reads,
            works_ahead=works_ahead,
            updates_early=updates_early,
            state_cache=state_cache,
        )
