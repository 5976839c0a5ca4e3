"""A directory of this machine as a device: storage behind a transfer handler, Numba kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import psutil

from smart_infinity.devices.base import Device, HostPort, StepPlan
from smart_infinity.devices.compute import ComputeEngine, Floats
from smart_infinity.devices.early import EarlyWords, early_words_nbytes
from smart_infinity.devices.memory import LandingZone, landing_zone_nbytes, num_buffers
from smart_infinity.devices.smartupdate import SmartUpdate
from smart_infinity.devices.tables import records_of_runs
from smart_infinity.errors import (
    DeviceFullError,
    DeviceIOError,
    DeviceSpecError,
)
from smart_infinity.layout import Layout, Record
from smart_infinity.storage import slots
from smart_infinity.storage.blockfile import direct_io_refusal
from smart_infinity.storage.handler import TransferHandler
from smart_infinity.storage.ledger import LedgerContents, LedgerRecord
from smart_infinity.storage.lock import DeviceLock
from smart_infinity.storage.snapshots import Snapshots
from smart_infinity.storage.store import Commit, Store
from smart_infinity.storage.superblock import (
    Superblock,
    mend_documents,
    read_layout,
    read_superblock,
    write_superblock,
)
from smart_infinity.storage.tasklets import Buffer, Compute, Places, Timings, buffer_nbytes
from smart_infinity.trace import Trace, spanning

logger = logging.getLogger("smart_infinity")

# Buffers for reading ahead and writing late: up to this part of the state, and of free memory.
AHEAD, FREE = 2, 8


class LocalDevice(Device):
    """One device of a set, in a directory. Opening it takes the directory's lock.

    Args:
        directory: an existing, writable directory.
        layout: the plan of the whole set.
        index: which device of the plan this is.
        num_workers: threads of the transfer handler; never more than it has buffers.
        computing: how many workers may compute at once; the devices of a set share it.
        trace: takes what the device does, or None.
        in_place: steps overwrite the state that they read (``durability="none"``).
        check_reads: check the checksum of every state record that a step reads.
        works_ahead: state is read before the step that it is for, into as many buffers as are of
            use.
        updates_early: room is made for weights that are computed before their step.
        state_cache: bytes of memory for state records that stay in it.
    """

    def __init__(
        self,
        directory: str,
        layout: Layout,
        index: int,
        num_workers: int,
        computing: threading.Semaphore,
        trace: Trace | None = None,
        *,
        in_place: bool = False,
        check_reads: bool = False,
        works_ahead: bool = False,
        updates_early: bool = False,
        state_cache: int = 0,
    ) -> None:
        self.path = directory
        self.gradients: LandingZone
        self._updates: SmartUpdate  # there with the handler
        self._in_place, self._check_reads = in_place, check_reads
        self._works_ahead, self._updates_early = works_ahead, updates_early
        self._layout, self._plan = layout, layout.devices[index]
        self._num_workers, self._computing, self._trace = num_workers, computing, trace
        self._engine = ComputeEngine(layout, self._plan)
        self._records_of_run = records_of_runs(self._plan)
        self._timings = Timings()
        self._longest = max((record.length for record in self._plan.records), default=0)
        cached = state_cache // layout.record_nbytes(self._longest) if self._longest else 0
        self._num_cached = min(cached, len(self._plan.records))
        self._handler: TransferHandler | None = None
        self._early_words: EarlyWords | None = None
        self._created = False
        slots.require_directory(directory)
        self._lock = DeviceLock(directory)
        try:
            refusal = direct_io_refusal(directory)
        except OSError as error:
            self._lock.release()
            raise DeviceSpecError(
                f"device {directory}: cannot write to it: {error.strerror}. Expected a directory "
                "on a file system with free space that this process may write to"
            ) from error
        if refusal is not None:
            logger.warning(
                "device %s: O_DIRECT is refused (%s); using buffered I/O instead",
                directory,
                refusal,
            )
        self._store = Store(directory, layout, index, direct=refusal is None)

    # --- identity and reservation ---------------------------------------------------------

    def identify(self, notes: list[str] | None = None) -> Superblock | None:
        """See `Device.identify`."""
        superblock = read_superblock(self.path, notes)
        if superblock is not None and notes is not None:
            read_layout(self.path, notes)
        return superblock

    def recorded_steps(self) -> LedgerContents:
        """See `Device.recorded_steps`."""
        return self._store.ledger_contents()

    def create(self) -> None:
        """See `Device.create`. A full disk raises `DeviceFullError` and leaves nothing behind."""
        slots.discard(self.path)
        self._created = True
        needed = (1 if self._in_place else 2) * self._store.state_nbytes
        available = slots.free_nbytes(self.path)
        try:
            if available < needed:
                raise slots.full(self.path, needed, available)
            self._store.create(in_place=self._in_place)
            self._start_handler()
        except DeviceIOError as error:
            self.abandon()
            if error.operation == "reserve":
                raise slots.full(self.path, needed, available) from error
            raise
        except DeviceFullError:
            self.abandon()
            raise

    def attach(self, device_memory: int | None) -> None:
        """See `Device.attach`."""
        zone = landing_zone_nbytes(self._plan)
        if self._updates_early:
            zone += early_words_nbytes(self._layout, self._plan)
        each = buffer_nbytes(self._layout, self._longest)
        wanted = self._num_workers
        if self._works_ahead and each:
            free = psutil.virtual_memory().available // len(self._layout.devices)
            wanted = max(wanted, min(len(self._plan.records) // AHEAD, free // FREE // each))
        self._num_buffers = num_buffers(self.path, device_memory, zone, each, wanted)
        self._num_workers = min(self._num_workers, self._num_buffers)
        self.gradients = LandingZone(self._plan)
        if self._updates_early:
            self._early_words = EarlyWords(self._layout, self._plan)

    def abandon(self) -> None:
        """See `Device.abandon`."""
        if self._created:
            self._close_files()
            slots.discard(self.path)
            self._created = False

    # --- beginning and resuming ------------------------------------------------------------

    def initialize(
        self,
        host: HostPort,
        formats: Sequence[int],
        moments: Sequence[Sequence[float]],
        commit: Commit,
    ) -> None:
        """See `Device.initialize`."""

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            return self._engine.initialize(record, state, buffer, host, formats, moments)

        self._store.reserve_blob(len(commit.blob))
        self._updates.written = {}
        self._run(self._plan.records, compute, None)
        self._store.commit(commit, self._updates.written)

    def seal(self, superblock: Superblock) -> None:
        """See `Device.seal`."""
        write_superblock(self.path, superblock, self._layout.to_json())
        self.snapshots = Snapshots(self._store, superblock.set_uuid)

    def open(self, record: LedgerRecord, superblock: Superblock) -> bytes:
        """See `Device.open`."""
        self._store.open(record, in_place=self._in_place)
        self.snapshots = Snapshots(self._store, superblock.set_uuid)
        return self._store.read_blob(record)

    def settle(self, record: LedgerRecord) -> None:
        """See `Device.settle`."""
        try:
            self._store.reserve_second_place()
        except DeviceIOError as error:
            if error.operation != "reserve":
                raise
            available = slots.free_nbytes(self.path)
            raise slots.full(self.path, self._store.state_nbytes, available) from error
        self._store.settle(record)
        self._start_handler()
        mend_documents(self.path)
        self.snapshots.remove_half_made()

    def restore(self, host: HostPort) -> bytes:
        """See `Device.restore`."""

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            self._store.require(record.index, self._engine.checksum(record, buffer))
            self._engine.encode(record, state, buffer)
            self._engine.deliver(record, buffer, host, None)
            return None

        self.drop_early()
        if self._handler is not None:
            self._handler.forget()
        self._updates.settled()
        self._run(self._plan.records, compute, self.committed.places)
        return self._store.read_blob(self.committed)

    # --- the step ----------------------------------------------------------------------------

    def begin_early(self, *, updates: bool) -> None:
        """See `Device.begin_early`."""
        self._updates.begin_early(updates=updates)

    def expect(self, table: npt.NDArray[np.float32]) -> None:
        """See `Device.expect`."""
        self._updates.expect(table)

    def gradient_complete(self, parameter: int) -> None:
        """See `Device.gradient_complete`."""
        self._updates.gradient_complete(parameter)

    def drop_early(self) -> None:
        """See `Device.drop_early`."""
        if self._handler is not None:
            self._updates.drop_early()

    def allow_writes(self) -> None:
        """See `Device.allow_writes`."""
        self._updates.allow_writes()

    def update(self, plan: StepPlan, host: HostPort) -> None:
        """See `Device.update`."""
        self._timings = self._updates.update(plan, host)

    def commit(self, commit: Commit) -> None:
        """See `Device.commit`."""
        if self._in_place and self._num_cached:
            self._store.hold(commit, self._updates.written)
        else:
            self._store.commit(commit, self._updates.written)
        self._updates.settled()

    def save(self) -> None:
        """See `Device.save`."""
        if self._store.held is not None and self._handler is not None:
            self._store.commit_held(self._handler.save())

    def reserve_blob(self, nbytes: int) -> None:
        """See `Device.reserve_blob`."""
        self._store.reserve_blob(nbytes)

    def amend(self, blob: bytes) -> None:
        """See `Device.amend`."""
        self._store.amend(blob)

    @property
    def committed(self) -> LedgerRecord:
        """See `Device.committed`."""
        return self._store.record

    def read_state(self, run: int) -> list[Floats]:
        """See `Device.read_state`."""
        own = self._plan.runs[run]
        out = np.empty((self._layout.num_state_tensors, own.length), np.float32)

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            if self._check_reads:
                self._store.require(record.index, self._engine.checksum(record, buffer))
            tensors = state.reshape(self._layout.num_state_tensors, record.length)
            for piece in record.pieces:
                if piece.run == run:
                    begin = piece.start - own.start
                    place = slice(piece.record_offset, piece.record_offset + piece.length)
                    out[:, begin : begin + piece.length] = tensors[:, place]
            return None

        self.drop_early()
        records = [self._plan.records[index] for index in self._records_of_run[run]]
        self._run(records, compute, self.committed.places)
        return list(out)

    @property
    def last_timings(self) -> Timings:
        """See `Device.last_timings`."""
        return self._timings

    def close(self) -> None:
        """See `Device.close`."""
        self.drop_early()
        self._close_files()
        self._lock.release()

    # --- helpers -----------------------------------------------------------------------------

    def _run(
        self,
        records: Sequence[Record],
        compute: Compute,
        places: Places | None,
    ) -> Timings:
        assert self._handler is not None, "create() or settle() comes first"
        return self._handler.run(records, compute, places, self._updates.written)

    def _start_handler(self) -> None:
        self._handler = TransferHandler(
            self._layout,
            self._store.files,
            self._num_workers,
            self._num_buffers,
            self._num_cached,
            self._longest,
            self._computing,
            self.path,
            self._trace,
            in_place=self._in_place,
        )
        self._updates = SmartUpdate(
            self._layout,
            self._plan,
            self._store,
            self._engine,
            self._handler,
            self.gradients,
            self._early_words,
            partial(spanning, self._trace, self.path, "link"),
            check_reads=self._check_reads,
        )

    def _close_files(self) -> None:
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        self._store.close()
