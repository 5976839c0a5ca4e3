"""`OffloadedOptimizer`: the face that users hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch

from smart_infinity import snapshots
from smart_infinity.errors import StateMismatchError, UnsupportedError
from smart_infinity.interrupts import deferred_interrupt
from smart_infinity.link import Traffic
from smart_infinity.recipe import restore_scalars, scalars

if TYPE_CHECKING:
    from smart_infinity.engine import Engine
    from smart_infinity.storage.snapshots import Snapshot

_AUTOMATIC = re.compile(r"step-\d+")


def _refuse_superseded(*_: object) -> None:
    raise UnsupportedError(
        "step() was called on the optimizer that was given to offload(). Call it on the one that "
        "offload() returned: model, optimizer = smart_infinity.offload(model, optimizer, ...)"
    )


class OffloadedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state lives on storage devices; made by `offload()`.

    ``param_groups`` are those of the torch optimizer it was made from, so that LR schedulers made
    before or after work; their values are read at each `step()`.
    """

    def __init__(self, engine: Engine, source: torch.optim.Optimizer, keep_snapshots: int) -> None:
        super().__init__(source.param_groups, source.defaults)
        self.param_groups = source.param_groups
        self._engine, self._source, self._keep_snapshots = engine, source, keep_snapshots
        # Schedulers check that the optimizer has stepped before they do; in the run that is
        # continued it has.
        self._opt_called = source._opt_called = engine.steps > 0  # type: ignore[attr-defined]
        # Adagrad makes its sums in the constructor; they are on the devices now.
        source.state.clear()
        engine.on_release.append(source.register_step_pre_hook(_refuse_superseded).remove)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run SmartUpdate on all devices; the updated weights are in the model on return.

        With ``overlap=True`` it returns when the devices have begun, and an error of theirs is
        raised by whatever waits for them next: a forward, `synchronize`, the next step.

        A step with non-finite gradients is skipped: nothing moves, and `step_was_skipped` is
        true. Ctrl-C is deferred to the end of the step.

        Args:
            closure: as in torch: re-evaluates the model and returns the loss.

        Raises:
            DeviceIOError: a device failed; the last committed step is intact.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step(self.param_groups)
        # Schedulers made from the source optimizer check that it steps before they do.
        self._source._opt_called = True  # type: ignore[attr-defined]
        return loss

    def synchronize(self) -> None:
        """Wait until the last step is committed, and its weights are in the model.

        With ``overlap=True`` a step is still under way when `step()` returns. Modules, and
        everything that this library offers, wait by themselves; call this before reading or
        changing parameters in any other way.

        Raises:
            DeviceIOError: a device failed; the step before is intact.
        """
        self._engine.synchronize()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step()` was skipped because of non-finite gradients."""
        return self._engine.step_was_skipped

    @property
    def steps(self) -> int:
        """Steps applied, over all runs of this state; skipped ones do not count."""
        return self._engine.steps

    @property
    def committed_step(self) -> int:
        """The newest step that is durable on every device."""
        return self._engine.committed_step

    @property
    def traffic(self) -> Traffic:
        """Bytes over the host link by kind, since the last ``traffic.reset()``."""
        self._engine.gradients.settle()
        return self._engine.link.traffic

    @property
    def last_timings(self) -> dict[str, dict[str, float]]:
        """Of the last step: directory -> seconds waiting, reading, computing and writing.

        Seconds are summed over the device's workers.
        """
        return {
            device.path: {
                "waiting": spent.waiting,
                "reading": spent.reading,
                "computing": spent.computing,
                "writing": spent.writing,
            }
            for device in self._engine.devices
            for spent in [device.last_timings]
        }

    @property
    def last_io(self) -> dict[str, dict[str, int]]:
        """Of the last step: directory -> bytes_read and bytes_written of state."""
        return {
            device.path: {
                "bytes_read": device.last_timings.bytes_read,
                "bytes_written": device.last_timings.bytes_written,
            }
            for device in self._engine.devices
        }

    def read_state(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Fetch a parameter's master and moments as of the last step.

        Returns:
            fp32 tensors of the parameter's shape: ``"master"`` and torch's names
            (``"exp_avg"``, ``"exp_avg_sq"``; ``"momentum_buffer"``; ``"sum"``), and, for
            optimizers that count, ``"step"`` as a 0-dim fp32 tensor.
        """
        return self._engine.read_state(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is offloaded: the layout on storage is fixed."""
        if hasattr(self, "_engine"):
            raise UnsupportedError(
                "add_param_group() after offload() is not supported. Add all groups before "
                "offload()"
            )
        super().add_param_group(param_group)

    # --- checkpoints ---------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Commit the states of these objects with every step: schedulers, samplers, loaders.

        After ``offload(..., resume=True)`` they are given back at once what the resumed step had
        committed for them, by their order. An LR scheduler is then where it was after that step,
        and so are the hyper-parameters that it sets. The random states of torch, NumPy and Python
        and the model's persistent buffers are committed without being registered.

        Args:
            objects: anything with ``state_dict`` and ``load_state_dict``. States may hold tensors,
                arrays, numbers, strings and containers of them; code is neither written nor read.

        Raises:
            UnsupportedError: an object has no state, or one that holds anything else.
            StateMismatchError: the resumed state is of another type of object.
        """
        self._engine.register(objects)

    def restore_random_state(self) -> None:
        """Put the random states back to those of the resumed step.

        `offload()` does it too; call this where the loop begins, if making a data loader or
        anything else has drawn from them since. Does nothing in a run that was not resumed, and
        after the first step.
        """
        self._engine.host_state.restore_random_state()

    def snapshot(self, name: str) -> None:
        """Keep the committed step under a name; the devices copy their own state.

        Args:
            name: letters, digits, dots, dashes and underscores. ``step-<n>`` is what
                `state_dict` uses, and removes in time.

        Raises:
            DeviceFullError: a file system has less free space than the state takes.
            StateExistsError: there is a snapshot of this name.
        """
        self._engine.save()
        with deferred_interrupt():
            snapshots.take(self._keepers(), name)

    def snapshots(self) -> list[Snapshot]:
        """The snapshots that every device holds, oldest first."""
        self._engine.synchronize()
        return snapshots.complete(self._keepers())

    def restore(self, name: str) -> None:
        """Go back to a snapshot: weights, state, hyper-parameters, registered objects, buffers.

        Later steps are given up, unless there is a snapshot of them.

        Raises:
            StateMismatchError: there is no such snapshot.
            CorruptStateError: it is damaged. In both cases nothing has changed.
        """
        self._engine.restore(name)

    def remove_snapshot(self, name: str) -> None:
        """Remove a snapshot from all devices."""
        self._engine.synchronize()
        snapshots.find(self._keepers(), name)
        snapshots.remove(self._keepers(), name)

    def _keepers(self) -> list[Any]:
        return [device.snapshots for device in self._engine.devices]

    def _keep_step(self) -> None:
        """Make the snapshot of the committed step, if there is none, and drop the oldest."""
        _, step, attempt = self._engine.step_id
        if not self._keep_snapshots or not step:
            return
        name = f"step-{step}"
        found = {own.name: own for own in self.snapshots()}
        if name in found:
            if found[name].attempt == attempt.hex():
                return
            snapshots.remove(self._keepers(), name)  # of a history that was given up
        self.snapshot(name)
        automatic = [own.name for own in self.snapshots() if _AUTOMATIC.fullmatch(own.name)]
        for old in automatic[: -self._keep_snapshots]:
            snapshots.remove(self._keepers(), old)

    def state_dict(self) -> dict[str, Any]:
        """A small manifest: which set of devices holds the state, and at which step.

        Keys ``state`` (empty) and ``param_groups`` are torch's; ``smart_infinity`` names the set
        and the step. Of a step after the first state the devices make the snapshot ``step-<n>``,
        once, and keep the last ``keep_snapshots`` of these, so that `load_state_dict` can go back.

        Raises:
            DeviceFullError: there is no room for the snapshot; ``keep_snapshots=0`` makes none.
        """
        self._engine.synchronize()
        self._keep_step()
        groups: list[dict[str, Any]] = []
        position = 0
        for group in self.param_groups:
            own = scalars(group)
            own["params"] = list(range(position, position + len(group["params"])))
            position += len(group["params"])
            groups.append(own)
        return {"state": {}, "param_groups": groups, "smart_infinity": self._manifest()}

    def _manifest(self) -> dict[str, str | int]:
        """Which state this is."""
        engine = self._engine
        return {
            "set_uuid": engine.set_uuid,
            "layout_hash": engine.layout.hash(),
            "step": engine.step_id[1],
            "attempt": engine.step_id[2].hex(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to the step of a manifest: the committed one, or one with a snapshot.

        Raises:
            StateMismatchError: the manifest is of another set, or its step is no longer there.
        """
        self._engine.synchronize()
        seen, expected = state_dict.get("smart_infinity"), self._manifest()
        if seen is None:
            raise StateMismatchError(
                "the state_dict is not a manifest of an offloaded optimizer. Expected what "
                "state_dict() of this optimizer returned; the moments of a torch optimizer are "
                "brought to devices with smart-infinity import"
            )
        for key, what in (("set_uuid", "set of devices"), ("layout_hash", "layout")):
            if seen.get(key) != expected[key]:
                raise StateMismatchError(
                    f"the state_dict is of {what} {seen.get(key)}, and the devices hold "
                    f"{expected[key]}. Expected a manifest of this very set"
                )
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        ours = [len(group["params"]) for group in self.param_groups]
        if theirs != ours:
            raise StateMismatchError(
                f"the state_dict has param_groups of {theirs} parameters, the optimizer of {ours}. "
                "Expected a manifest of this optimizer"
            )
        if seen != expected:
            self._engine.restore(self._snapshot_of(seen))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            restore_scalars(group, {k: v for k, v in saved.items() if k != "params"})

    def _snapshot_of(self, manifest: dict[str, Any]) -> str:
        found = self.snapshots()
        for own in found:
            if (own.step, own.attempt) == (manifest.get("step"), manifest.get("attempt")):
                return own.name
        raise StateMismatchError(
            f"the state_dict is of step {manifest.get('step')}, which the devices no longer hold. "
            f"They hold step {self.committed_step} and the snapshots "
            f"{[f'{own.name} (step {own.step})' for own in found]}; more are kept with "
            "offload(..., keep_snapshots=...)"
        )

    def close(self) -> None:
        """Release the devices. The model keeps its weights and is an ordinary model again."""
        self._engine.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "an offloaded optimizer cannot be copied or pickled: its state is on the devices. "
            "Use state_dict() for its manifest"
        )
