"""SmartUpdate on one device: the optimizer over its state records, in `step()` and before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from smart_infinity.devices.base import HostPort, StepPlan
from smart_infinity.devices.compute import ComputeEngine, Edits, Floats
from smart_infinity.devices.early import Early, EarlyWords, EarlyWork
from smart_infinity.devices.memory import LandingZone
from smart_infinity.devices.tables import touched_records
from smart_infinity.kernels.frame import T_ACTIVE
from smart_infinity.layout import DevicePlan, Layout, Record
from smart_infinity.storage.handler import TransferHandler
from smart_infinity.storage.store import Store
from smart_infinity.storage.tasklets import Buffer, Places, Timings


class SmartUpdate:
    """Takes a device from step to step; it commits nothing.

    Args:
        layout: the plan of the whole set.
        plan: the device's.
        store: its state on storage.
        engine: computes on records in memory.
        handler: moves them.
        gradients: where they have landed.
        early_words: room for weights that are computed before their step, or None.
        crossing: spans of a trace, for what crosses the link.
        check_reads: check the checksum of every state record that is read.

    Attributes:
        written: of the newest step: record index -> (place, checksum) of what it wrote.
    """

    def __init__(
        self,
        layout: Layout,
        plan: DevicePlan,
        store: Store,
        engine: ComputeEngine,
        handler: TransferHandler,
        gradients: LandingZone,
        early_words: EarlyWords | None,
        crossing: Callable[[str], AbstractContextManager[None]],
        *,
        check_reads: bool,
    ) -> None:
        self._plan, self._store, self._engine, self._handler = plan, store, engine, handler
        self._gradients, self._early_words, self._check_reads = gradients, early_words, check_reads
        self._crossing = crossing
        self._early = EarlyWork(layout, plan, handler, may_write=not store.in_place)
        self.written: dict[int, tuple[int, int]] = {}
        self._places: Places = store.record.places

    def settled(self) -> None:
        """What the store says is committed is the newest step."""
        self._places = self._store.record.places

    # --- before the step -----------------------------------------------------------------------

    def begin_early(self, *, updates: bool) -> None:
        """See `Device.begin_early`."""
        self.drop_early()
        own = Early(self._plan, self._gradients, self.written)
        reference = weakref.ref(self)  # threads must not keep a device that is dropped

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            self = reference()
            return None if self is None else self._update_early(own, record, state, buffer)

        self._early.begin(own, compute, self._places, backwards=updates)

    def expect(self, table: npt.NDArray[np.float32]) -> None:
        """See `Device.expect`."""
        self._early.expect(table)

    def _update_early(
        self, early: Early, record: Record, state: Floats, buffer: Buffer
    ) -> int | None:
        if early.table is None or self._early_words is None:
            return None
        versions = early.versions(record)
        check = self._check_of(record, early.previous.get(record.index))
        checksum = self._engine.update(
            record, state, buffer, self._gradients, early.table, [], check
        )
        self._early_words.keep(record, buffer)
        early.used(record, versions)
        return checksum

    def gradient_complete(self, parameter: int) -> None:
        """See `Device.gradient_complete`."""
        self._early.complete(parameter)

    def drop_early(self) -> None:
        """See `Device.drop_early`."""
        self._early.drop()

    def allow_writes(self) -> None:
        """See `Device.allow_writes`."""
        self._early.allow_writes()

    # --- the step --------------------------------------------------------------------------------

    def update(self, plan: StepPlan, host: HostPort) -> Timings:
        """Every record that a gradient or an edit touches, in forward order.

        What was updated early, as this step would have done it, is only delivered.
        """
        active = plan.table[:, T_ACTIVE] != 0
        records = touched_records(self._plan, active, plan.edited)
        edits: dict[int, Edits] = {}

        def compute(record: Record, state: Floats, buffer: Buffer) -> int | None:
            own = edits.get(record.index) or self._engine.find_edits(record, host)
            checksum = self._engine.update(
                record, state, buffer, self._gradients, plan.table, own, self._check_of(record)
            )
            with self._crossing(f"weights of record {record.index}"):
                self._engine.deliver(record, buffer, host, active)
            return checksum

        early, places = self._early.take(), self._places
        if self._store.in_place:
            self._store.mark_dirty(plan.step_id)
        else:
            # Before the first weight leaves: from then on the next step may be begun.
            self._places = places.copy()
            self._places[[record.index for record in records]] ^= 1
        if early is None:
            self.written = {}
            walk = self._handler.begin(
                records, compute, places, self.written, is_ready=True, may_write=True
            )
            return self._handler.wait(walk)
        self.written = early.written
        computed = self._handler.pause(early.walk)
        done = [own for own in records if own.index in computed]
        foreseen = [own for own in done if early.stands(own, plan.table)]
        edits |= {own.index: self._engine.find_edits(own, host) for own in foreseen}
        kept = [own for own in foreseen if not edits[own.index]]
        self._handler.plan_anew(early.walk, records, {own.index for own in kept}, compute)
        self._handler.allow_writes(early.walk)
        for record in kept:
            assert self._early_words is not None
            with self._crossing(f"weights of record {record.index}"):
                for index, piece in enumerate(record.pieces):
                    host.deliver_weights(record, index, piece, self._early_words.of(piece))
        return self._handler.wait(early.walk)

    def _check_of(
        self, record: Record, written: tuple[int, int] | None = None
    ) -> Callable[[int], None] | None:
        """With ``verify="read"``: what takes a record's checksum, and raises if it is damaged.

        ``written`` is what the step before wrote, which may not be committed yet.
        """
        if not self._check_reads:
            return None
        return lambda checksum: self._store.require(record.index, checksum, written)
