"""Fetching a parameter's state from the devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity.devices.base import Device
from smart_infinity.errors import UnsupportedError
from smart_infinity.layout import Layout
from smart_infinity.link import HostLink


def read_state(
    layout: Layout,
    devices: Sequence[Device],
    link: HostLink,
    index: int | None,
    counts: npt.NDArray[np.int64],
) -> dict[str, torch.Tensor]:
    """A parameter's master and moments as committed last; see `OffloadedOptimizer.read_state`.

    Args:
        layout: the layout.
        devices: by index.
        link: the host link.
        index: the parameter's; None where it is none of the layout's.
        counts: steps that each parameter has made.

    Raises:
        UnsupportedError: ``index`` is None.
    """
    if index is None:
        raise UnsupportedError(
            "read_state() was given a tensor that is not an offloaded parameter. Expected one of "
            "the model's trainable parameters"
        )
    names = ("master", *layout.moments)
    shape = layout.parameters[index].shape
    state = {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name in names}
    for number, run in layout.runs_of[index]:
        own = layout.devices[number].runs[run]
        place = slice(own.start, own.start + own.length)
        tensors = devices[number].read_state(run)
        for name, values in zip(names, tensors, strict=True):
            state[name].view(-1).numpy()[place] = link.carry("state_to_host", values)
    if layout.optimizer != "sgd":
        state["step"] = torch.tensor(float(counts[index]), device="cpu")
    return state
