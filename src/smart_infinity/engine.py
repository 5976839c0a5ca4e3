"""The main path: `offload()` wires everything, and `Engine.step` is the whole step.

backward -> gradients -> host link -> devices: landing zone
                                          |  read state record (current slot)
                                          |  kernel: unscale, clip, optimizer, cast
                                          |  write state record (other slot)
forward  <- weights  <-  host link  <-----+
"""

from __future__ import annotations

import errno
import json
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity import kernels
from smart_infinity.devices import check_specs, open_device
from smart_infinity.devices.base import Commit, Device, StepPlan
from smart_infinity.errors import (
    DeviceFullError,
    DeviceIOError,
    StateMismatchError,
    UnsupportedError,
)
from smart_infinity.guard import Guard, State
from smart_infinity.hyperparameters import step_table
from smart_infinity.interrupts import deferred_interrupt
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.layout import FORMAT_VERSION
from smart_infinity.link import HostLink
from smart_infinity.optimizer import OffloadedOptimizer
from smart_infinity.planning import Plan, check_memory, parse_bytes, plan, summary
from smart_infinity.recipe import (
    initial_moment,
    restore_scalars,
    scalars,
)
from smart_infinity.recovery import recover
from smart_infinity.storage.ledger import LedgerRecord
from smart_infinity.storage.slots import Superblock
from smart_infinity.stream import GradientStream
from smart_infinity.weights import DTYPES, HostWeights

logger = logging.getLogger("smart_infinity")

Groups = list[dict[str, Any]]
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
) -> tuple[ModuleT, OffloadedOptimizer]:
    """Move an optimizer's state to storage devices, which from then on run the optimizer.

    Args:
        model: a module on the CPU. It is changed in place and returned.
        torch_optimizer: a new `torch.optim.AdamW`, `Adam`, `SGD` or `Adagrad` over parameters of
            the model; class, groups and hyper-parameters are taken from it.
        devices: 1 to 16 existing directories, one per drive.
        dtype: cast the parameters (not the buffers) to this after the fp32 masters were taken
            from the weights as given; None leaves them.
        device_memory: budget per device for gradients and transfer buffers, in bytes or as in
            ``"512MiB"``; None takes what is needed.
        resume: where the directories hold a state: True continues it, False discards it, None
            raises. Empty or half-made directories start fresh in any case.

    Returns:
        The model, and the `OffloadedOptimizer` to use in place of ``torch_optimizer``.

    Raises:
        SmartInfinityError: one of its subclasses, before the model is changed. Only a resume that
            finds damaged state may have moved weights by then; forward and saving then raise.
    """
    if resume not in (True, False, None):
        raise UnsupportedError(f"resume is {resume!r}. Expected True, False or None")
    paths = check_specs(devices)
    budget = parse_bytes(device_memory)
    planned = plan(model, torch_optimizer, len(paths), dtype)
    if budget is None:
        check_memory(planned.layout)
    failed = _failed_guard(model)
    kernels.prepare(planned.layout.optimizer)
    opened: list[Device] = []
    engine: Engine | None = None
    try:
        for index, path in enumerate(paths):
            opened.append(open_device(path, planned.layout, index))
        engine = Engine(model, planned, opened)
        torn_set = failed.torn_set if failed is not None else None
        engine.begin(torch_optimizer.param_groups, dtype, budget, resume, torn_set)
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
    return model, OffloadedOptimizer(engine, torch_optimizer)


