"""Crashes as copies: what lies in the directories at an instant is what a crash leaves there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from helpers import OPTIMIZERS, offload, same_bits, small_net, two_groups, weights_of
from smart_infinity import OffloadedOptimizer

Run = tuple[nn.Module, OffloadedOptimizer]


def begin(
    devices: list[Path], resume: bool | None = None, model: nn.Module | None = None, **options: Any
) -> Run:
    """Offload a small net; a run that resumes is given other weights at first."""
    model = small_net(seed=77 if resume else 0) if model is None else model
    source = OPTIMIZERS["adamw"](two_groups(model))
    return model, offload(model, source, devices, resume=resume, **options)


def copies(devices: Sequence[Path], base: Path) -> list[Path]:
    """The directories as a crash at this instant would leave them, in new places."""
    return [shutil.copytree(device, base / device.name) for device in devices]


def contents(devices: Sequence[Path]) -> dict[str, bytes]:
    """Every file, snapshots included."""
    return {
        str(file): file.read_bytes()
        for device in devices
        for file in sorted(device.rglob("*"))
        if file.is_file()
    }


def hyper_parameters(optimizer: OffloadedOptimizer) -> list[dict[str, Any]]:
    """By group, all but the parameters."""
    return [{k: v for k, v in own.items() if k != "params"} for own in optimizer.param_groups]


class Everything:
    """All that a continued run must have in common with one that was never interrupted."""

    def __init__(self, model: nn.Module, optimizer: OffloadedOptimizer, *objects: Any) -> None:
        self.tensors: list[Tensor] = weights_of(model)
        for parameter in model.parameters():
            if parameter.requires_grad:  # masters, moments and step counts
                self.tensors += optimizer.read_state(parameter).values()
        self.numbers = (
            optimizer.steps,
            optimizer.committed_step,
            hyper_parameters(optimizer),
            [own.state_dict() for own in objects],
        )

    def check(self, model: nn.Module, optimizer: OffloadedOptimizer, *objects: Any) -> None:
        """Bit for bit."""
        now = Everything(model, optimizer, *objects)
        assert now.numbers == self.numbers
        assert same_bits(now.tensors, self.tensors)


class Counter:
    """The least that can be registered."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Other(Counter):
    pass
