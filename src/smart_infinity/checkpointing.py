"""What the host commits with every step, and takes back on a resume.

`param_groups`, the random states, persistent buffers, and the state of registered objects: LR
schedulers, samplers, whatever has ``state_dict`` and ``load_state_dict``. No code is in it.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from smart_infinity import plain
from smart_infinity.errors import StateMismatchError, UnsupportedError
from smart_infinity.recipe import restore_scalars, scalars
from smart_infinity.schedulers import StepPattern, is_scheduler, observe_steps

logger = logging.getLogger("smart_infinity")

MAX_BUFFER_NBYTES = 64 << 20
Groups = list[dict[str, Any]]


@dataclass(slots=True)
class Registered:
    """An object whose state is committed with every step."""

    object: Any
    type_name: str
    pattern: StepPattern | None  # of an LR scheduler
    undo: Callable[[], None] | None = None


@dataclass(eq=False)
class HostState:
    """Makes the host's part of a commit, and takes it back.

    Attributes:
        model: whose persistent buffers are committed.
        amend: called when a scheduler has moved in a way that the last commit does not foresee.
        saved: what a resume has found and nobody has taken back yet.
    """

    model: Callable[[], torch.nn.Module | None]
    amend: weakref.WeakMethod[Callable[[], None]]
    registered: list[Registered] = field(default_factory=list)
    saved: dict[str, Any] | None = None
    _last: bytes = b""
    _foreseen: list[tuple[list[int], int]] = field(default_factory=list)
    _is_loading: bool = False
    _with_buffers: bool | None = None

    # --- committing ---------------------------------------------------------------------------

    def encode(self, groups: Groups, members: list[list[int]]) -> bytes:
        """What to commit with a new step.

        Raises:
            UnsupportedError: a registered object's state holds what cannot be written.
        """
        self._foreseen = [
            own.pattern.foreseen() if own.pattern else ([], 0) for own in self.registered
        ]
        content = {
            "param_groups": [scalars(group) for group in groups],
            "members": members,
            "random": random_states(),
            "buffers": dict(self._buffers()),
            "objects": [
                _entry(own, *foreseen, calls=0)
                for own, foreseen in zip(self.registered, self._foreseen, strict=True)
            ],
        }
        return plain.encode(content, "what is committed with a step")

    def committed(self, blob: bytes) -> None:
        """A new step is durable on all devices, with this host's part."""
        self._last = blob
        for own, (intervals, expected) in zip(self.registered, self._foreseen, strict=False):
            if own.pattern:
                own.pattern.committed(intervals, expected)

    def encode_amendment(self, groups: Groups) -> bytes:
        """What was committed with the last step, with schedulers and groups as they are now.

        All else stays as it was in that step: a sampler may have moved on since.
        """
        content = plain.decode(self._last)
        content["param_groups"] = [scalars(group) for group in groups]
        objects = content["objects"]
        for number, own in enumerate(self.registered):
            pattern = own.pattern
            if pattern is not None and number < len(objects):
                objects[number] = _entry(own, pattern.intervals, pattern.outstanding, pattern.calls)
        return plain.encode(content, "what is committed with a step")

    def amended(self, blob: bytes) -> None:
        """What was committed with the last step is replaced by this."""
        self._last = blob
        for own in self.registered:
            if own.pattern:
                own.pattern.expected = max(own.pattern.expected, own.pattern.calls)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model()
        if model is None or self._with_buffers is False:
            return
        found = list(persistent_buffers(model))
        if self._with_buffers is None:
            total = sum(buffer.nbytes for _, buffer in found)
            self._with_buffers = total <= MAX_BUFFER_NBYTES
            if not self._with_buffers:
                logger.warning(
                    "the model's buffers take %d bytes, more than the %d that are committed with "
                    "each step: a resume leaves them as the model has them",
                    total,
                    MAX_BUFFER_NBYTES,
                )
                return
        yield from found

    # --- registering --------------------------------------------------------------------------

    def register(self, objects: tuple[Any, ...], groups: Groups) -> None:
        """Commit these from now on, and give them back what a resume has found for them.

        Raises:
            UnsupportedError: an object has no state, or one that cannot be written.
            StateMismatchError: the state found is of an object of another type.
        """
        fresh: list[Registered] = []
        for own in objects:
            if not callable(getattr(own, "state_dict", None)) or not callable(
                getattr(own, "load_state_dict", None)
            ):
                raise UnsupportedError(
                    f"register_for_checkpointing() was given a {type(own).__name__}. Expected an "
                    "object with state_dict() and load_state_dict()"
                )
            if any(own is other.object for other in (*self.registered, *fresh)):
                raise UnsupportedError(
                    f"this {type(own).__name__} is registered already. Expected each object once"
                )
            name = type(own).__name__
            number = len(self.registered) + len(fresh)
            plain.encode(own.state_dict(), f"the state_dict of {name} (registered object {number})")
            fresh.append(Registered(own, name, StepPattern() if is_scheduler(own) else None))
        if self.saved is not None:
            names = [entry.type_name for entry in (*self.registered, *fresh)]
            check_types(names, self.saved["objects"])
        for entry in fresh:
            if entry.pattern is not None:
                entry.undo = observe_steps(entry.object, _Stepped(self, entry.pattern))
        self.registered += fresh
        if self.saved is not None:
            self._load_objects(fresh, groups)

    def forget(self) -> None:
        """Let go of all registered objects."""
        for entry in self.registered:
            if entry.undo is not None:
                entry.undo()
        self.registered = []

    # --- taking back --------------------------------------------------------------------------

    def load(self, blob: bytes, groups: Groups) -> None:
        """Take back what was committed: groups, buffers, registered objects, random states."""
        self.saved, self._last = plain.decode(blob), blob
        self._restore_buffers()
        self._load_objects(self.registered, groups)
        self.restore_random_state()

    def check(self, blob: bytes, members: list[list[int]]) -> None:
        """Refuse what does not fit this run, before anything moves. `StateMismatchError`."""
        saved = plain.decode(blob)
        check_types([entry.type_name for entry in self.registered], saved["objects"])
        if saved["members"] != members:
            raise StateMismatchError(
                "the param_groups of the state hold other parameters than the optimizer's do: "
                f"{[len(own) for own in saved['members']]} against "
                f"{[len(own) for own in members]} in each, or in another order. "
                "Expected the groups of the run to be continued"
            )
        model = self.model()
        present = dict(persistent_buffers(model)) if model is not None else {}
        for name, buffer in saved["buffers"].items():
            own = present.get(name)
            if own is None or (own.shape, own.dtype) != (buffer.shape, buffer.dtype):
                seen = "no such buffer" if own is None else f"{tuple(own.shape)} {own.dtype}"
                raise StateMismatchError(
                    f"the state has buffer {name} {tuple(buffer.shape)} {buffer.dtype} and the "
                    f"model has {seen}. Expected the model of the run to be continued"
                )

    def restore_random_state(self) -> None:
        """Put the random states back to where the resumed step committed them."""
        if self.saved is not None:
            set_random_states(self.saved["random"])

    def warn_of_forgotten(self) -> None:
        """At the first step: say what of the resumed state nobody has asked for."""
        if self.saved is None:
            return
        found, asked = len(self.saved["objects"]), len(self.registered)
        if asked < found:
            missing = [own["type"] for own in self.saved["objects"][asked:]]
            logger.warning(
                "the resumed state holds objects that were not registered this time, and is going "
                "to be committed without them: %s",
                missing,
            )
        self.saved = None

    def _restore_buffers(self) -> None:
        model = self.model()
        present = dict(persistent_buffers(model)) if model is not None else {}
        assert self.saved is not None
        with torch.no_grad():
            for name, buffer in self.saved["buffers"].items():
                present[name].copy_(buffer)

    def _load_objects(self, fresh: list[Registered], groups: Groups) -> None:
        """Load the states of ``fresh``, and bring all schedulers to where they would be now.

        A scheduler's constructor resets the groups, and loading one does not touch them; so they
        are put back to what was committed, and then all schedulers make their outstanding steps.
        """
        assert self.saved is not None
        pairs = list(zip(self.registered, self.saved["objects"], strict=False))
        moves_groups = fresh is self.registered or any(entry.pattern for entry in fresh)
        again = [
            (entry, own)
            for entry, own in pairs
            if any(entry is other for other in fresh) or (moves_groups and entry.pattern)
        ]
        self._is_loading = True
        try:
            load_objects(
                [(entry.object, own) for entry, own in again],
                list(zip(groups, self.saved["param_groups"], strict=True)) if moves_groups else [],
            )
        finally:
            self._is_loading = False
        for entry, own in again:
            if entry.pattern is not None:
                entry.pattern.resumed(list(own["intervals"]), own["calls"] + own["steps"])
        if fresh and len(self.registered) > len(pairs):
            logger.warning(
                "the resumed state holds %d registered objects and %d are registered now: %s "
                "start anew",
                len(pairs),
                len(self.registered),
                [entry.type_name for entry in self.registered[len(pairs) :]],
            )

    def stepped(self, pattern: StepPattern, with_arguments: bool) -> None:
        """A registered scheduler was stepped."""
        amend = self.amend()  # weak: an engine that is dropped ends at once
        if not self._is_loading and pattern.called(with_arguments) and amend is not None:
            amend()


