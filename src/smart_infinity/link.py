"""The host link: the one door between the host and its devices.

Everything that crosses is handed through `HostLink.carry`, which counts its bytes by kind. On this
machine the hand-over itself is free: the receiver reads the sender's array.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import numpy.typing as npt

KINDS = (
    "gradients_to_device",
    "weights_to_host",
    "weights_to_device",
    "gradients_to_host",
    "state_to_host",
    "state_to_device",
    "control",
)

ArrayT = TypeVar("ArrayT", bound=npt.NDArray[Any])


class Traffic:
    """Bytes that crossed the host link since the last `reset`, by kind.

    Attributes:
        gradients_to_device: gradients as backward produces them.
        weights_to_host: updated weights.
        weights_to_device: the first masters, and weights that the user edited.
        gradients_to_host: gradients fetched with ``grad.to_dense()``.
        state_to_host: masters and moments fetched with ``read_state``.
        state_to_device: masters and moments sent to a device.
        control: norm partials, hyper-parameter tables, commit blobs.
    """

    gradients_to_device: int
    weights_to_host: int
    weights_to_device: int
    gradients_to_host: int
    state_to_host: int
    state_to_device: int
    control: int

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        for kind in KINDS:
            setattr(self, kind, 0)

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return {kind: getattr(self, kind) for kind in KINDS}

    def __repr__(self) -> str:
        return f"Traffic({', '.join(f'{k}={v}' for k, v in self.as_dict().items())})"


class HostLink:
    """Counts what crosses between the host and all devices."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = threading.Lock()

    def carry(self, kind: str, array: ArrayT) -> ArrayT:
        """Hand an array to the other side, counted as ``kind``."""
        self.count(kind, array.nbytes)
        return array

    def count(self, kind: str, nbytes: int) -> None:
        """Add to a counter; devices deliver from several threads at once."""
        with self._lock:
            setattr(self.traffic, kind, getattr(self.traffic, kind) + nbytes)
