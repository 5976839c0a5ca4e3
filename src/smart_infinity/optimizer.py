"""`OffloadedOptimizer`: the face that users hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch

from smart_infinity.errors import StateMismatchError, UnsupportedError
from smart_infinity.link import Traffic
from smart_infinity.recipe import restore_scalars, scalars

if TYPE_CHECKING:
    from smart_infinity.engine import Engine


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

    def __init__(self, engine: Engine, source: torch.optim.Optimizer) -> None:
        super().__init__(source.param_groups, source.defaults)
        self.param_groups = source.param_groups
        self._engine, self._source = engine, source
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

    def state_dict(self) -> dict[str, Any]:
        """A small manifest: which set of devices holds the state, and at which step.

        Keys ``state`` (empty) and ``param_groups`` are torch's; ``smart_infinity`` names the set.
        """
        self._engine.guard()
        groups: list[dict[str, Any]] = []
        position = 0
        for group in self.param_groups:
            own = scalars(group)
            own["params"] = list(range(position, position + len(group["params"])))
            position += len(group["params"])
            groups.append(own)
        return {"state": {}, "param_groups": groups, "smart_infinity": self._engine.manifest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters from a manifest of this very set at this very step."""
        self._engine.guard()
        seen, expected = state_dict.get("smart_infinity"), self._engine.manifest()
        if seen is None:
            raise StateMismatchError(
                "the state_dict is not a manifest of an offloaded optimizer. Expected what "
                "state_dict() of this optimizer returned; moments of another optimizer cannot be "
                "loaded into the devices"
            )
        if seen != expected:
            raise StateMismatchError(
                f"the state_dict is of {seen}, the devices hold {expected}. Expected a manifest "
                "taken from this optimizer at its present step; the state itself is on the devices "
                "and is continued with offload(..., resume=True)"
            )
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        ours = [len(group["params"]) for group in self.param_groups]
        if theirs != ours:
            raise StateMismatchError(
                f"the state_dict has param_groups of {theirs} parameters, the optimizer of {ours}. "
                "Expected a manifest of this optimizer"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            restore_scalars(group, {k: v for k, v in saved.items() if k != "params"})

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
