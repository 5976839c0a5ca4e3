"""An export into a plain torch run, and a plain torch run into an export."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from smart_infinity import plain
from smart_infinity.checkpointing import (
    check_types,
    load_objects,
    persistent_buffers,
    random_states,
)
from smart_infinity.errors import StateMismatchError, UnsupportedError
from smart_infinity.layout import Layout, ParameterSpec, plan_layout
from smart_infinity.recipe import (
    counts_step,
    group_members,
    initial_moment,
    model_parameters,
    moments_of,
    optimizer_name,
    scalars,
)
from smart_infinity.tools.export import (
    Write,
    describe,
    new_directory,
    require_room,
    tensor_files,
    write_plain,
)
from smart_infinity.tools.importing import Export
from smart_infinity.weights import DTYPES

COUNTING = ("adam", "adamw", "adagrad")  # torch keeps their step count as a tensor


def load_export(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    torch_optimizer: torch.optim.Optimizer,
    objects: Sequence[Any] = (),
) -> dict[str, Any]:
    """Bring an export into a plain torch run: weights, moments, step counts, hyper-parameters.

    Args:
        directory: what ``smart-infinity export`` wrote.
        model: the model, on any device; its parameters get the fp32 masters in their own dtype.
        torch_optimizer: an optimizer of the same class and groups over its parameters.
        objects: those that were registered for checkpointing, in that order: they are given their
            states back, and schedulers make the calls that followed the step.

    Returns:
        ``step``; ``buffers`` by name; and ``random``, the random states of Python, NumPy and
        torch.

    Raises:
        StateMismatchError: the export is of another optimizer or of other parameters; nothing has
            changed.
        CorruptStateError: its files are damaged.
    """
    export = Export(directory)
    try:
        layout = export.layout(1)
        committed = plain.decode(export.committed)
        parameters = _matching(layout, committed["members"], model, torch_optimizer)
        counts = export.counts
        check_types([type(own).__name__ for own in objects], committed["objects"])
        with torch.no_grad():
            for spec, parameter, count in zip(layout.parameters, parameters, counts, strict=True):
                parameter.copy_(_read(export, spec.name, spec))
                state: dict[str, Any] = {}
                if count and layout.optimizer in COUNTING:
                    state["step"] = torch.tensor(float(count))
                for moment in layout.moments if count else ():
                    values = _read(export, f"state.{spec.name}.{moment}", spec)
                    state[moment] = values.to(parameter.device, parameter.dtype)
                torch_optimizer.state[parameter].update(state)
    finally:
        export.close()
    load_objects(
        list(zip(objects, committed["objects"], strict=False)),
        list(zip(torch_optimizer.param_groups, committed["param_groups"], strict=True)),
    )
    kept = ("buffers", "random")
    return {"step": export.step, **{key: committed[key] for key in kept}}


def save_export(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    torch_optimizer: torch.optim.Optimizer,
    *,
    step: int,
    objects: Sequence[Any] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a plain torch run as an export, for ``smart-infinity import``.

    Args:
        directory: a directory that does not exist yet, or is empty.
        model: the model; its parameters become the fp32 masters, and devices will deliver them
            in the dtype that they have now.
        torch_optimizer: what `offload` takes, after its steps.
        step: how many steps it has made, 1 or more.
        objects: what will be registered for checkpointing, in that order.
        max_shard_bytes: largest size of a file; a tensor is never cut.
    """
    if step < 1:
        raise UnsupportedError(f"step is {step}. Expected 1 or more: before, just call offload()")
    name = optimizer_name(torch_optimizer)
    named = list(model_parameters(model, torch_optimizer))
    specs = [ParameterSpec(label, tuple(p.shape), DTYPES[p.dtype]) for label, p in named]
    layout = plan_layout(specs, name, moments_of(torch_optimizer, name), 1)
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    committed = {
        "param_groups": [scalars(group) for group in torch_optimizer.param_groups],
        "members": group_members(torch_optimizer.param_groups, index_of),
        "random": random_states(),
        "buffers": dict(persistent_buffers(model)),
        "objects": [
            {
                "type": type(own).__name__,
                "state": own.state_dict(),
                "intervals": [],
                "steps": 0,
                "calls": 0,
            }
            for own in objects
        ],
    }
    blob = plain.encode(committed, "the state of the run")
    counts = [0] * len(named)
    with new_directory(directory) as hidden:
        require_room(hidden, layout)
        with tensor_files(hidden, layout, max_shard_bytes) as write:
            for group in torch_optimizer.param_groups:
                for parameter in group["params"]:
                    index = index_of.get(id(parameter))
                    if index is not None:
                        own = torch_optimizer.state[parameter]
                        counts[index] = _count(name, group, own, step)
                        initial = initial_moment(name, group)
                        _write_parameter(write, layout, index, parameter, own, initial)
        about = describe(layout, type(model).__name__, step, counts, blob)
        write_plain(hidden, about, blob)


def _count(name: str, group: dict[str, Any], state: dict[str, Any], step: int) -> int:
    """A parameter's own step count; SGD keeps none, and a buffer means that it has begun."""
    if name in COUNTING:
        return int(state["step"]) if "step" in state else 0
    return step if counts_step(name, group) and state.get("momentum_buffer") is not None else 0


def _write_parameter(
    write: Write,
    layout: Layout,
    index: int,
    parameter: torch.Tensor,
    state: dict[str, Any],
    initial: float,
) -> None:
    write(index, 0, 0, _flat(parameter))
    for number, moment in enumerate(layout.moments, start=1):
        values = state.get(moment)
        if values is None:
            values = torch.full_like(parameter, initial, dtype=torch.float32)
        write(index, number, 0, _flat(values))


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    flat = tensor.detach().to("cpu", torch.float32).contiguous().view(-1)
    return flat.numpy()


def _read(export: Export, name: str, spec: ParameterSpec) -> torch.Tensor:
    values = torch.empty(spec.shape, dtype=torch.float32)
    export.read(name, 0, values.view(-1).numpy())
    return values


def _matching(
    layout: Layout,
    members: list[list[int]],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> list[torch.nn.Parameter]:
    """The model's parameters by the layout's index, if they are those of the export."""
    name = optimizer_name(optimizer)
    named = list(model_parameters(model, optimizer))
    if name != layout.optimizer:
        raise StateMismatchError(
            f"the export is of optimizer {layout.optimizer} and this one is {name}. Expected the "
            "same class"
        )
    theirs = [(spec.name, spec.shape) for spec in layout.parameters]
    ours = [(label, tuple(parameter.shape)) for label, parameter in named]
    if theirs != ours:
        different = next(
            (pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]),
            (f"{len(theirs)} parameters", f"{len(ours)}"),
        )
        raise StateMismatchError(
            f"the export has {different[0]} where the model has {different[1]}. Expected the "
            "parameters of the run that was exported"
        )
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    if group_members(optimizer.param_groups, index_of) != members:
        raise StateMismatchError(
            "the export's param_groups hold other parameters than the optimizer's. Expected the "
            "groups of the run that was exported"
        )
    return [parameter for _, parameter in named]
