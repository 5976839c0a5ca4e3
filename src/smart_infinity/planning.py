"""From a model and its optimizer to a layout, refusing by name what cannot be honoured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch

from smart_infinity.errors import DeviceMemoryError, UnsupportedError
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE, ITEMSIZE
from smart_infinity.layout import Layout, ParameterSpec, plan_layout
from smart_infinity.recipe import (
    model_parameters,
    moments_of,
    optimizer_name,
    refuse_stepped,
)
from smart_infinity.weights import DTYPES

ENDURANCE_BYTES = 600e12  # what a common 1 TB drive is rated for
Owners = list[tuple[torch.nn.Module, str]]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 1 << (10 * power) for power, prefix in enumerate("kmgt", start=1)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What `offload()` is going to do: parameters by the layout's index, and the layout."""

    parameters: list[torch.nn.Parameter]
    owners: list[Owners]
    layout: Layout


def plan(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    num_devices: int,
    dtype: torch.dtype | None,
) -> Plan:
    """Plan the offload; raises `UnsupportedError` before anything is touched."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedError(f"model is a {type(model).__name__}. Expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"the optimizer is a {type(optimizer).__name__}. Expected a torch.optim.Optimizer"
        )
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedError(
            f"dtype is {dtype}. Expected torch.float32, torch.bfloat16, torch.float16 or None"
        )
    _refuse_distributed(model)
    name = optimizer_name(optimizer)
    refuse_stepped(optimizer)
    named = list(model_parameters(model, optimizer))
    if not named:
        raise UnsupportedError(
            "the optimizer holds no trainable parameter of the model. Expected at least one with "
            "requires_grad=True"
        )
    _check_parameters(model, named)
    specs = [
        ParameterSpec(label, tuple(parameter.shape), DTYPES[dtype or parameter.dtype])
        for label, parameter in named
    ]
    layout = plan_layout(specs, name, moments_of(optimizer, name), num_devices)
    parameters = [parameter for _, parameter in named]
    return Plan(parameters, owners_of(model, parameters), layout)


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """A number of bytes from ``536870912`` or ``"512MiB"`` (also kB, MB, GB, KiB, GiB ...)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
        if match and match[2] in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2]])
    raise DeviceMemoryError(
        f'{name} is {value!r}. Expected a number of bytes, or a string such as "512MiB"'
    )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse an argument that is none of its choices."""
    if value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise UnsupportedError(f"{name} is {value!r}. Expected {expected}")


def check_count(name: str, value: object, least: int) -> None:
    """Refuse an argument that is no whole number, or a smaller one."""
    if type(value) is not int or value < least:
        raise UnsupportedError(f"{name} is {value!r}. Expected {least} or more")


def check_cache(state_cache: int | None) -> None:
    """Refuse a cache that does not fit into the memory now free."""
    available = psutil.virtual_memory().available
    if state_cache is not None and state_cache > available:
        raise DeviceMemoryError(
            f"state_cache is {state_cache} bytes, and {available} bytes of memory are available. "
            "Expected less"
        )


def check_memory(layout: Layout) -> None:
    """Refuse gradients that do not fit into the memory now free (a budget was not given)."""
    sizes = (spec.numel * ITEMSIZE[FORMAT_OF_DTYPE[spec.dtype]] for spec in layout.parameters)
    needed, available = sum(sizes), psutil.virtual_memory().available
    if needed > available:
        raise DeviceMemoryError(
            f"the landing zones for gradients need {needed} bytes of memory, of which {available} "
            "are available. Use a smaller model or 16-bit weights (dtype=torch.bfloat16)"
        )


def summary(layout: Layout) -> str:
    """The line that `offload()` logs."""
    written = max(layout.state_nbytes(device.index) for device in layout.devices)
    return (
        f"offloaded {layout.num_elements:,} parameters to {len(layout.devices)} device(s): "
        f"{_readable(2 * written)} reserved on each, {_readable(written)} written to each per "
        f"step, {ENDURANCE_BYTES / max(written, 1):,.0f} steps until a 600 TBW drive is worn"
    )


def _readable(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def owners_of(model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> list[Owners]:
    """By parameter, every (module, attribute) that holds it; a tied weight has several."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    owners: list[Owners] = [[] for _ in parameters]
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            index = index_of.get(id(parameter))
            if index is not None:
                owners[index].append((module, attribute))
    return owners


def _refuse_distributed(model: torch.nn.Module) -> None:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise UnsupportedError(
            f"the model is wrapped in {type(model).__name__}. Expected the plain module in a "
            "single process; unwrap it with model.module"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise UnsupportedError(
                f"torch.distributed runs with a world size of {size}. Expected a single process"
            )


def _check_parameters(
    model: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    for name, parameter in named:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"parameter {name} has no shape yet (a lazy module). Run one forward before "
                "making the optimizer"
            )
        if parameter.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"parameter {name} is on {parameter.device}. Expected the CPU or a CUDA GPU; call "
                'model.to("cpu") before making the optimizer'
            )
        if parameter.device != named[0][1].device:
            raise UnsupportedError(
                f"parameter {named[0][0]} is on {named[0][1].device} and {name} on "
                f"{parameter.device}. Expected all of them on one device"
            )
        if parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name} is {parameter.dtype}, {parameter.layout}. Expected a dense "
                "float32, bfloat16 or float16 tensor"
            )
    held = {id(parameter): name for name, parameter in named}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) and id(weight) in held:
            raise UnsupportedError(
                f"module {path} ({type(module).__name__}) makes sparse gradients. Build it with "
                "sparse=False"
            )
    _refuse_shared_memory(model, held)


def _refuse_shared_memory(model: torch.nn.Module, held: Mapping[int, str]) -> None:
    """Refuse an offloaded parameter whose memory another parameter object also uses."""
    last: tuple[int, str, bool] = (0, "", False)  # end, name, offloaded
    for begin, end, name, offloaded in sorted(
        (*_extent(parameter), name, id(parameter) in held)
        for name, parameter in model.named_parameters()
        if parameter.numel() and parameter.device.type in ("cpu", "cuda")
    ):
        if begin < last[0] and (offloaded or last[2]):
            raise UnsupportedError(
                f"parameters {last[1]} and {name} are two objects that share memory. Expected tied "
                "weights to be one Parameter object: assign one module's parameter to the other"
            )
        if end > last[0]:
            last = (end, name, offloaded)


def _extent(parameter: torch.Tensor) -> tuple[int, int]:
    strides = zip(parameter.shape, parameter.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return parameter.data_ptr(), parameter.data_ptr() + elements * parameter.element_size()
