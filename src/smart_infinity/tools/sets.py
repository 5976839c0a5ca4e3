"""A set of devices without its model: what the tools open."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from smart_infinity.errors import CorruptStateError, SmartInfinityError, StateMismatchError
from smart_infinity.layout import Layout
from smart_infinity.recovery import in_order, mismatch
from smart_infinity.storage import slots
from smart_infinity.storage.ledger import (
    LedgerContents,
    LedgerRecord,
    blank_record,
    newest_common,
)
from smart_infinity.storage.lock import DeviceLock
from smart_infinity.storage.snapshots import Snapshots
from smart_infinity.storage.store import Store
from smart_infinity.storage.superblock import Superblock, read_layout, read_superblock


@dataclass(slots=True)
class StoredSet:
    """Directories that are one whole set, in its order.

    Attributes:
        paths, superblocks, ledgers, stores: by device.
        damage: by directory, sentences on what was found damaged and has a whole copy.
        records: by device, the newest step complete on all; None if there is none.
        torn: why there is none.
    """

    paths: list[str]
    superblocks: list[Superblock]
    layout: Layout
    ledgers: list[LedgerContents]
    stores: list[Store]
    records: list[LedgerRecord] | None
    torn: SmartInfinityError | None
    damage: dict[str, list[str]] = field(default_factory=dict)

    @property
    def set_uuid(self) -> str:
        """The set's UUID."""
        return self.superblocks[0].set_uuid

    def snapshots(self) -> list[Snapshots]:
        """By device."""
        return [Snapshots(store, self.set_uuid) for store in self.stores]

    def require_records(self) -> list[LedgerRecord]:
        """`records`; raises `CorruptStateError` where no step is complete on every device."""
        if self.records is None:
            raise self.torn or CorruptStateError("no step is complete on every device")
        return self.records

    def open_stores(self) -> None:
        """Open the files of every device, as the newest record in its ledger needs them."""
        for store, ledger in zip(self.stores, self.ledgers, strict=True):
            store.open(ledger.records[0] if ledger.records else None)

    def settle(self) -> None:
        """Before any write: make the newest complete step the only one on every device.

        Where there is none, each device keeps saying that it is torn.
        """
        for index, store in enumerate(self.stores):
            if self.records is not None:
                store.settle(self.records[index])
            else:
                store.settle(self._torn_record(index))

    def _torn_record(self, index: int) -> LedgerRecord:
        found = self.ledgers[index].records
        if found:
            return replace(found[0], dirty=True)
        num_records = len(self.layout.devices[index].records)
        return blank_record(num_records, len(self.layout.parameters), dirty=True)

    def newest_branch(self) -> int:
        """The latest branch that a ledger has seen; see `LedgerRecord`."""
        return max((own.branch for found in self.ledgers for own in found.records), default=0)


@contextmanager
def open_set(
    directories: Sequence[str | os.PathLike[str]], *, writable: bool, lock: bool = True
) -> Iterator[StoredSet]:
    """Lock and open the directories of a set, in any order.

    Args:
        directories: all of the set.
        writable: without, nothing is changed, and a read-only file system will do.
        lock: without, a run may be using them: only superblocks and ledgers mean anything.

    Raises:
        StateMismatchError: they are not one whole set.
        CorruptStateError: superblock or layout cannot be read.
        DeviceBusyError: a run uses one of them.
    """
    paths = in_order([os.fspath(path) for path in directories])
    with ExitStack() as stack:
        for path in paths:
            slots.require_directory(path, writable=writable)
            if lock:
                stack.callback(DeviceLock(path, writable=writable).release)
        damage: dict[str, list[str]] = {path: [] for path in paths}
        found = [read_superblock(path, damage[path]) for path in paths]
        problem = mismatch(paths, found, None)
        if problem:
            raise StateMismatchError(f"{problem}. Expected the directories of one whole set")
        superblocks = [own for own in found if own is not None]
        layout = _layout(paths, superblocks, damage)
        stores = []
        for index, path in enumerate(paths):
            # What is only read is read past the page cache: from the drive, not from memory.
            mode = "w" if writable else "r"
            stores.append(Store(path, layout, index, direct=not writable, mode=mode))
            stack.callback(stores[-1].close)
        ledgers = [store.ledger_contents() for store in stores]
        for path, ledger in zip(paths, ledgers, strict=True):
            damage[path] += ledger.damage
        records, torn = None, None
        try:
            records = newest_common(ledgers)
        except CorruptStateError as error:
            torn = error
        yield StoredSet(paths, superblocks, layout, ledgers, stores, records, torn, damage)


def _layout(
    paths: Sequence[str], superblocks: Sequence[Superblock], damage: dict[str, list[str]]
) -> Layout:
    """The layout that all devices hold; a device whose own is damaged can do with another's."""
    layout: Layout | None = None
    first_problem: SmartInfinityError | None = None
    for path, own in zip(paths, superblocks, strict=True):
        try:
            candidate = Layout.from_json(read_layout(path, damage[path]))
            if candidate.hash() != own.layout_hash:
                raise ValueError("its hash is not that in the superblock")
            layout = layout or candidate
        except (ValueError, CorruptStateError) as error:
            problem = CorruptStateError(f"device {path}: {slots.LAYOUT} is damaged: {error}")
            first_problem = first_problem or problem
            damage[path].append(str(problem))
    if layout is None:
        assert first_problem is not None, "there is a device"
        raise first_problem
    return layout
