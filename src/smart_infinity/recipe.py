"""Reading a torch optimizer: what it is, what devices must know, and what cannot be honoured."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from smart_infinity.errors import UnsupportedError
from smart_infinity.kernels import OPTIMIZERS

# By exact type: AdamW is a subclass of Adam, and a user's subclass may change the formula.
TORCH_OPTIMIZERS: dict[type, str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
}

_NO_JSON = object()
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The kernel that runs this optimizer; raises `UnsupportedError` where none does exactly."""
    name = TORCH_OPTIMIZERS.get(type(optimizer))
    if name is None:
        expected = ", ".join(kind.__name__ for kind in TORCH_OPTIMIZERS)
        raise UnsupportedError(
            f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__qualname__}. "
            f"Expected exactly one of torch.optim's {expected} (subclasses may change the formula)"
        )
    for index, group in enumerate(optimizer.param_groups):
        check_group(index, group)
    return name


def refuse_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose moments would be lost."""
    for state in optimizer.state.values():
        # Adagrad makes its state in the constructor, at step 0; any other state means a step.
        if float(state.get("step", 1)) > 0:
            raise UnsupportedError(
                f"the {type(optimizer).__name__} has already stepped. Expected a new optimizer: "
                "its moments would be lost. Call offload() before the first step, or move the run "
                "with smart_infinity.save_export and smart-infinity import"
            )


def check_group(index: int, group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that no kernel honours."""
    for flag in _REFUSED_FLAGS:
        if group.get(flag):
            raise UnsupportedError(
                f"{flag}={group[flag]!r} in param_groups[{index}] cannot be honoured by a storage "
                f"device. Expected {flag}=False"
            )


def moments_of(optimizer: torch.optim.Optimizer, name: str) -> tuple[str, ...]:
    """State tensors that devices must keep; SGD without momentum in any group needs none."""
    if name == "sgd" and all(not group["momentum"] for group in optimizer.param_groups):
        return ()
    return OPTIMIZERS[name].moments


def initial_moment(name: str, group: Mapping[str, Any]) -> float:
    """What torch's constructor fills the state tensors with."""
    return float(group["initial_accumulator_value"]) if name == "adagrad" else 0.0


def counts_step(name: str, group: Mapping[str, Any]) -> bool:
    """Whether a step advances a parameter's own count.

    SGD's count is of steps with momentum, since torch begins the buffer at the first of those.
    """
    return name != "sgd" or bool(group["momentum"])


def scalars(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters as JSON values, without its parameters.

    What has no JSON form (a key of the user's own) is left out, and stays as it is on a resume.
    """
    plain = {key: _plain(value) for key, value in group.items() if key != "params"}
    return {key: value for key, value in plain.items() if value is not _NO_JSON}


def _plain(value: Any) -> Any:
    """A JSON value that means the same number, or `_NO_JSON`."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NO_JSON if any(item is _NO_JSON for item in items) else items
    if isinstance(value, bool | int | float | str | None):
        return value
    return float(value) if isinstance(value, numbers.Real) else _NO_JSON


def restore_scalars(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put committed hyper-parameters back into a group, keeping the types found there."""
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        elif isinstance(present, tuple):
            group[key] = tuple(value)
        elif key != "param_names":
            group[key] = value


def group_members(
    groups: Sequence[Mapping[str, Any]], index_of: Mapping[int, int]
) -> list[list[int]]:
    """By group, the layout's indices (given by ``id``) of its offloaded parameters."""
    return [[index_of[id(p)] for p in group["params"] if id(p) in index_of] for group in groups]


def model_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The optimizer's trainable parameters in the model's order, each once, with its name."""
    known = {id(parameter) for parameter in model.parameters()}
    held = set()
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise UnsupportedError(
                    f"param_groups[{index}]['params'][{position}], of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the model. Expected only "
                    "parameters of the model given to offload(); keep others in an optimizer of "
                    "their own"
                )
            held.add(id(parameter))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) in held:
            yield name, parameter
