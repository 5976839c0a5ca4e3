"""Reading everything a set of devices holds, and naming what is bad. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smart_infinity.errors import CorruptStateError, DeviceIOError
from smart_infinity.storage import slots
from smart_infinity.storage.store import RecordReader
from smart_infinity.tools.sets import StoredSet, open_set


@dataclass(slots=True)
class Verdict:
    """What `verify` has found.

    Attributes:
        set_uuid, step: the set, and its newest complete step (None if there is none).
        records: how many state records were read and compared, those of snapshots included.
        problems: (directory, what is bad there) for each fault.
    """

    set_uuid: str
    step: int | None
    records: int = 0
    snapshots: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)


def verify(directories: Sequence[str | os.PathLike[str]]) -> Verdict:
    """Read all of a set and compare it with its checksums.

    Args:
        directories: all of the set, in any order; no run may use them.

    Raises:
        StateMismatchError: they are not one whole set.
        CorruptStateError: it cannot even be said what they are.
        DeviceBusyError: a run uses one of them.
    """
    with open_set(directories, writable=False) as found:
        verdict = Verdict(found.set_uuid, found.records[0].step if found.records else None)
        if found.torn is not None:
            verdict.problems.append((found.paths[0], str(found.torn)))
        for index, path in enumerate(found.paths):
            problems = [*found.damage[path], *_state_problems(found, index, verdict)]
            problems += _snapshot_problems(found, index, verdict)
            verdict.problems += [(path, problem) for problem in problems]
    return verdict


def _state_problems(found: StoredSet, index: int, verdict: Verdict) -> Iterator[str]:
    store = found.stores[index]
    try:
        store.open(found.records[index] if found.records else None)
    except (CorruptStateError, DeviceIOError) as error:
        yield str(error)
        return
    if found.records is None:
        return
    record = found.records[index]
    try:
        store.read_blob(record)
    except (CorruptStateError, DeviceIOError) as error:
        yield str(error)
    yield from _damaged_records(store.reader(record), verdict)


def _damaged_records(reader: RecordReader, verdict: Verdict) -> Iterator[str]:
    for own in reader.plan.records:
        verdict.records += 1
        try:
            damaged = reader.read(own) is None
        except DeviceIOError as error:
            yield str(error)
            continue
        if damaged:
            place = slots.STATE[int(reader.record.places[own.index])]
            yield (
                f"state record {own.index} in {place} differs from what step "
                f"{reader.record.step} committed"
            )


def _snapshot_problems(found: StoredSet, index: int, verdict: Verdict) -> Iterator[str]:
    keeper = found.snapshots()[index]
    for name in keeper.damaged():
        yield f"snapshot {name!r} is damaged: it does not say what it is"
    for own in keeper.whole():
        verdict.snapshots += 1
        verdict.records += len(found.layout.devices[index].records)
        try:
            for problem in keeper.problems(own.name):
                yield f"snapshot {own.name!r}: {problem}"
        except DeviceIOError as error:
            yield str(error)
