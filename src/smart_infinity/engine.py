"""The main path: `Engine.step` is the whole step.

backward -> gradients -> host link -> devices: landing zone
                                          |  read state record (current slot)
                                          |  kernel: unscale, clip, optimizer, cast
                                          |  write state record (other slot)
forward  <- weights  <-  host link  <-----+
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity import snapshots
from smart_infinity.ahead import Ahead
from smart_infinity.arrivals import Arrivals
from smart_infinity.beginning import go_back
from smart_infinity.checkpointing import HostState
from smart_infinity.cuda.gradients import GradientDescent
from smart_infinity.cuda.weights import CudaWeights
from smart_infinity.devices.base import NO_PENDING, Device, StepPlan
from smart_infinity.gate import Gate
from smart_infinity.guard import Guard, State
from smart_infinity.hyperparameters import step_table
from smart_infinity.interrupts import deferred_interrupt
from smart_infinity.link import HostLink
from smart_infinity.pace import Pace
from smart_infinity.planning import Plan
from smart_infinity.reading import read_state
from smart_infinity.recipe import group_members
from smart_infinity.storage.ledger import LedgerRecord, StepId
from smart_infinity.storage.store import Commit
from smart_infinity.stream import GradientStream
from smart_infinity.timeline import Timeline
from smart_infinity.weights import HostWeights

Groups = list[dict[str, Any]]
Counts = npt.NDArray[np.int64]
ResultT = TypeVar("ResultT")


class Engine:
    """One offloaded model: its weights, its gradients, its devices, and the step."""

    def __init__(
        self,
        model: torch.nn.Module,
        planned: Plan,
        devices: Sequence[Device],
        source: torch.optim.Optimizer,
        pace: Pace,
        timeline: Timeline,
    ) -> None:
        self.layout, self.devices = planned.layout, devices
        self.model, self.source = weakref.ref(model), source
        self.parameters = planned.parameters
        self.index_of = {id(p): index for index, p in enumerate(planned.parameters)}
        self.link = HostLink()
        self.arrivals = Arrivals()
        self._home = planned.parameters[0].device  # a GPU, or the CPU
        kind = CudaWeights if self._home.type == "cuda" else HostWeights
        self.weights = kind(
            planned.layout, planned.parameters, planned.owners, self.link, self.arrivals
        )
        self.steps = self.committed_step = 0
        self.step_was_skipped = False
        self._counts = np.zeros(len(planned.parameters), np.int64)
        self.set_uuid, self._attempt = str(uuid.uuid4()), os.urandom(16)
        self.step_id: StepId = (0, 0, self._attempt)
        self.host_state = HostState(self.model, weakref.WeakMethod(self.amend))
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="smart-infinity")
        self._pace, self._timeline, self._under_way = pace, timeline, list[Future[None]]()
        self._lock, self._uncommitted = threading.Lock(), 0
        self._gate: Gate | None = None
        self._ahead: Ahead | None = None
        self.guard = Guard()
        self.weights_moved = False  # by a resume; if it fails then, the model is torn
        self.on_release: list[Callable[[], object]] = [timeline.close]
        # Of an optimizer that is dropped, and of a script that just ends.
        self._saver = weakref.finalize(self, _save_all, list(devices), os.getpid())

    def connect(self) -> None:
        """Let gradients stream from the model's parameters to the devices."""
        if self._pace.works_ahead:
            self._ahead = Ahead(
                self.devices,
                self.link,
                self.arrivals,
                self.guard,
                len(self.parameters),
                self._pace.accumulation_steps or 1,
                self._expected_table if self._pace.updates_early else None,
            )
        model = self.model()
        if self._pace.overlap and self._ahead is not None and model is not None:
            names = [spec.name for spec in self.layout.parameters]
            self._gate = Gate(
                model,
                self.parameters,
                names,
                self.arrivals,
                self.guard,
                self.synchronize,
                self.weights.show,
                self._timeline,
                self._ahead,
            )
            self.on_release.append(self._gate.remove)
        self.gradients = GradientStream(
            self.layout,
            self.parameters,
            self.devices,
            self.link,
            self.guard,
            self.arrivals,
            self._gate,
            self._ahead,
            GradientDescent(self._home) if self._home.type == "cuda" else None,
            self._timeline,
        )

    # --- the step --------------------------------------------------------------------------

    def step(self, groups: Groups) -> None:
        """One optimizer step, from landed gradients to committed state."""
        self.synchronize()
        with deferred_interrupt(), self._timeline.step(self.steps + 1):
            self.weights.check_identity()
            self.host_state.warn_of_forgotten()
            active = self.gradients.collect()
            if self._pace.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self._pace.max_grad_norm)
            table, counts = step_table(
                self.layout, groups, self.index_of, self._counts, active, self.gradients.pending
            )
            self.step_was_skipped = not self.gradients.are_finite(active, self.steps + 1)
            if self.step_was_skipped or not active.any():
                if self._ahead is not None:
                    self._ahead.drop()
                return
            edits = self.weights.find_edits(active)
            commit = self.make_commit(self.steps + 1, groups, counts)
            plans = [StepPlan(commit.step_id, table, edited) for edited in edits]
            self._begin(plans, commit, np.flatnonzero(active).tolist())
            if not self._pace.overlap:
                self.synchronize()
            self.weights.announce(active)
            self.host_state.committed(commit.blob)

    def _begin(self, plans: Sequence[StepPlan], commit: Commit, active: Sequence[int]) -> None:
        """Set all devices to work on a step."""
        self.weights.follow()
        self.arrivals.begin({index: self.weights.num_pieces(index) for index in active})
        if self._gate is not None:
            self._gate.begin(active)
        self.steps, self._counts = commit.step_id[1], commit.counts
        self._uncommitted = len(self.devices)
        self._under_way = [
            self._pool.submit(self._update, device, plans[index], index, commit)
            for index, device in enumerate(self.devices)
        ]
        if self._ahead is not None:
            self._ahead.reset()

    def _update(self, device: Device, step: StepPlan, index: int, commit: Commit) -> None:
        try:
            self.link.carry("control", step.table)
            device.update(step, self.weights.port(index))
            self.link.count("control", len(commit.blob))
            device.commit(commit)
            with self._lock:
                self._uncommitted -= 1
                is_complete = self._uncommitted == 0
            if is_complete:
                for each in self.devices:
                    each.allow_writes()
        except BaseException:
            self.arrivals.end(has_failed=True)
            raise

    def _expected_table(self) -> npt.NDArray[np.float32]:
        """Of the next step, if all parameters have a gradient that nothing scales."""
        every, groups = np.ones(len(self.parameters), np.bool_), self.source.param_groups
        pending = [NO_PENDING] * len(self.parameters)
        return step_table(self.layout, groups, self.index_of, self._counts, every, pending)[0]

    def synchronize(self) -> None:
        """Wait until the step under way is committed, and raise what it raised."""
        self.guard()
        if self._under_way:
            with self._timeline.waiting("the step"):
                wait(self._under_way)
            errors = [error for own in self._under_way if (error := own.exception()) is not None]
            self._under_way = []
            if errors:
                self._fail(errors[0])
                raise errors[0]
            self.weights.show_all()
            self.adopt(self.devices[0].committed)
            if self._gate is not None:
                self._gate.opened()

    def _fail(self, error: BaseException) -> None:
        self.steps = self.committed_step
        self._release()
        self.guard.alarm(self.model(), error, self.set_uuid)

    # --- committing --------------------------------------------------------------------------

    def make_commit(self, step: int, groups: Groups, counts: Counts | None = None) -> Commit:
        """What all devices commit with a step: its identity, step counts, and the host's part."""
        blob = self.host_state.encode(groups, self.members(groups))
        step_id = self.step_id[0], step, self._attempt
        return Commit(step_id, self._counts if counts is None else counts, blob)

    def amend(self) -> None:
        """Replace the host's part of the committed step: a scheduler has moved since."""
        if self.guard.state is not State.OPEN or self.guard.is_forked or not self.steps:
            return
        self.synchronize()
        with deferred_interrupt():
            blob = self.host_state.encode_amendment(self.source.param_groups)
            self.link.count("control", len(blob) * len(self.devices))
            try:
                self.on_all_devices(lambda device, _: device.amend(blob))
            except BaseException as error:
                self._fail(error)
                raise
            self.host_state.amended(blob)

    def save(self) -> None:
        """Wait for the step under way, and make what is in memory only durable."""
        self.synchronize()
        with deferred_interrupt():
            try:
                self.on_all_devices(lambda device, _: device.save())
            except BaseException as error:
                self._fail(error)
                raise

    def members(self, groups: Groups) -> list[list[int]]:
        """By group, the layout's indices of its offloaded parameters."""
        return group_members(groups, self.index_of)

    def register(self, objects: tuple[Any, ...]) -> None:
        """See `OffloadedOptimizer.register_for_checkpointing`."""
        self.synchronize()
        groups = self.source.param_groups
        self.host_state.register(objects, groups)
        size = len(self.host_state.encode(groups, self.members(groups)))
        self.on_all_devices(lambda device, _: device.reserve_blob(size))

    def adopt(self, record: LedgerRecord) -> None:
        """Continue from a step that the devices have committed."""
        self.step_id = record.step_id
        self.steps = self.committed_step = record.step
        self._counts = record.counts

    def restore(self, name: str) -> None:
        """See `OffloadedOptimizer.restore`."""
        self.synchronize()
        with deferred_interrupt():
            groups, keepers = self.source.param_groups, [own.snapshots for own in self.devices]
            snapshots.check(keepers, name)
            self.host_state.check(keepers[0].read_blob(name), self.members(groups))
            if self._ahead is not None:
                self._ahead.drop()
            try:
                go_back(self, name, groups)
            except BaseException as error:
                self._fail(error)
                raise
            # The same step made again is another one than that which was given up.
            self._attempt = os.urandom(16)

    # --- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the devices and make the model an ordinary one."""
        if self.guard.state is State.OPEN and not self.guard.is_forked:
            self.save()
            self._release()
            self.guard.state = State.CLOSED

    def _release(self) -> None:
        self._saver.detach()
        self.host_state.forget()
        for undo in self.on_release:
            undo()
        self.gradients.detach()
        self._pool.shutdown(wait=True)
        for device in self.devices:
            device.close()

    # --- reading ---------------------------------------------------------------------------

    def read_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """See `OffloadedOptimizer.read_state`."""
        self.synchronize()
        index = self.index_of.get(id(parameter))
        return read_state(self.layout, self.devices, self.link, index, self._counts)

    def on_all_devices(self, call: Callable[[Device, int], ResultT]) -> list[ResultT]:
        """Run on all devices at once; waits for every one before it raises the first error."""
        futures = [
            self._pool.submit(call, device, index) for index, device in enumerate(self.devices)
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _save_all(devices: Sequence[Device], pid: int) -> None:
    if os.getpid() == pid:
        for device in devices:
            device.save()
