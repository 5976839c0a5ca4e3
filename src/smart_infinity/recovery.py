"""Deciding over a whole set of devices: begin anew, continue, or refuse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from smart_infinity.devices.base import Device
from smart_infinity.errors import (
    CorruptStateError,
    SmartInfinityError,
    StateExistsError,
    StateMismatchError,
)
from smart_infinity.layout import Layout
from smart_infinity.storage.ledger import LedgerContents, LedgerRecord, newest_common
from smart_infinity.storage.superblock import Superblock, read_layout, read_superblock

logger = logging.getLogger("smart_infinity")

MOVE_HINT = (
    "to continue on another number of devices, move the state with smart-infinity export and "
    "smart-infinity import"
)
MAX_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A state to continue from, by device."""

    superblocks: list[Superblock]
    records: list[LedgerRecord]


def in_order(paths: Sequence[str]) -> list[str]:
    """The directories in the order of their set, if they are one; else as given.

    Directories are recognised by what they hold, since drives change their names.
    """
    try:
        superblocks = [read_superblock(path) for path in paths]
    except (SmartInfinityError, OSError):
        return list(paths)  # what is wrong is said when the devices are open
    known = [own for own in superblocks if own is not None]
    if len({own.set_uuid for own in known}) != 1 or len(known) < len(paths):
        return list(paths)
    by_index = {own.device_index: path for own, path in zip(known, paths, strict=True)}
    if sorted(by_index) != list(range(len(paths))):
        return list(paths)
    return [by_index[index] for index in range(len(paths))]


def recover(
    devices: Sequence[Device],
    layout: Layout,
    resume: bool | None,
    torn_set: str | None = None,
) -> Found | None:
    """What to continue from, or None to begin anew.

    Directories begin anew only if none of the set holds more than a first state: an empty
    replacement of one directory must not erase the others.
    """
    if resume is False:
        return None
    notes: dict[str, list[str]] = {device.path: [] for device in devices}
    superblocks = [device.identify(notes[device.path]) for device in devices]
    ledgers = [device.recorded_steps() for device in devices]
    for device, superblock, ledger in zip(devices, superblocks, ledgers, strict=True):
        if superblock is not None and not ledger.records:
            raise CorruptStateError(
                f"device {device.path} has a superblock, but no record in its ledger is whole. "
                "Expected at least one; go back to a snapshot with smart-infinity restore, restore "
                "the directory from a copy, or discard the state with resume=False"
            )
    paths = [device.path for device in devices]
    # A set that went back to a snapshot of its first state is on a later branch, and of value.
    if all(not (own.step or own.branch) for ledger in ledgers for own in ledger.records):
        if torn_set is None:
            return None
        return _first_state(paths, layout, resume, torn_set, superblocks, ledgers)
    problem = mismatch(paths, superblocks, layout)
    if resume is None:
        held = max(record.step for ledger in ledgers for record in ledger.records)
        raise StateExistsError(
            f"the directories {paths} hold a training state at step "
            f"{held}{' (' + problem + ')' if problem else ''}. Pass resume=True to continue it, "
            "or resume=False to discard it and begin anew"
        )
    if problem:
        raise StateMismatchError(
            f"cannot resume: {problem}. Expected the directories, the model and the optimizer of "
            "the run to be continued; pass resume=False to discard the state"
        )
    records = newest_common(ledgers)
    for device, ledger in zip(devices, ledgers, strict=True):
        notes[device.path] += ledger.damage
        if notes[device.path]:
            logger.warning(
                "device %s: %s. Continuing with step %d, which is whole",
                device.path,
                "; ".join(notes[device.path]),
                records[0].step,
            )
    return Found([own for own in superblocks if own is not None], records)


def _first_state(
    paths: Sequence[str],
    layout: Layout,
    resume: bool | None,
    torn_set: str,
    superblocks: Sequence[Superblock | None],
    ledgers: Sequence[LedgerContents],
) -> Found:
    """Step 0 of the set whose very first step failed.

    The model's weights are partly of that step, so they are no beginning for anything.
    """
    if any(own is None or own.set_uuid != torn_set for own in superblocks):
        raise StateMismatchError(
            f"the model's weights are torn by a failure of set {torn_set}, and the directories "
            f"{list(paths)} do not hold that set. Expected its "
            "directories with resume=True; or load weights into the model and pass resume=False"
        )
    problem = mismatch(paths, superblocks, layout)
    if resume is None or problem:
        raise StateExistsError(
            f"the first step failed and tore the model's weights{': ' + problem if problem else ''}"
            ". Pass resume=True to go back to the state before it, or load weights into the model "
            "and pass resume=False to begin anew"
        )
    return Found([own for own in superblocks if own is not None], newest_common(ledgers))


def mismatch(
    paths: Sequence[str], superblocks: Sequence[Superblock | None], layout: Layout | None
) -> str:
    """What keeps these directories from being one whole set; empty if nothing does.

    Args:
        paths: the directories.
        superblocks: what each says it is.
        layout: this run's plan, or None where there is no model to compare with.
    """
    known: dict[int, str] = {}
    first: Superblock | None = None
    for path, own in zip(paths, superblocks, strict=True):
        if own is None:
            return f"device {path} holds no state (it has no superblock)"
        first = first or own
        if own.set_uuid != first.set_uuid:
            return f"device {path} belongs to set {own.set_uuid} and {paths[0]} to {first.set_uuid}"
        if own.device_index in known:
            return (
                f"devices {known[own.device_index]} and {path} both say that they are device "
                f"{own.device_index} of set {own.set_uuid}: one is a copy of the other, and only "
                "one can be continued"
            )
        known[own.device_index] = path
    assert first is not None, "there is a device"
    if first.num_devices != len(paths):
        missing = sorted(set(range(first.num_devices)) - set(known))
        return (
            f"the state lies on {first.num_devices} devices and {len(paths)} were given; missing: "
            f"device {', '.join(map(str, missing))} of set {first.set_uuid} ({MOVE_HINT})"
        )
    if layout is not None and first.layout_hash != layout.hash():
        return _difference(read_layout(paths[0]), layout.to_json())
    return ""


def _difference(stored: dict[str, object], planned: dict[str, object]) -> str:
    """Name the first things in which two layouts differ."""
    for key in ("optimizer", "moments"):
        if stored.get(key) != planned[key]:
            return f"the state's {key} is {stored.get(key)!r} and this run's is {planned[key]!r}"
    theirs, ours = (_parameters(layout) for layout in (stored, planned))
    different = [
        f"the state has parameter {old} where the model has {new}"
        for old, new in zip(theirs, ours, strict=False)
        if old != new
    ]
    if different:
        shown = different[:MAX_DIFFERENCES]
        more = len(different) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more else "")
    if len(theirs) != len(ours):
        longer = theirs if len(theirs) > len(ours) else ours
        extra = longer[min(len(theirs), len(ours))]
        return (
            f"the state has {len(theirs)} parameters and the model {len(ours)}; the first one too "
            f"many is {extra}"
        )
    return "the layout differs in units or sizes"


def _parameters(layout: dict[str, object]) -> list[str]:
    generations = layout.get("generations")
    if not isinstance(generations, list):
        return []
    return [
        f"{p['name']} {tuple(p['shape'])} {p['dtype']}"
        for generation in generations
        for p in generation["parameters"]
    ]
