"""What a set of devices is, without reading its state; also while a run is using it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from smart_infinity import snapshots
from smart_infinity.storage import slots
from smart_infinity.tools.sets import StoredSet, open_set


def inspect_set(directories: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Describe a set as JSON values.

    Args:
        directories: all of the set, in any order.

    Returns:
        ``set_uuid``, ``model``, ``optimizer``, ``parameters`` (elements), ``tensors``,
        ``format_version``, ``layout_hash``, ``committed_step`` (or None), ``health`` (``"ok"`` or
        what is wrong), ``devices`` (a list of ``path``, ``index``, ``in_use``, ``steps``,
        ``state_bytes`` of one step, ``disk_bytes`` in all, ``free_bytes``, ``last_write`` in UTC,
        ``health``), and ``snapshots`` (a list of ``name``, ``step``, ``created``, ``bytes``).

    Raises:
        StateMismatchError: they are not one whole set.
        CorruptStateError: superblock or layout cannot be read.
    """
    with open_set(directories, writable=False, lock=False) as found:
        first = found.superblocks[0]
        devices = [_device(found, index) for index in range(len(found.paths))]
        troubles = [str(found.torn)] if found.torn is not None else []
        troubles += [own["health"] for own in devices if own["health"] != "ok"]
        return {
            "set_uuid": first.set_uuid,
            "model": first.model,
            "optimizer": first.optimizer,
            "parameters": found.layout.num_elements,
            "tensors": len(found.layout.parameters),
            "format_version": first.format_version,
            "layout_hash": first.layout_hash,
            "committed_step": found.records[0].step if found.records else None,
            "health": "; ".join(troubles) or "ok",
            "devices": devices,
            "snapshots": [
                {
                    "name": own.name,
                    "step": own.step,
                    "created": own.created,
                    "bytes": sum(_snapshot_nbytes(path, own.name) for path in found.paths),
                }
                for own in snapshots.complete(found.snapshots())
            ],
        }


def _device(found: StoredSet, index: int) -> dict[str, Any]:
    path, store = found.paths[index], found.stores[index]
    ledger = os.path.join(path, slots.LEDGER)
    written = os.stat(ledger).st_mtime if os.path.exists(ledger) else None
    troubles = list(found.damage[path])
    used = {0} if found.records is None else {0, *found.records[index].places.tolist()}
    for place in sorted(used):
        state = os.path.join(path, slots.STATE[place])
        if not os.path.exists(state):
            troubles.append(f"{slots.STATE[place]} is missing")
        elif os.path.getsize(state) < store.state_nbytes:
            troubles.append(f"{slots.STATE[place]} is cut off")
    return {
        "path": path,
        "index": index,
        "in_use": _is_locked(path),
        "steps": [record.step for record in found.ledgers[index].clean()],
        "state_bytes": store.state_nbytes,
        "disk_bytes": slots.disk_nbytes(path),
        "free_bytes": slots.free_nbytes(path),
        "last_write": written and datetime.fromtimestamp(written, UTC).isoformat(),
        "health": "; ".join(troubles) or "ok",
    }


def _snapshot_nbytes(directory: str, name: str) -> int:
    root = os.path.join(directory, slots.SNAPSHOTS, name)
    return sum(os.path.getsize(os.path.join(root, file)) for file in os.listdir(root))


def _is_locked(directory: str) -> bool:
    """Whether somebody holds the lock; asked of the kernel, since trying it might be in the way."""
    try:
        inode = os.stat(os.path.join(directory, slots.LOCK)).st_ino
        with open("/proc/locks", encoding="ascii") as file:
            return any(
                fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode)
                for fields in map(str.split, file)
                if len(fields) > 5
            )
    except OSError:
        return False
