"""Whether an engine may be used: its process, its life, and the alarms after a failure."""

from __future__ import annotations

import enum
import os
import weakref
from typing import Any

import torch

from smart_infinity.errors import (
    ForkedProcessError,
    OptimizerClosedError,
    OptimizerFailedError,
    UnsupportedError,
)

# Weak in model and engine: an engine holds the model's modules, and must not keep them alive.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[Any], Guard]] = (
    weakref.WeakKeyDictionary()
)


class State(enum.Enum):
    """An engine's life; it leaves ``OPEN`` once, and for good."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class Guard:
    """Raises where an engine must not be used. Calling it is the check.

    Attributes:
        state: where the engine is in its life.
        torn_set: the set of devices whose failure tore the model's weights, if one did.
    """

    def __init__(self) -> None:
        self.state = State.OPEN
        self._pid = os.getpid()
        self._reason = ""
        self.torn_set: str | None = None
        self._alarms: list[Any] = []

    def __call__(self) -> None:
        """Raise `ForkedProcessError`, `OptimizerClosedError` or `OptimizerFailedError`."""
        if self.is_forked:
            raise ForkedProcessError(
                f"process {os.getpid()} is a fork of {self._pid}, which owns the devices. Use the "
                "model and the optimizer in the process that called offload()"
            )
        if self.state is State.CLOSED:
            raise OptimizerClosedError(
                "the optimizer was closed. Call offload(..., resume=True) to go on"
            )
        if self.state is State.FAILED:
            raise OptimizerFailedError(
                f"an earlier step or resume failed ({self._reason}), so weights and state "
                "disagree. Call offload(model, optimizer, devices, resume=True) to go back to the "
                "last committed step"
            )

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that owns the devices."""
        return os.getpid() != self._pid

    def alarm(self, model: torch.nn.Module | None, error: BaseException, set_uuid: str) -> None:
        """After a failure: nothing may be computed from the weights or saved."""
        self.state, self._reason = State.FAILED, f"{type(error).__name__}: {error}"
        self.torn_set = set_uuid

        def check(*_: object) -> None:
            self()

        for module in model.modules() if model is not None else ():
            self._alarms.append(module.register_forward_pre_hook(check))
            self._alarms.append(
                module.register_state_dict_pre_hook(check)  # type: ignore[no-untyped-call]
            )

    def silence(self) -> None:
        """Take the alarms off the model, which has been offloaded anew."""
        for alarm in self._alarms:
            alarm.remove()


def remember(model: torch.nn.Module, engine: object, guard: Guard) -> None:
    """The model is offloaded by this engine, or was torn by it."""
    _engines[model] = weakref.ref(engine), guard


def failed_guard(model: torch.nn.Module) -> Guard | None:
    """The guard of the failure that tore this model's weights, if one did.

    Raises:
        UnsupportedError: the model is offloaded.
    """
    reference, guard = _engines.get(model, (None, None))
    if reference is None or guard is None:
        return None
    if guard.state is State.OPEN and reference() is not None:
        raise UnsupportedError(
            "the model is offloaded already. Call close() on its optimizer first"
        )
    return guard if guard.state is State.FAILED else None
