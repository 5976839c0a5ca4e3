"""The main path: `offload()` wires everything, and `Engine.step` is the whole step.

backward -> gradients -> host link -> devices: landing zone
                                          |  read state record (current slot)
                                          |  kernel: unscale, clip, optimizer, cast
                                          |  write state record (other slot)
forward  <- weights  <-  host link  <-----+
"""

from __future__ import annotations

import logging
import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity import kernels, snapshots
from smart_infinity.beginning import begin, go_back
from smart_infinity.checkpointing import HostState
from smart_infinity.devices import check_specs, open_devices
from smart_infinity.devices.base import Device, StepPlan
from smart_infinity.errors import UnsupportedError
from smart_infinity.guard import Guard, State
from smart_infinity.hyperparameters import step_table
from smart_infinity.interrupts import deferred_interrupt
from smart_infinity.link import HostLink
from smart_infinity.optimizer import OffloadedOptimizer
from smart_infinity.planning import Plan, check_memory, parse_bytes, plan, summary
from smart_infinity.recipe import group_members
from smart_infinity.recovery import in_order
from smart_infinity.storage.ledger import LedgerRecord, StepId
from smart_infinity.storage.store import Commit
from smart_infinity.stream import GradientStream
from smart_infinity.weights import HostWeights

logger = logging.getLogger("smart_infinity")

Groups = list[dict[str, Any]]
Counts = npt.NDArray[np.int64]
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
ResultT = TypeVar("ResultT")

# Weak in model and engine: an engine holds the model's modules, and must not keep them alive.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[Engine], Guard]] = (
    weakref.WeakKeyDictionary()
)


def offload(
    model: ModuleT,
    torch_optimizer: torch.optim.Optimizer,
    devices: Sequence[str | os.PathLike[str]],
    dtype: torch.dtype | None = None,
    device_memory: int | str | None = None,
    resume: bool | None = None,
    durability: Literal["step", "none"] = "step",
    verify: Literal["resume", "read"] = "resume",
    keep_snapshots: int = 2,
) -> tuple[ModuleT, OffloadedOptimizer]:
    """Move an optimizer's state to storage devices, which from then on run the optimizer.

    Args:
        model: a module on the CPU. It is changed in place and returned.
        torch_optimizer: a new `torch.optim.AdamW`, `Adam`, `SGD` or `Adagrad` over parameters of
            the model; class, groups and hyper-parameters are taken from it.
        devices: 1 to 16 existing directories, one per drive. Those of a state that is resumed
            may come in any order.
        dtype: cast the parameters (not the buffers) to this after the fp32 masters were taken
            from the weights as given; None leaves them.
        device_memory: budget per device for gradients and transfer buffers, in bytes or as in
            ``"512MiB"``; None takes what is needed.
        resume: where the directories hold a state: True continues it, False discards it and its
            snapshots, None raises. Empty or half-made directories start fresh in any case.
        durability: ``"step"`` commits each step beside the one before, so that a crash at any
            instant leaves a complete step. ``"none"`` updates in place and takes half the space:
            a crash in the middle of a step leaves nothing but snapshots, and is refused on a
            resume; between steps the state is whole.
        verify: when the checksums of state are checked: ``"resume"``, or at each ``"read"`` too.
        keep_snapshots: how many of the snapshots that ``state_dict()`` makes are kept; 0 makes
            none.

    Returns:
        The model, and the `OffloadedOptimizer` to use in place of ``torch_optimizer``.

    Raises:
        SmartInfinityError: one of its subclasses, before the model is changed. Only a resume that
            finds damaged state may have moved weights by then; forward and saving then raise.
    """
    if resume not in (True, False, None):
        raise UnsupportedError(f"resume is {resume!r}. Expected True, False or None")
    _check_choice("durability", durability, ("step", "none"))
    _check_choice("verify", verify, ("resume", "read"))
    if not isinstance(keep_snapshots, int) or keep_snapshots < 0:
        raise UnsupportedError(f"keep_snapshots is {keep_snapshots!r}. Expected 0 or more")
    paths = check_specs(devices)
    if resume:
        paths = in_order(paths)
    budget = parse_bytes(device_memory)
    planned = plan(model, torch_optimizer, len(paths), dtype)
    if budget is None:
        check_memory(planned.layout)
    failed = _failed_guard(model)
    kernels.prepare(planned.layout.optimizer)
    opened: list[Device] = []
    engine: Engine | None = None
    try:
        for device in open_devices(
            paths,
            planned.layout,
            in_place=durability == "none",
            check_reads=verify == "read",
        ):
            opened.append(device)
        engine = Engine(model, planned, opened, torch_optimizer)
        torn_set = failed.torn_set if failed is not None else None
        begin(engine, torch_optimizer.param_groups, dtype, budget, resume, torn_set)
        engine.connect()  # hooks come last, when all is well
    except BaseException as error:
        for device in opened:
            device.abandon()
            device.close()
        if engine is not None and engine.weights_moved:
            engine.guard.alarm(model, error, engine.set_uuid)
            _engines[model] = weakref.ref(engine), engine.guard
        raise
    if failed is not None:
        failed.silence()
    _engines[model] = weakref.ref(engine), engine.guard
    logger.info("%s", summary(planned.layout))
    return model, OffloadedOptimizer(engine, torch_optimizer, keep_snapshots)


