"""Snapshots of a set that no run is using."""

from __future__ import annotations

import os
from collections.abc import Sequence

from smart_infinity import snapshots
from smart_infinity.tools.sets import open_set

Directories = Sequence[str | os.PathLike[str]]


def take_snapshot(directories: Directories, name: str) -> int:
    """Keep the committed step under a name; returns the step. See `snapshots.take`."""
    with open_set(directories, writable=True) as found:
        records = found.require_records()
        for store, record in zip(found.stores, records, strict=True):
            store.open(record)
            store.record = record
        snapshots.take(found.snapshots(), name)
        return records[0].step


def restore_snapshot(directories: Directories, name: str) -> int:
    """Go back to a snapshot; returns its step. Also where the present state is torn or damaged.

    Raises:
        StateMismatchError: there is no such snapshot, or it is another set's.
        CorruptStateError: the snapshot is damaged. In both cases nothing has changed.
    """
    with open_set(directories, writable=True) as found:
        found.open_stores()
        keepers = found.snapshots()
        snapshots.check(keepers, name)
        found.settle()
        snapshots.restore(keepers, name, found.newest_branch())
        return snapshots.find(keepers, name).step


def remove_snapshot(directories: Directories, name: str) -> None:
    """Remove a snapshot from every device."""
    with open_set(directories, writable=True) as found:
        snapshots.find(found.snapshots(), name)
        snapshots.remove(found.snapshots(), name)
