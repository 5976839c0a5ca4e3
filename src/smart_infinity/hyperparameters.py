"""What the host tells the devices about one step: a small table, a row for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smart_infinity.devices.base import Pending
from smart_infinity.errors import UnsupportedError
from smart_infinity.kernels import OPTIMIZERS
from smart_infinity.kernels.frame import T_ACTIVE, T_FACTOR, T_OWN, TABLE_COLUMNS
from smart_infinity.layout import Layout
from smart_infinity.recipe import check_group, counts_step


def step_table(
    layout: Layout,
    groups: Sequence[Mapping[str, Any]],
    index_of: Mapping[int, int],
    counts: npt.NDArray[np.int64],
    active: npt.NDArray[np.bool_],
    pending: Sequence[Pending],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Read the groups' hyper-parameters as they are now.

    Args:
        layout: the layout; parameter indices are its own.
        groups: the optimizer's ``param_groups``.
        index_of: ``id(parameter)`` -> index.
        counts: int64, each parameter's own step count before this step.
        active: bool, which parameters have a gradient.
        pending: what each gradient still has to be multiplied and clamped with.

    Returns:
        The table (float32, see ``kernels.frame``), and the step counts after the step.
    """
    table = np.zeros((len(layout.parameters), TABLE_COLUMNS), np.float32)
    counts = counts.copy()
    kernel = OPTIMIZERS[layout.optimizer]
    for number, group in enumerate(groups):
        check_group(number, group)
        if not layout.moments and group.get("momentum"):
            raise UnsupportedError(
                f"momentum in param_groups[{number}] is {group['momentum']} now and was 0 in all "
                "groups at offload(), so the devices keep no buffer for it. Set momentum before "
                "offload()"
            )
        rows: dict[int, list[float]] = {}
        for parameter in group["params"]:
            index = index_of.get(id(parameter))
            if index is None:
                _refuse_late_gradient(number, parameter)
                continue
            if not active[index]:
                continue
            counts[index] += counts_step(layout.optimizer, group)
            count = int(counts[index])
            if count not in rows:
                rows[count] = kernel.row(group, count)
            own = rows[count]
            table[index, T_ACTIVE] = 1
            with np.errstate(over="ignore"):  # an infinite factor: the step will be skipped
                table[index, T_FACTOR:T_OWN] = pending[index]
            table[index, T_OWN : T_OWN + len(own)] = own
    return table, counts


def _refuse_late_gradient(number: int, parameter: torch.nn.Parameter) -> None:
    if parameter.grad is not None:
        raise UnsupportedError(
            f"a parameter of shape {tuple(parameter.shape)} in param_groups[{number}] has a "
            "gradient now and was frozen at offload(). Unfreeze parameters before offload()"
        )