class Engine:
    """One offloaded model: its weights, its gradients, its devices, and the step."""

    def __init__(
        self,
        model: torch.nn.Module,
        planned: Plan,
        devices: Sequence[Device],
        source: torch.optim.Optimizer,
    ) -> None:
        self.layout, self.devices = planned.layout, devices
        self.model, self.source = weakref.ref(model), source
        self.parameters = planned.parameters
        self.index_of = {id(p): index for index, p in enumerate(planned.parameters)}
        self.link = HostLink()
        self.weights = HostWeights(planned.layout, planned.parameters, planned.owners, self.link)
        self.steps = self.committed_step = 0
        self.step_was_skipped = self._warned_of_skip = False
        self._counts = np.zeros(len(planned.parameters), np.int64)
        self.set_uuid, self._attempt = str(uuid.uuid4()), os.urandom(16)
        self.step_id: StepId = (0, 0, self._attempt)
        self.host_state = HostState(self.model, weakref.WeakMethod(self.amend))
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="smart-infinity")
        self.guard = Guard()
        self.weights_moved = False  # by a resume; if it fails then, the model is torn
        self.on_release: list[Callable[[], object]] = []

    def connect(self) -> None:
        """Let gradients stream from the model's parameters to the devices."""
        self.gradients = GradientStream(
            self.layout, self.parameters, self.devices, self.link, self.guard
        )

    # --- the step --------------------------------------------------------------------------

    def step(self, groups: Groups) -> None:
        """One optimizer step, from landed gradients to committed state."""
        self.guard()
        with deferred_interrupt():
            self.weights.check_identity()
            self.host_state.warn_of_forgotten()
            active = self.gradients.collect()
            table, counts = step_table(
                self.layout, groups, self.index_of, self._counts, active, self.gradients.pending
            )
            self.step_was_skipped = not self._all_finite(active)
            if self.step_was_skipped or not active.any():
                return
            edits = self.weights.find_edits(active)
            commit = self.make_commit(self.steps + 1, groups, counts)
            try:
                self.on_all_devices(
                    lambda device, index: self._update(
                        device, StepPlan(commit.step_id, table, edits[index]), index, commit
                    )
                )
            except BaseException as error:
                self._fail(error)
                raise
            self.weights.announce(active)
            self.adopt(self.devices[0].committed)
            self.host_state.committed(commit.blob)

    def _update(self, device: Device, step: StepPlan, index: int, commit: Commit) -> None:
        self.link.carry("control", step.table)
        device.update(step, self.weights.port(index))
        self.link.count("control", len(commit.blob))
        device.commit(commit)

    def _fail(self, error: BaseException) -> None:
        self._release()
        self.guard.alarm(self.model(), error, self.set_uuid)

    def _all_finite(self, active: npt.NDArray[np.bool_]) -> bool:
        for index in np.flatnonzero(active):
            if not self.gradients.is_finite(int(index)):
                if not self._warned_of_skip:
                    self._warned_of_skip = True
                    logger.warning(
                        "step %d skipped: the gradient of %s is not finite; nothing moved. Later "
                        "skips are not logged, see optimizer.step_was_skipped",
                        self.steps + 1,
                        self.gradients.name(int(index)),
                    )
                return False
        return True

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
        with deferred_interrupt():
            blob = self.host_state.encode_amendment(self.source.param_groups)
            self.link.count("control", len(blob) * len(self.devices))
            try:
                self.on_all_devices(lambda device, _: device.amend(blob))
            except BaseException as error:
                self._fail(error)
                raise
            self.host_state.amended(blob)

    def members(self, groups: Groups) -> list[list[int]]:
        """By group, the layout's indices of its offloaded parameters."""
        return group_members(groups, self.index_of)

    def register(self, objects: tuple[Any, ...]) -> None:
        """See `OffloadedOptimizer.register_for_checkpointing`."""
        self.guard()
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
        self.guard()
        with deferred_interrupt():
            groups, keepers = self.source.param_groups, [own.snapshots for own in self.devices]
            snapshots.check(keepers, name)
            self.host_state.check(keepers[0].read_blob(name), self.members(groups))
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
            self._release()
            self.guard.state = State.CLOSED

    def _release(self) -> None:
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
        self.guard()
        index = self.index_of.get(id(parameter))
        if index is None:
            raise UnsupportedError(
                "read_state() was given a tensor that is not an offloaded parameter. Expected one "
                "of the model's trainable parameters"
            )
        names = ("master", *self.layout.moments)
        shape = self.layout.parameters[index].shape
        state = {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name in names}
        for number, run in self.layout.runs_of[index]:
            own = self.layout.devices[number].runs[run]
            place = slice(own.start, own.start + own.length)
            tensors = self.devices[number].read_state(run)
            for name, values in zip(names, tensors, strict=True):
                state[name].view(-1).numpy()[place] = self.link.carry("state_to_host", values)
        if self.layout.optimizer != "sgd":
            state["step"] = torch.tensor(float(self._counts[index]), device="cpu")
        return state

    def manifest(self) -> dict[str, str | int]:
        """Which state this is."""
        _, step, attempt = self.step_id
        return {
            "set_uuid": self.set_uuid,
            "layout_hash": self.layout.hash(),
            "step": step,
            "attempt": attempt.hex(),
        }

    def on_all_devices(self, call: Callable[[Device, int], ResultT]) -> list[ResultT]:
        """Run on all devices at once; waits for every one before it raises the first error."""
        futures = [
            self._pool.submit(call, device, index) for index, device in enumerate(self.devices)
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise UnsupportedError(f"{name} is {value!r}. Expected {expected}")


def _failed_guard(model: torch.nn.Module) -> Guard | None:
    """The guard of the failure that tore this model's weights, if one did."""
    reference, guard = _engines.get(model, (None, None))
    if reference is None or guard is None:
        return None
    if guard.state is State.OPEN and reference() is not None:
        raise UnsupportedError(
            "the model is offloaded already. Call close() on its optimizer first"
        )
    return guard if guard.state is State.FAILED else None
