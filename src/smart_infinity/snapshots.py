"""Snapshots of a whole set: on every device or on none."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from smart_infinity.errors import StateMismatchError
from smart_infinity.storage.slots import totals_by_file_system
from smart_infinity.storage.snapshots import Snapshot, Snapshots, check_name

ResultT = TypeVar("ResultT")


def take(devices: Sequence[Snapshots], name: str) -> None:
    """Copy the committed step of every device under a name.

    Args:
        devices: of the whole set.
        name: a new one.

    Raises:
        DeviceFullError: a file system has less free space than the state takes.
        StateExistsError: the name is taken.
        DeviceIOError: copying failed. In each case nothing is left behind.
    """
    check_name(name)
    if name not in [own.name for own in complete(devices)]:
        remove(devices, name)  # what a crash has left on some of them
    _require_room(devices, name)
    identity = uuid.uuid4().hex
    created = datetime.now(UTC).isoformat()
    try:
        on_all(devices, lambda device: device.copy(name, identity, created))
        on_all(devices, lambda device: device.publish(name))
    except BaseException:
        on_all(devices, lambda device: device.remove(name))
        raise


def complete(devices: Sequence[Snapshots]) -> list[Snapshot]:
    """The snapshots that are on every device, oldest first."""
    by_device = [{own.identity: own for own in device.whole()} for device in devices]
    return [own for own in by_device[0].values() if all(own.identity in each for each in by_device)]


def find(devices: Sequence[Snapshots], name: str) -> Snapshot:
    """The snapshot of that name. Raises `StateMismatchError`, which says what there is."""
    found = complete(devices)
    for own in found:
        if own.name == name:
            return own
    raise StateMismatchError(
        f"there is no snapshot {name!r} that is whole on every device. There are "
        f"{[f'{own.name} (step {own.step})' for own in found]}"
    )


def remove(devices: Sequence[Snapshots], name: str) -> None:
    """Remove a snapshot from every device, also one that is not on all of them."""
    on_all(devices, lambda device: device.remove(name))


def check(devices: Sequence[Snapshots], name: str) -> None:
    """Read a whole snapshot on all devices. `StateMismatchError`, `CorruptStateError`."""
    find(devices, name)
    on_all(devices, lambda device: device.check(name))


def restore(devices: Sequence[Snapshots], name: str, newest_branch: int) -> None:
    """Go back to a checked snapshot: on every device, or after a crash on none.

    What was committed stays whole until all devices hold the snapshot's state beside it; only in
    place there is no room for both, and then the ledgers say so until it is done.

    Args:
        devices: of the whole set, settled.
        name: of a snapshot.
        newest_branch: the latest branch that any device's ledger has seen.
    """
    on_all(devices, lambda device: device.load(name, newest_branch + 1))
    on_all(devices, lambda device: device.finish(name, newest_branch + 1))


def on_all(devices: Sequence[Snapshots], call: Callable[[Snapshots], ResultT]) -> list[ResultT]:
    """Run on all devices at once; waits for every one before it raises the first error."""
    with ThreadPoolExecutor(len(devices)) as pool:
        futures = [pool.submit(call, device) for device in devices]
    return [future.result() for future in futures]


def _require_room(devices: Sequence[Snapshots], name: str) -> None:
    """Several directories may share a file system, which must then hold them all."""
    needs = totals_by_file_system((device.directory, device.needed_nbytes()) for device in devices)
    for device, (_, needed) in zip(devices, needs, strict=True):
        device.require_room(name, needed)
