"""A directory of this machine as a device: storage behind a transfer handler, Numba kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from smart_infinity.devices.base import (
    Device,
    HostPort,
    StepPlan,
    Words,
)
from smart_infinity.devices.memory import LandingZone, landing_zone_nbytes, word_sources
from smart_infinity.devices.tables import block_tables, piece_tables, records_of_runs
from smart_infinity.errors import (
    DeviceFullError,
    DeviceIOError,
    DeviceMemoryError,
    DeviceSpecError,
)
from smart_infinity.kernels import OPTIMIZERS, encode_record, load_masters, merge_edits
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.frame import T_ACTIVE
from smart_infinity.layout import Layout, Piece, Record
from smart_infinity.storage import slots
from smart_infinity.storage.blockfile import direct_io_refusal
from smart_infinity.storage.checksums import StateChecksum, state_checksum
from smart_infinity.storage.handler import (
    Buffer,
    Compute,
    Timings,
    TransferHandler,
    buffer_nbytes,
)
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

logger = logging.getLogger("smart_infinity")

Floats = npt.NDArray[np.float32]


class LocalDevice(Device):
    """One device of a set, in a directory. Opening it takes the directory's lock.

    Args:
        directory: an existing, writable directory.
        layout: the plan of the whole set.
        index: which device of the plan this is.
        num_workers: buffers of the transfer handler that are wanted; a budget may allow fewer.
        computing: how many workers may compute at once; the devices of a set share it.
        in_place: steps overwrite the state that they read (``durability="none"``).
        check_reads: check the checksum of every state record that a step reads.
    """

    def __init__(
        self,
        directory: str,
        layout: Layout,
        index: int,
        num_workers: int,
        computing: threading.Semaphore,
        *,
        in_place: bool = False,
        check_reads: bool = False,
    ) -> None:
        self.path = directory
        self.gradients: LandingZone
        self._in_place, self._check_reads = in_place, check_reads
        self._layout, self._plan = layout, layout.devices[index]
        self._num_workers, self._computing = num_workers, computing
        self._kernel = OPTIMIZERS[layout.optimizer].update
        self._pieces = piece_tables(layout, self._plan)
        self._blocks = block_tables(self._pieces, self._plan)
        self._record_of_run = records_of_runs(self._plan)
        self._timings = Timings()
        self._written: dict[int, tuple[int, int]] = {}
        self._longest = max((record.length for record in self._plan.records), default=0)
        self._handler: TransferHandler | None = None
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
                raise self._full(needed, available)
            self._store.create(in_place=self._in_place)
            self._start_handler()
        except DeviceIOError as error:
            self.abandon()
            if error.operation == "reserve":
                raise self._full(needed, available) from error
            raise
        except DeviceFullError:
            self.abandon()
            raise

    def _full(self, needed: int, available: int) -> DeviceFullError:
        return DeviceFullError(
            f"device {self.path}: the state needs {needed} bytes here and the file system has "
            f"{available} free. Free some space, or add a device; nothing was left reserved"
        )

    def attach(self, device_memory: int | None) -> None:
        """See `Device.attach`."""
        zone = landing_zone_nbytes(self._plan)
        each = buffer_nbytes(self._layout, self._longest)
        if device_memory is not None:
            if device_memory < zone + each:
                raise DeviceMemoryError(
                    f"device {self.path}: device_memory is {device_memory} bytes, but the landing "
                    f"zone for gradients needs {zone} and one transfer buffer {each}. Expected at "
                    f"least {zone + each} bytes; raise device_memory or add devices"
                )
            if each:  # a device may hold nothing at all
                self._num_workers = min(self._num_workers, (device_memory - zone) // each)
        self.gradients = LandingZone(self._plan)

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
            tensors = state.reshape(self._layout.num_state_tensors, record.length)
            for index, piece in enumerate(record.pieces):
                words = host.fetch_weights(record, index, piece)
                place = slice(piece.record_offset, piece.record_offset + piece.length)
                form = formats[piece.parameter]
                load_masters(form, tensors[0, place], *word_sources(form, words))
                tensors[1:, place] = np.array(moments[piece.parameter], np.float32)[:, None]
            return self._checksum(record, buffer)

        self._store.reserve_blob(len(commit.blob))
        self._written = {}
        self._run(self._plan.records, compute, None)
        self.commit(commit)

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
            raise self._full(self._store.state_nbytes, available) from error
        self._start_handler()
        self._store.settle(record)
        mend_documents(self.path)
        self.snapshots.remove_half_made()
        self._written = {}

    def restore(self, host: HostPort) -> bytes:
        """See `Device.restore`."""

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            self._require(record, self._checksum(record, buffer))
            encode_record(state, self._pieces[record.index], buffer.words16, buffer.words32)
            self._deliver(record, buffer, host, None)
            return None

        self._run(self._plan.records, compute, self.committed.places)
        return self._store.read_blob(self.committed)

    # --- the step ----------------------------------------------------------------------------

    def update(self, plan: StepPlan, host: HostPort) -> None:
        """See `Device.update`: every record that a gradient or an edit touches, forward order."""
        active = plan.table[:, T_ACTIVE] != 0
        records = [
            record
            for record in self._plan.records
            if record.index in plan.edited or any(active[p.parameter] for p in record.pieces)
        ]

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            num_tensors = self._layout.num_state_tensors
            tensors = state.reshape(num_tensors, record.length)
            before, after = StateChecksum(num_tensors), StateChecksum(num_tensors)
            edits = self._edits(record, host)
            if edits and self._check_reads:
                self._require(record, self._checksum(record, buffer))
            self._merge(edits, state)
            for begin, end, pieces in self._blocks[record.index]:
                if self._check_reads and not edits:
                    before.update(tensors[:, begin:end])
                self._kernel(
                    state,
                    record.length,
                    self.gradients.grads16,
                    self.gradients.grads32,
                    self.gradients.formats,
                    pieces,
                    plan.table,
                    buffer.words16,
                    buffer.words32,
                )
                after.update(tensors[:, begin:end])
            padding = buffer.bytes[state.nbytes : self._layout.record_nbytes(record.length)]
            if self._check_reads and not edits:
                self._require(record, before.digest(padding))
            self._deliver(record, buffer, host, active)
            return after.digest(padding)

        self._written = {}
        if self._in_place:
            self._store.mark_dirty(plan.step_id)
        self._timings = self._run(records, compute, self.committed.places)

    def commit(self, commit: Commit) -> None:
        """See `Device.commit`."""
        self._store.commit(commit, self._written)
        self._written = {}

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

    def read_state(self, run: int) -> list[npt.NDArray[np.float32]]:
        """See `Device.read_state`."""
        own = self._plan.runs[run]
        out = np.empty((self._layout.num_state_tensors, own.length), np.float32)

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            if self._check_reads:
                self._require(record, self._checksum(record, buffer))
            tensors = state.reshape(self._layout.num_state_tensors, record.length)
            for piece in record.pieces:
                if piece.run == run:
                    begin = piece.start - own.start
                    place = slice(piece.record_offset, piece.record_offset + piece.length)
                    out[:, begin : begin + piece.length] = tensors[:, place]
            return None

        records = [self._plan.records[index] for index in self._record_of_run[run]]
        self._run(records, compute, self.committed.places)
        return list(out)

    @property
    def last_timings(self) -> Timings:
        """See `Device.last_timings`."""
        return self._timings

    def close(self) -> None:
        """See `Device.close`."""
        self._close_files()
        self._lock.release()

    # --- helpers -----------------------------------------------------------------------------

    def _run(
        self,
        records: Sequence[Record],
        compute: Compute,
        places: npt.NDArray[np.uint8] | None,
    ) -> Timings:
        assert self._handler is not None, "create() or settle() comes first"
        return self._handler.run(records, compute, places, self._written)

    def _checksum(self, record: Record, buffer: Buffer) -> int:
        data = buffer.bytes[: self._layout.record_nbytes(record.length)]
        return state_checksum(data, record.length, self._layout.num_state_tensors)

    def _require(self, record: Record, checksum: int) -> None:
        """Refuse a record that differs from what was committed."""
        committed = self.committed
        if checksum != int(committed.checksums[record.index]):
            place = slots.STATE[int(committed.places[record.index])]
            what = f"state record {record.index} in {place}"
            raise self._store.corrupt(what, committed.step)

    def _edits(self, record: Record, host: HostPort) -> list[tuple[Piece, Words]]:
        """The pieces whose words the user has changed since they were delivered."""
        fetched = [
            (piece, host.edited_weights(record, index, piece))
            for index, piece in enumerate(record.pieces)
        ]
        return [(piece, words) for piece, words in fetched if words is not None]

    def _merge(self, edits: Sequence[tuple[Piece, Words]], state: Floats) -> None:
        for piece, words in edits:
            form = FORMAT_OF_DTYPE[self._layout.parameters[piece.parameter].dtype]
            masters = state[piece.record_offset : piece.record_offset + piece.length]
            merge_edits(form, masters, *word_sources(form, words))

    def _deliver(
        self,
        record: Record,
        buffer: Buffer,
        host: HostPort,
        active: npt.NDArray[np.bool_] | None,
    ) -> None:
        for index, piece in enumerate(record.pieces):
            if active is not None and not active[piece.parameter]:
                continue
            place = slice(piece.record_offset, piece.record_offset + piece.length)
            is_float32 = self._layout.parameters[piece.parameter].dtype == "float32"
            words: Words = buffer.words32[place] if is_float32 else buffer.words16[place]
            host.deliver_weights(record, index, piece, words)

    def _start_handler(self) -> None:
        self._handler = TransferHandler(
            self._layout,
            self._store.files,
            self._num_workers,
            self._longest,
            self._computing,
            self.path,
            in_place=self._in_place,
        )

    def _close_files(self) -> None:
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        self._store.close()
