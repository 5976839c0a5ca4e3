"""Lets a module's forward begin when its own new weights are there.

With ``overlap=True`` a step is still under way when `step()` returns. Each module waits before its
forward for the parameters that it holds, and whatever reads all weights (``state_dict``,
``load_state_dict``, copies) waits for the whole step.

Some modules read the parameters of a module below them without calling it, as
``nn.MultiheadAttention`` does with its output projection. Backward shows it: such a parameter gets
a gradient, and its module was not called. From then on the nearest module above it that was called
waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smart_infinity.ahead import Ahead
from smart_infinity.arrivals import Arrivals
from smart_infinity.errors import UnsupportedError
from smart_infinity.timeline import Timeline


class Gate:
    """The hooks of one model, and what they know about who uses which parameter.

    Args:
        model: all of its modules are hooked.
        parameters: the offloaded ones, by the layout's index.
        names: of the parameters.
        arrivals: what has not come yet.
        guard: raises where the engine must not be used.
        synchronize: waits for the step under way, and raises what it raised; held weakly.
        show: lets the loop's device see a parameter that has come.
        timeline: told of the waiting.
        ahead: told when weights are there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        arrivals: Arrivals,
        guard: Callable[[], None],
        synchronize: Callable[[], None],
        show: Callable[[int], None],
        timeline: Timeline,
        ahead: Ahead,
    ) -> None:
        self.parameters, self._synchronize = parameters, weakref.WeakMethod(synchronize)
        self._names, self._arrivals, self._guard = names, arrivals, guard
        self._show, self._timeline, self._ahead = show, timeline, ahead
        self._step = 0  # overlapped steps begun
        self._moving: frozenset[int] = frozenset()  # the parameters that the last one changes
        # Of the steps begun, the last one that was waited for: by parameter, and for all.
        self._waited = [0] * len(parameters)
        self._all_waited = 0
        # By parameter, for each module that holds it: its hook and those above it, nearest first.
        self._chains: list[list[list[_Hook]]] = [[] for _ in parameters]
        self._handles: list[Any] = []
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        by_module: dict[int, _Hook] = {}
        by_path: dict[str, _Hook] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            held = [index_of[id(p)] for p in module._parameters.values() if id(p) in index_of]
            if id(module) not in by_module:
                by_module[id(module)] = self._hang(module, held)
            by_path[path] = by_module[id(module)]
            parts = path.split(".") if path else []
            chain = [by_path[".".join(parts[:end])] for end in range(len(parts), -1, -1)]
            for index in held:
                self._chains[index].append(chain)

    def _hang(self, module: torch.nn.Module, held: list[int]) -> _Hook:
        hook, barrier = _Hook(self, held), _Barrier(self)
        self._handles += [
            module.register_forward_pre_hook(hook),
            module.register_state_dict_pre_hook(barrier),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(barrier),  # type: ignore[no-untyped-call]
        ]
        return hook

    def begin(self, moving: Sequence[int]) -> None:
        """A step that changes these parameters is under way."""
        self._step += 1
        self._moving = frozenset(moving)

    def opened(self) -> None:
        """The whole step was waited for."""
        self._all_waited = self._step

    def before_forward(self, hook: _Hook) -> None:
        """Wait for what the hook's module uses."""
        hook.called = self._step
        if self._all_waited != self._step:
            self._wait(hook)
        self._ahead.begin()

    def _wait(self, hook: _Hook) -> None:
        self._guard()
        for index in hook.uses:
            if self._arrivals.is_missing(index):
                with self._timeline.waiting(f"weights of {self._names[index]}"):
                    self._arrivals.wait(index)
            self._show(index)
            self._waited[index] = self._step
        if self._arrivals.has_failed:
            self.synchronize()

    def check_use(self, index: int) -> None:
        """A gradient of the parameter has come: see that its forward has waited, or learn to.

        Raises:
            UnsupportedError: it was computed from weights that were being replaced.
        """
        chains = self._chains[index]
        if any(chain[0].called == self._step for chain in chains):
            return
        has_waited = self._step in (self._all_waited, self._waited[index])
        for chain in chains:
            user = next((hook for hook in chain if hook.called == self._step), None)
            if user is not None and index not in user.uses:
                user.uses.append(index)
        if index in self._moving and not has_waited:
            raise UnsupportedError(
                f"parameter {self._names[index]} was used while a step was replacing it: its "
                "module was not called, so nothing waited. Call optimizer.synchronize() before "
                "using a parameter without its module, or offload with overlap=False"
            )

    def synchronize(self) -> None:
        """Wait for the whole step."""
        synchronize = self._synchronize()
        if synchronize is not None:
            synchronize()

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()


class _Barrier:
    """A hook that waits for the whole step. A copy of it, in a copy of its module, does nothing."""

    def __init__(self, gate: Gate) -> None:
        # Weak: a model must not keep the engine of a dropped optimizer.
        self._gate = weakref.ref(gate)

    def __call__(self, *_: object) -> None:
        gate = self._gate()
        if gate is not None:
            gate.synchronize()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        """Let the copy have the new weights; some were copied before anything could wait."""
        gate = self._gate()
        if gate is not None:
            gate.synchronize()
            for parameter in gate.parameters:
                copied = memo.get(id(parameter))
                if isinstance(copied, torch.Tensor):
                    copied.data.copy_(parameter.data)
        return _Nothing()

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        """The same for a pickle; ``torch.save`` writes the weights after the objects."""
        gate = self._gate()
        if gate is not None:
            gate.synchronize()
        return _Nothing, ()


class _Hook(_Barrier):
    """A forward pre-hook.

    Attributes:
        uses: the parameters that the module reads: its own, and those it was seen to read.
        called: overlapped steps begun when its module was called last; -1: never called.
    """

    def __init__(self, gate: Gate, uses: list[int]) -> None:
        super().__init__(gate)
        self.uses = uses
        self.called = -1

    def __call__(self, *_: object) -> None:
        gate = self._gate()
        if gate is not None:
            gate.before_forward(self)


class _Nothing:
    """What a copied hook is."""

    def __call__(self, *_: object) -> None:
        pass
