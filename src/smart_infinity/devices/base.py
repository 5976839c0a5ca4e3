"""The contract of a computational storage device (SNIA: CSx), as the host sees it.

A device owns storage, a bounded device memory (SNIA: FDM) with the landing zone for gradients,
and a compute engine (SNIA: CSE). SNIA's words in brackets below say which call of its
Computational Storage API a method corresponds to. A device never reaches into the host: whatever
it sends or asks for goes through the `HostPort` it is handed, and that is the host's link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from smart_infinity.layout import Piece, Record
from smart_infinity.storage.ledger import LedgerContents, LedgerRecord, StepId
from smart_infinity.storage.snapshots import Snapshots
from smart_infinity.storage.store import Commit
from smart_infinity.storage.superblock import Superblock
from smart_infinity.storage.tasklets import Timings

Words = npt.NDArray[Any]  # uint16 for bf16 and fp16 words, float32 for fp32
Pending = tuple[float, float, float]  # factor, low, high: clamp(gradient * factor, low, high)
NO_PENDING: Pending = (1.0, -np.inf, np.inf)


class HostPort(Protocol):
    """The host's end of the link, as given to a device for the length of one call."""

    def fetch_weights(self, record: Record, index: int, piece: Piece) -> Words:
        """The host's present words of piece ``index`` of a record, to the device."""
        ...

    def edited_weights(self, record: Record, index: int, piece: Piece) -> Words | None:
        """The same, if the user has changed them since they were delivered; else None."""
        ...

    def deliver_weights(self, record: Record, index: int, piece: Piece, words: Words) -> None:
        """Updated words of piece ``index`` of a record, to the host."""
        ...


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the host tells every device about one step.

    Attributes:
        step_id: the step that is made.
        table: float32, one row per parameter; see ``kernels.frame``.
        edited: for this device, the indices of records to visit because the user has edited
            parameters in them that have no gradient.
    """

    step_id: StepId
    table: npt.NDArray[np.float32]
    edited: frozenset[int]


class GradientMemory(ABC):
    """A device's landing zone: gradients by run, until the update reads them."""

    @abstractmethod
    def land(self, index: int, form: int, words: Words, start: int = 0) -> int:
        """Store a run of a gradient, or the part of it from ``start``, a multiple of the block.

        Returns the part's largest magnitude bits.
        """

    @abstractmethod
    def accumulate(
        self, index: int, form: int, words: Words, pending: Pending, start: int = 0
    ) -> int:
        """Add to a landed run, or to a part of it, in fp32; parts come from the last to the first.

        Returns the largest magnitude bits of the part's sum.
        """

    @abstractmethod
    def fold(self, index: int, pending: Pending) -> int:
        """Apply what is pending to a landed run, in fp32; returns its largest magnitude bits."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Make a landed run zero, whatever it held."""

    @abstractmethod
    def squares(self, index: int) -> npt.NDArray[np.float64]:
        """Sums of squares by block, as taken on landing."""

    @abstractmethod
    def norms(self, index: int, power: float, pending: Pending) -> npt.NDArray[np.float64]:
        """Norm partials by block, by a pass over the run; see ``kernels.landing``."""

    @abstractmethod
    def read(self, index: int, pending: Pending) -> npt.NDArray[np.float32]:
        """A landed run in fp32, with what is pending applied."""


class Device(ABC):
    """One device of a set. Methods raise `DeviceIOError`, `CorruptStateError` or a user's error.

    Attributes:
        path: the directory, as the user gave it.
        gradients: the landing zone; there after `attach`.
        snapshots: copies of committed steps; there after `seal` or `open`.
    """

    path: str
    gradients: GradientMemory
    snapshots: Snapshots

    @abstractmethod
    def identify(self, notes: list[str] | None = None) -> Superblock | None:
        """What the device says it holds (csQueryDeviceProperties).

        ``notes`` receives a sentence for each thing that was found damaged and has a whole copy.
        """

    @abstractmethod
    def recorded_steps(self) -> LedgerContents:
        """All whole ledger records of the state found, newest first."""

    @abstractmethod
    def create(self) -> None:
        """Discard what is there and reserve storage."""

    @abstractmethod
    def attach(self, device_memory: int | None) -> None:
        """Reserve device memory within a budget in bytes (csAllocMem)."""

    @abstractmethod
    def initialize(
        self,
        host: HostPort,
        formats: Sequence[int],
        moments: Sequence[Sequence[float]],
        commit: Commit,
    ) -> None:
        """Write the first state from the host's weights, and commit it.

        Args:
            formats: the number format of each parameter's words as they are now.
            moments: by parameter, the initial value of each state tensor.
        """

    @abstractmethod
    def seal(self, superblock: Superblock) -> None:
        """Remember to be that device of the set, now that every device holds its first state."""

    @abstractmethod
    def open(self, record: LedgerRecord, superblock: Superblock) -> bytes:
        """Open the state of a step and return what the host committed with it; change nothing."""

    @abstractmethod
    def settle(self, record: LedgerRecord) -> None:
        """Make the step that was opened the only one, and be ready to go on from it."""

    @abstractmethod
    def restore(self, host: HostPort) -> bytes:
        """Verify all state of the committed step and send the weights to the host.

        Returns what the host committed with it.
        """

    @abstractmethod
    def update(self, plan: StepPlan, host: HostPort) -> None:
        """SmartUpdate: run the optimizer over all records (csQueueComputeRequest)."""

    @abstractmethod
    def begin_early(self, *, updates: bool) -> None:
        """Begin to read for the next step; the last one has delivered all of its weights.

        Args:
            updates: records are going to be updated before the step is made: they are read as
                gradients come, and not as weights are wanted.
        """

    @abstractmethod
    def expect(self, table: npt.NDArray[np.float32]) -> None:
        """The hyper-parameter table that the next step is expected to have."""

    @abstractmethod
    def gradient_complete(self, parameter: int) -> None:
        """The gradient of a parameter has landed as the next step is going to use it.

        From here on, and if there is an expected table, its records may be updated.
        """

    @abstractmethod
    def drop_early(self) -> None:
        """Give up what was begun for the next step."""

    @abstractmethod
    def allow_writes(self) -> None:
        """The last step is complete on every device: what comes next may be written."""

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Make the step complete on this device."""

    @abstractmethod
    def save(self) -> None:
        """Make the committed step durable where some of its state is in memory only."""

    @abstractmethod
    def reserve_blob(self, nbytes: int) -> None:
        """Make room for a host's part of this size."""

    @abstractmethod
    def amend(self, blob: bytes) -> None:
        """Replace the host's part of the committed step."""

    @property
    @abstractmethod
    def committed(self) -> LedgerRecord:
        """The record of the committed step."""

    @abstractmethod
    def read_state(self, run: int) -> list[npt.NDArray[np.float32]]:
        """Master and moments of a run, as committed last."""

    @property
    @abstractmethod
    def last_timings(self) -> Timings:
        """Of the last update."""

    @abstractmethod
    def abandon(self) -> None:
        """Undo `create`: remove everything reserved."""

    @abstractmethod
    def close(self) -> None:
        """Free memory, files and lock; a second call does nothing."""
