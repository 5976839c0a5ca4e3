"""A directory of this machine as a device: storage behind a transfer handler, Numba kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from smart_infinity.devices.base import (
    Commit,
    Device,
    HostPort,
    StepPlan,
    Words,
)
from smart_infinity.devices.memory import LandingZone, landing_zone_nbytes, word_sources
from smart_infinity.devices.tables import piece_tables, records_of_runs
from smart_infinity.errors import (
    CorruptStateError,
    DeviceFullError,
    DeviceIOError,
    DeviceMemoryError,
    DeviceSpecError,
)
from smart_infinity.kernels import OPTIMIZERS, encode_record, load_masters, merge_edits
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.frame import T_ACTIVE
from smart_infinity.layout import PAGE_BYTES, Layout, Record
from smart_infinity.storage import slots
from smart_infinity.storage.blockfile import BlockFile, direct_io_refusal
from smart_infinity.storage.buffers import checksum as checksum_of
from smart_infinity.storage.handler import (
    Buffer,
    Check,
    Compute,
    Timings,
    TransferHandler,
    buffer_nbytes,
)
from smart_infinity.storage.ledger import Ledger, LedgerRecord
from smart_infinity.storage.slots import Superblock

logger = logging.getLogger("smart_infinity")


class LocalDevice(Device):
    """One device of a set, in a directory. Opening it takes the directory's lock.

    Args:
        directory: an existing, writable directory.
        layout: the plan of the whole set.
        index: which device of the plan this is.
        num_workers: buffers of the transfer handler that are wanted; a budget may allow fewer.
    """

    def __init__(self, directory: str, layout: Layout, index: int, num_workers: int) -> None:
        self.path = directory
        self.gradients: LandingZone
        self._layout, self._plan = layout, layout.devices[index]
        self._num_workers = num_workers
        self._kernel = OPTIMIZERS[layout.optimizer].update
        self._pieces = piece_tables(layout, self._plan)
        self._record_of_run = records_of_runs(self._plan)
        self._timings = Timings()
        self._written: dict[int, tuple[int, int]] = {}
        self._longest = max((record.length for record in self._plan.records), default=0)
        self._files: list[BlockFile] = []
        self._blob_files: list[BlockFile] = []
        self._ledger: Ledger | None = None
        self._handler: TransferHandler | None = None
        self._created = False
        slots.require_directory(directory)
        self._lock = slots.DeviceLock(directory)
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
        self._direct = refusal is None

    # --- identity and reservation ---------------------------------------------------------

    def identify(self) -> Superblock | None:
        """See `Device.identify`."""
        return slots.read_superblock(self.path)

    def recorded_steps(self) -> list[LedgerRecord]:
        """See `Device.recorded_steps`."""
        if not os.path.exists(os.path.join(self.path, slots.LEDGER)):
            return []
        ledger = self._open_ledger()
        try:
            return ledger.read()
        finally:
            ledger.close()

    def create(self) -> None:
        """See `Device.create`. A full disk raises `DeviceFullError` and leaves nothing behind."""
        slots.discard(self.path)
        self._created = True
        needed = 2 * self._layout.state_nbytes(self._plan.index)
        free = os.statvfs(self.path)
        available = free.f_bavail * free.f_frsize
        try:
            if available < needed:
                raise self._full(needed, available)
            self._open_files()
            assert self._ledger is not None
            for file in self._files:
                file.reserve(self._layout.state_nbytes(self._plan.index))
            self._ledger.reserve(len(self._plan.records), len(self._layout.parameters))
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

        def compute(record: Record, state: npt.NDArray[np.float32], buffer: Buffer) -> bool:
            tensors = state.reshape(self._layout.num_state_tensors, record.length)
            for index, piece in enumerate(record.pieces):
                words = host.fetch_weights(record, index, piece)
                place = slice(piece.record_offset, piece.record_offset + piece.length)
                form = formats[piece.parameter]
                load_masters(form, tensors[0, place], *word_sources(form, words))
                tensors[1:, place] = np.array(moments[piece.parameter], np.float32)[:, None]
            return True

        for file in self._blob_files:  # room for a blob that grows by some digits
            file.reserve(2 * len(commit.blob) + PAGE_BYTES)
        self._places = np.zeros(len(self._plan.records), np.uint8)
        self._checksums = np.zeros(len(self._plan.records), np.uint64)
        self._blob_place = 1
        self._written = {}
        self._run(self._plan.records, compute, None)
        self.commit(commit)

    def seal(self, superblock: Superblock) -> None:
        """See `Device.seal`."""
        slots.write_superblock(self.path, superblock, self._layout.to_json())

    def settle(self, record: LedgerRecord) -> bytes:
        """See `Device.settle`."""
        self._open_files()
        blob = np.zeros(record.blob_nbytes, np.uint8)
        self._blob_files[record.blob_place].read_into(blob, 0)
        if checksum_of(blob) != record.blob_checksum:
            raise self._corrupt(slots.BLOB[record.blob_place], record.step)
        assert self._ledger is not None
        self._ledger.settle(record)
        self._places, self._checksums = record.places, record.checksums
        self._blob_place, self._step = record.blob_place, record.step
        self._written = {}
        return blob.tobytes()

    def restore(self, host: HostPort) -> None:
        """See `Device.restore`."""

        def check(record: Record, checksum: int) -> None:
            if checksum != int(self._checksums[record.index]):
                place = slots.STATE[int(self._places[record.index])]
                raise self._corrupt(f"state record {record.index} in {place}", self._step)

        def compute(record: Record, state: npt.NDArray[np.float32], buffer: Buffer) -> bool:
            encode_record(state, self._pieces[record.index], buffer.words16, buffer.words32)
            self._deliver(record, buffer, host, None)
            return False

        self._run(self._plan.records, compute, self._places, check)

    def _corrupt(self, what: str, step: int) -> CorruptStateError:
        return CorruptStateError(
            f"device {self.path}: {what} differs from what step {step} committed. Expected the "
            "bytes that were written; restore the directory from a copy, or load weights into the "
            "model and begin anew with resume=False"
        )

    # --- the step ----------------------------------------------------------------------------

    def update(self, plan: StepPlan, host: HostPort) -> None:
        """See `Device.update`: every record that a gradient or an edit touches, forward order."""
        active = plan.table[:, T_ACTIVE] != 0
        records = [
            record
            for record in self._plan.records
            if record.index in plan.edited or any(active[p.parameter] for p in record.pieces)
        ]

        def compute(record: Record, state: npt.NDArray[np.float32], buffer: Buffer) -> bool:
            self._merge_edits(record, state, host)
            self._kernel(
                state,
                record.length,
                self.gradients.grads16,
                self.gradients.grads32,
                self.gradients.formats,
                self._pieces[record.index],
                plan.table,
                buffer.words16,
                buffer.words32,
            )
            self._deliver(record, buffer, host, active)
            return True

        self._written = {}
        self._timings = self._run(records, compute, self._places)

    def commit(self, commit: Commit) -> None:
        """See `Device.commit`: data, sync, ledger, sync."""
        for place in {place for place, _ in self._written.values()}:
            self._files[place].sync()
        blob = np.frombuffer(commit.blob, np.uint8)
        blob_place = 1 - self._blob_place
        self._blob_files[blob_place].write_from(blob, 0)
        self._blob_files[blob_place].sync()
        places, checksums = self._places.copy(), self._checksums.copy()
        for index, (place, checksum) in self._written.items():
            places[index], checksums[index] = place, checksum
        assert self._ledger is not None, "create() or restore() comes first"
        self._ledger.write(
            LedgerRecord(
                commit.step,
                commit.attempt,
                places,
                checksums,
                commit.counts,
                blob_place,
                blob.size,
                checksum_of(blob),
            )
        )
        self._places, self._checksums, self._blob_place = places, checksums, blob_place
        self._written = {}

    def read_state(self, run: int) -> list[npt.NDArray[np.float32]]:
        """See `Device.read_state`."""
        own = self._plan.runs[run]
        out = np.empty((self._layout.num_state_tensors, own.length), np.float32)

        def compute(record: Record, state: npt.NDArray[np.float32], buffer: Buffer) -> bool:
            tensors = state.reshape(self._layout.num_state_tensors, record.length)
            for piece in record.pieces:
                if piece.run == run:
                    begin = piece.start - own.start
                    place = slice(piece.record_offset, piece.record_offset + piece.length)
                    out[:, begin : begin + piece.length] = tensors[:, place]
            return False

        records = [self._plan.records[index] for index in self._record_of_run[run]]
        self._run(records, compute, self._places)
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
        check: Check | None = None,
    ) -> Timings:
        assert self._handler is not None, "create() or restore() comes first"
        return self._handler.run(records, compute, places, self._written, check)

    def _merge_edits(self, record: Record, state: npt.NDArray[np.float32], host: HostPort) -> None:
        """Take over the words that the user has changed since they were delivered."""
        for index, piece in enumerate(record.pieces):
            words = host.edited_weights(record, index, piece)
            if words is not None:
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
            if self._layout.parameters[piece.parameter].dtype == "float32":
                begin = piece.record_offset
                words: Words = buffer.words32[begin : begin + piece.length]
            else:
                begin = 2 * piece.record_offset
                words = buffer.words16[begin : begin + piece.length]
            host.deliver_weights(record, index, piece, words)

    def _open_files(self) -> None:
        try:
            for name in slots.STATE:
                self._files.append(self._open(name, direct=self._direct))
            self._ledger = self._open_ledger()
            for name in slots.BLOB:
                self._blob_files.append(self._open(name, direct=False))
        except DeviceIOError:
            self._close_files()
            raise
        self._handler = TransferHandler(
            self._layout,
            (self._files[0], self._files[1]),
            self._num_workers,
            self._longest,
            self.path,
        )

    def _open_ledger(self) -> Ledger:
        return Ledger(self._open(slots.LEDGER, direct=False))

    def _open(self, name: str, *, direct: bool) -> BlockFile:
        return BlockFile(self.path, os.path.join(self.path, name), direct=direct)

    def _close_files(self) -> None:
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        for file in (*self._files, *self._blob_files):
            file.close()
        if self._ledger is not None:
            self._ledger.close()
        self._files, self._blob_files, self._ledger = [], [], None
