"""The training loop of ``train``: ordinary PyTorch, with a clock around every phase."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

PHASES = ("forward", "backward", "clip", "update")


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one step did; one line of ``metrics.jsonl``."""

    step: int
    """Counted from 1 over the whole life of the state, resumed parts included."""
    loss: float | None
    """Mean over the step's batches, before the update; None where it was not finite."""
    grad_norm: float | None
    """Norm of all gradients before clipping; None without clipping or where not finite."""
    lr: float
    """Of the first parameter group."""
    tokens: int
    """Tokens trained on in this step."""
    skipped: bool
    """The optimizer left everything as it was, because a gradient was not finite."""
    seconds: dict[str, float]
    """Per phase, and ``total``, which also holds what is between the phases."""
    bytes: dict[str, int]
    """Over the host link, by kind."""
    devices: dict[str, dict[str, float]]
    """Per device: seconds of its workers by phase, and bytes read and written."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole step."""
        return self.tokens / self.seconds["total"]

    def device_gb_per_second(self) -> dict[str, float]:
        """Bytes that each device read and wrote, per second of the update."""
        seconds = self.seconds["update"]
        return {
            name: (device["bytes_read"] + device["bytes_written"]) / seconds / 1e9
            for name, device in self.devices.items()
        }

    @property
    def storage_wait_share(self) -> float:
        """Share of the step in which training stood still for storage, from 0 to 1.

        Training waits during the update; of that time the part counts which the devices' workers
        did not spend computing.
        """
        phases = ("waiting", "reading", "computing", "writing")
        total = sum(device[phase] for device in self.devices.values() for phase in phases)
        if not total:
            return 0.0
        computing = sum(device["computing"] for device in self.devices.values())
        return (1 - computing / total) * self.seconds["update"] / self.seconds["total"]


def train_steps(
    model: torch.nn.Module,
    optimizer: Any,
    batches: "Iterator[Tensor]",
    *,
    first_step: int,
    last_step: int,
    accumulate: int,
    max_grad_norm: float,
    compute: AbstractContextManager[Any],
) -> Iterator[StepMetrics]:
    """Trains, and yields what each step did.

    Args:
        model: a causal language model that returns ``.loss`` when given ``labels``.
        optimizer: what `smart_infinity.offload` returned.
        batches: endless batches of token ids.
        first_step: number of the first step to make.
        last_step: number of the last one.
        accumulate: backward passes per step; their losses are averaged.
        max_grad_norm: clips the norm of all gradients to this; 0 leaves them alone.
        compute: entered around each forward and backward (see `cli.compute`).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(first_step, last_step + 1):
        clock = PhaseClock()
        link_before = optimizer.traffic.as_dict()
        optimizer.zero_grad()
        clock.lap("other")

        loss_sum = 0.0
        num_tokens = 0
        for _ in range(accumulate):
            batch = next(batches)
            with compute:
                loss = model(input_ids=batch, labels=batch).loss
                clock.lap("forward")
                (loss / accumulate).backward()
                clock.lap("backward")
            loss_sum += loss.item()
            num_tokens += batch.numel()

        grad_norm = None
        if max_grad_norm:
            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
        clock.lap("clip")
        optimizer.step()
        clock.lap("update")

        skipped = optimizer.step_was_skipped
        yield StepMetrics(
            step=step,
            loss=_finite(loss_sum / accumulate),
            grad_norm=_finite(grad_norm),
            lr=float(optimizer.param_groups[0]["lr"]),
            tokens=num_tokens,
            skipped=skipped,
            seconds=clock.seconds(),
            bytes={
                kind: count - link_before[kind]
                for kind, count in optimizer.traffic.as_dict().items()
            },
            # A skipped step did no I/O; the optimizer still holds the last one's figures.
            devices={} if skipped else _device_metrics(optimizer),
        )


def evaluate(
    model: torch.nn.Module, windows: "Tensor", compute: AbstractContextManager[Any]
) -> float | None:
    """Mean loss over windows, one at a time; None where there are none or it is not finite."""
    if not len(windows):
        return None
    model.eval()
    with torch.no_grad(), compute:
        losses = [
            model(input_ids=window, labels=window).loss.item() for window in windows.unsqueeze(1)
        ]
    model.train()
    return _finite(sum(losses) / len(losses))


class PhaseClock:
    """Adds up wall-clock time by phase; every moment belongs to exactly one."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> None:
        """Books the time since the last lap under ``phase``."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds per phase, and ``total``."""
        phases = {phase: self._seconds[phase] for phase in PHASES}
        return {**phases, "total": self._last - self._begin}


def _finite(value: float | None) -> float | None:
    # JSON has no NaN and no infinity.
    return value if value is not None and math.isfinite(value) else None


def _device_metrics(optimizer: Any) -> dict[str, dict[str, float]]:
    return {
        name: {**timings, **optimizer.last_io[name]}
        for name, timings in optimizer.last_timings.items()
    }