def load_objects(
    objects: Sequence[tuple[Any, Mapping[str, Any]]],
    groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
) -> None:
    """Give objects and groups back what was committed, and let schedulers catch up.

    Args:
        objects: each with its entry in what was committed.
        groups: each with the hyper-parameters that were committed.
    """
    for target, own in objects:
        target.load_state_dict(own["state"])
    for group, values in groups:
        restore_scalars(group, values)
    for target, own in objects:
        for _ in range(own["steps"]):
            target.step()


def check_types(names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse objects of other types than those committed. `StateMismatchError`."""
    for number, (name, own) in enumerate(zip(names, saved, strict=False)):
        if name != own["type"]:
            raise StateMismatchError(
                f"registered object {number} is a {name}, and the state holds a {own['type']} "
                "there. Expected the objects of the run that is continued, in the same order"
            )


def _entry(own: Registered, intervals: list[int], steps: int, calls: int) -> dict[str, Any]:
    """A registered object in what is committed.

    Of a scheduler's calls since that step, ``calls`` are in the state and ``steps`` will follow.
    """
    return {
        "type": own.type_name,
        "state": own.object.state_dict(),
        "intervals": intervals,
        "steps": steps,
        "calls": calls,
    }


class _Stepped:
    """Called by a scheduler, which must not keep an engine alive."""

    def __init__(self, state: HostState, pattern: StepPattern) -> None:
        self._call = weakref.WeakMethod(state.stepped)
        self._pattern = pattern

    def __call__(self, with_arguments: bool) -> None:
        call = self._call()
        if call is not None:
            call(self._pattern, with_arguments)


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are in the model's ``state_dict``, each under its first name."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def random_states() -> dict[str, Any]:
    """Of Python, NumPy and torch, the GPUs' too where they are in use."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put them back."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
