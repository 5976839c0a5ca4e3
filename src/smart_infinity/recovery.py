"""Deciding over a whole set of devices: begin anew, continue, or refuse."""

from __future__ import annotations

from collections.abc import Sequence

from smart_infinity.devices.base import Device
from smart_infinity.errors import CorruptStateError, StateExistsError, StateMismatchError
from smart_infinity.layout import Layout
from smart_infinity.storage.ledger import LedgerRecord, newest_common
from smart_infinity.storage.slots import Superblock, read_layout


def recover(
    devices: Sequence[Device],
    layout: Layout,
    resume: bool | None,
    torn_set: str | None = None,
) -> list[LedgerRecord] | None:
    """The records to continue from, one per device, or None to begin anew.

    Directories begin anew only if none of the set holds a step of 1 or more: an empty
    replacement of one directory must not erase the others.
    """
    if resume is False:
        return None
    ledgers = [device.recorded_steps() for device in devices]
    for device, records in zip(devices, ledgers, strict=True):
        if not records and device.identify() is not None:
            raise CorruptStateError(
                f"device {device.path} has a superblock, but no record in its ledger is whole. "
                "Expected at least one; restore the directory from a copy, or discard the state "
                "with resume=False"
            )
    if all(record.step == 0 for records in ledgers for record in records):
        if torn_set is None:
            return None
        return _first_state(devices, layout, resume, torn_set, ledgers)
    problem = _mismatch(devices, layout)
    if resume is None:
        held = max(record.step for records in ledgers for record in records)
        raise StateExistsError(
            f"the directories {[device.path for device in devices]} hold a training state at step "
            f"{held}{' (' + problem + ')' if problem else ''}. Pass resume=True to continue it, "
            "or resume=False to discard it and begin anew"
        )
    if problem:
        raise StateMismatchError(
            f"cannot resume: {problem}. Expected the directories, the model and the optimizer of "
            "the run to be continued; pass resume=False to discard the state"
        )
    return newest_common(ledgers)


def _first_state(
    devices: Sequence[Device],
    layout: Layout,
    resume: bool | None,
    torn_set: str,
    ledgers: Sequence[Sequence[LedgerRecord]],
) -> list[LedgerRecord]:
    """Step 0 of the set whose very first step failed.

    The model's weights are partly of that step, so they are no beginning for anything.
    """
    superblocks = [device.identify() for device in devices]
    if any(own is None or own.set_uuid != torn_set for own in superblocks):
        raise StateMismatchError(
            f"the model's weights are torn by a failure of set {torn_set}, and the directories "
            f"{[device.path for device in devices]} do not hold that set. Expected its "
            "directories with resume=True; or load weights into the model and pass resume=False"
        )
    problem = _mismatch(devices, layout)
    if resume is None or problem:
        raise StateExistsError(
            f"the first step failed and tore the model's weights{': ' + problem if problem else ''}"
            ". Pass resume=True to go back to the state before it, or load weights into the model "
            "and pass resume=False to begin anew"
        )
    return [records[0] for records in ledgers]


def _mismatch(devices: Sequence[Device], layout: Layout) -> str:
    """What keeps these directories from being the set of this run; empty if nothing does."""
    superblocks: list[Superblock] = []
    for device in devices:
        superblock = device.identify()
        if superblock is None:
            return f"device {device.path} holds no state (it has no superblock)"
        superblocks.append(superblock)
    first = superblocks[0]
    for device, superblock in zip(devices, superblocks, strict=True):
        if superblock.set_uuid != first.set_uuid:
            return (
                f"device {device.path} belongs to set {superblock.set_uuid} and "
                f"{devices[0].path} to set {first.set_uuid}"
            )
    if first.num_devices != len(devices):
        return f"the state lies on {first.num_devices} devices and {len(devices)} were given"
    order = [superblock.device_index for superblock in superblocks]
    if order != list(range(len(devices))):
        return f"the directories are devices {order} of their set, in the order given"
    if first.layout_hash != layout.hash():
        return _difference(read_layout(devices[0].path), layout.to_json())
    return ""


def _difference(stored: dict[str, object], planned: dict[str, object]) -> str:
    """Name the first things in which two layouts differ."""
    for key in ("optimizer", "moments"):
        if stored.get(key) != planned[key]:
            return f"the state's {key} is {stored.get(key)!r} and this run's is {planned[key]!r}"
    theirs, ours = (_parameters(layout) for layout in (stored, planned))
    for old, new in zip(theirs, ours, strict=False):
        if old != new:
            return f"the state has parameter {old} where the model has {new}"
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