class Engine:
    """One offloaded model: its weights, its gradients, its devices, and the step."""

    def __init__(self, model: torch.nn.Module, planned: Plan, devices: Sequence[Device]) -> None:
        self.layout, self.devices = planned.layout, devices
        self._model = weakref.ref(model)
        self._parameters = planned.parameters
        self._index_of = {id(p): index for index, p in enumerate(planned.parameters)}
        self.link = HostLink()
        self.weights = HostWeights(planned.layout, planned.parameters, planned.owners, self.link)
        self.steps = self.committed_step = 0
        self.step_was_skipped = self._warned_of_skip = False
        self._counts = np.zeros(len(planned.parameters), np.int64)
        self.set_uuid, self._attempt = str(uuid.uuid4()), os.urandom(16)
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="smart-infinity")
        self.guard = Guard()
        self.weights_moved = False  # by a resume; if it fails then, the model is torn
        self.on_release: list[Callable[[], object]] = []

    # --- the step --------------------------------------------------------------------------

    def step(self, groups: Groups) -> None:
        """One optimizer step, from landed gradients to committed state."""
        self.guard()
        with deferred_interrupt():
            self.weights.check_identity()
            active = self.gradients.collect()
            table, counts = step_table(
                self.layout, groups, self._index_of, self._counts, active, self.gradients.pending
            )
            self.step_was_skipped = not self._all_finite(active)
            if self.step_was_skipped or not active.any():
                return
            edits = self.weights.find_edits(active)
            commit = self._commit(self.steps + 1, counts, groups)
            try:
                self._on_all_devices(
                    lambda device, index: self._update(
                        device, StepPlan(table, edits[index]), index, commit
                    )
                )
            except BaseException as error:
                self._release()
                self.guard.alarm(self._model(), error, self.set_uuid)
                raise
            self.weights.announce(active)
            self.steps = self.committed_step = commit.step
            self._counts = counts

    def _update(self, device: Device, step: StepPlan, index: int, commit: Commit) -> None:
        self.link.carry("control", step.table)
        device.update(step, self.weights.port(index))
        self.link.count("control", len(commit.blob))
        device.commit(commit)

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

    # --- beginning and ending --------------------------------------------------------------

    def begin(
        self,
        groups: Groups,
        dtype: torch.dtype | None,
        device_memory: int | None,
        resume: bool | None,
        torn_set: str | None,
    ) -> None:
        """Make the first state or continue the one found; hooks come last, when all is well.

        ``torn_set`` is the set whose failure tore the model's weights, or None.
        """
        found = recover(self.devices, self.layout, resume, torn_set)
        for device in self.devices:
            device.attach(device_memory)
        if found is None:
            if torn_set is not None:
                logger.warning(
                    "the model's weights were torn by a failure, and resume=False takes them as "
                    "they are now. Load weights into the model first, unless that was done"
                )
            if resume:
                logger.warning(
                    "resume=True, but %s hold no step yet: starting fresh",
                    [device.path for device in self.devices],
                )
            try:
                self._begin_anew(groups)
            except DeviceIOError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise DeviceFullError(
                    f"device {error.device}: its file system became full while {error.path} was "
                    "written. Free some space, or add a device; nothing was left reserved"
                ) from error
            self._cast(dtype)
            self.weights.take_fingerprints()
        else:
            self._continue_from(found, groups, dtype)  # fingerprints are taken on delivery
        self.gradients = GradientStream(
            self.layout, self._parameters, self.devices, self.link, self.guard
        )

    def _begin_anew(self, groups: Groups) -> None:
        for device in self.devices:
            device.create()
        formats = [FORMAT_OF_DTYPE[DTYPES[p.dtype]] for p in self._parameters]
        moments: list[list[float]] = [[] for _ in self._parameters]
        for group in groups:
            value = initial_moment(self.layout.optimizer, group)
            for parameter in group["params"]:
                if id(parameter) in self._index_of:
                    moments[self._index_of[id(parameter)]] = [value] * len(self.layout.moments)
        commit = self._commit(0, self._counts, groups)
        self._on_all_devices(
            lambda device, index: device.initialize(
                self.weights.port(index), formats, moments, commit
            )
        )
        # Superblocks come last: where there is one, there is a state.
        for index, device in enumerate(self.devices):
            device.seal(
                Superblock(
                    FORMAT_VERSION,
                    self.set_uuid,
                    index,
                    len(self.devices),
                    self.layout.hash(),
                    self.layout.optimizer,
                )
            )

    def _continue_from(
        self, found: Sequence[LedgerRecord], groups: Groups, dtype: torch.dtype | None
    ) -> None:
        """Go back to a committed step. All that can be refused is, before a weight moves."""
        superblock = self.devices[0].identify()
        assert superblock is not None, "recover() has read it"
        blobs = self._on_all_devices(lambda device, index: device.settle(found[index]))
        saved = json.loads(blobs[0])
        if saved["members"] != self._members(groups):
            raise StateMismatchError(
                "the param_groups of the state hold other parameters than the optimizer's do: "
                f"{[len(own) for own in saved['members']]} against "
                f"{[len(own) for own in self._members(groups)]} in each, or in another order. "
                "Expected the groups of the run to be continued"
            )
        self.set_uuid = superblock.set_uuid
        with deferred_interrupt():
            self.weights_moved = True
            self._cast(dtype)
            self._on_all_devices(lambda device, index: device.restore(self.weights.port(index)))
            for group, own in zip(groups, saved["param_groups"], strict=True):
                restore_scalars(group, own)
        self.steps = self.committed_step = found[0].step
        self._counts = found[0].counts

    def _cast(self, dtype: torch.dtype | None) -> None:
        model = self._model()
        if dtype is not None and model is not None:
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.dtype is not dtype:
                    parameter.data = parameter.data.to(dtype)
        self.weights.bind()

    def _commit(self, step: int, counts: npt.NDArray[np.int64], groups: Groups) -> Commit:
        blob = json.dumps(
            {
                "param_groups": [scalars(group) for group in groups],
                "members": self._members(groups),
            }
        )
        return Commit(step, self._attempt, counts, blob.encode())

    def _members(self, groups: Groups) -> list[list[int]]:
        """By group, the layout's indices of its offloaded parameters."""
        return [
            [self._index_of[id(p)] for p in group["params"] if id(p) in self._index_of]
            for group in groups
        ]

    def close(self) -> None:
        """Release the devices and make the model an ordinary one."""
        if self.guard.state is State.OPEN and not self.guard.is_forked:
            self._release()
            self.guard.state = State.CLOSED

    def _release(self) -> None:
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
        index = self._index_of.get(id(parameter))
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
        return {
            "set_uuid": self.set_uuid,
            "step": self.committed_step,
            "layout_hash": self.layout.hash(),
        }

    def _on_all_devices(self, call: Callable[[Device, int], ResultT]) -> list[ResultT]:
        """Run on all devices at once; waits for every one before it raises the first error."""
        futures = [
            self._pool.submit(call, device, index) for index, device in enumerate(self.devices)
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


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
