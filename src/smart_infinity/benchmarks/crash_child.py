"""The trainer that the crash campaign kills: a child process which tells all that goes into a step.

What it sends is one small message for each event, written at once (a pipe takes up to 4096 bytes
in one piece), so that a kill never leaves half a message.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

import smart_infinity

OPTIMIZERS = ("adamw", "sgd")
FEATURES, OUTPUTS, BATCH = 13, 5, 6
MICRO_BATCHES = 2
MAX_NORM = 0.5
NOT_CLIPPED = ("adamw", "bfloat16")  # nothing is scaled, so that updates during backward stand
NUM_WORKERS = 2
ENDLESS = 1 << 20  # steps; a child that is to be killed makes steps until it is
MAX_TRACEBACK = 3000


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one child is to do.

    Attributes:
        seed: of the whole run: first weights, first random states, data, factors.
        optimizer: ``adamw`` or ``sgd``.
        dtype: of the weights, a name of torch's.
        directories: one for each device.
        attempts: whose data and learning rate to take, one after the other: one attempt, or the
            lineage of a whole run.
        steps_each: steps to make as each of them.
        resume: whether to continue what the directories hold.
        overlap: whether steps are under way during the next forward and backward, and updates
            are made during backward.
        workers: whether the data comes from a DataLoader with forked workers.
        skip_scheduler_after: steps after which the scheduler is not stepped.
    """

    seed: int
    optimizer: str
    dtype: str
    directories: tuple[str, ...]
    attempts: tuple[int, ...]
    steps_each: int = ENDLESS
    resume: bool = True
    overlap: bool = False
    workers: bool = False
    skip_scheduler_after: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Began:
    """The first message: from here on the child is in `offload()`."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The child is ready to make steps, from this one on."""

    step: int
    weights: str
    scheduler_steps: int
    batches_seen: int
    workers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Sent before `optimizer.step()`: everything that goes into it."""

    attempt: int
    step: int
    learning_rate: str
    norm: str
    draws: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """Sent when the step is committed, and the scheduler has made its own.

    That is after `optimizer.step()`; of one that overlaps, after the backward that follows.
    """

    step: int
    weights: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last message: digests of masters, moments and everything registered."""

    states: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The child raised."""

    error: str
    traceback: str


Message = Began | Resumed | StepInputs | StepDone | Finished | Failed


Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class Batches(torch.utils.data.Dataset[Batch]):
    """The micro-batches of one attempt: by seed, attempt and number, nothing else."""

    def __init__(self, seed: int, attempt: int) -> None:
        self._seed, self._attempt = seed, attempt

    def __getitem__(self, number: int) -> Batch:
        generator = np.random.default_rng((self._seed, self._attempt, number))
        x = generator.standard_normal((BATCH, FEATURES), np.float32)
        return x, generator.standard_normal((BATCH, OUTPUTS), np.float32)


class BatchCounter:
    """Something of the user's that is registered: how many micro-batches were seen, and a sum."""

    def __init__(self) -> None:
        self.seen, self.sum_of_draws = 0, 0

    def state_dict(self) -> dict[str, int]:
        """Its state, as torch's objects give theirs."""
        return {"seen": self.seen, "sum_of_draws": self.sum_of_draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a state over."""
        self.seen, self.sum_of_draws = state["seen"], state["sum_of_draws"]


def make_model(seed: int) -> nn.Sequential:
    """About 73,000 parameters of odd widths, 22 blocks: each of three devices holds several runs.

    The dropout draws from torch's random state in every forward.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 263),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(263, 257),
        nn.GELU(),
        nn.Linear(257, OUTPUTS),
    )


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that hyper-parameters differ within a unit."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=2e-3)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def make_scheduler(name: str, optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """One that goes on from the rate it finds, and one that computes it from the first rate."""
    if name == "adamw":
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.05 * epoch))


def rate_factor(seed: int, attempt: int) -> float:
    """What an attempt multiplies the learning rate with, once."""
    return random.Random(f"{seed} {attempt}").uniform(0.7, 1.4)


def seed_random_states(seed: int) -> None:
    """Where the random states of a run begin."""
    torch.manual_seed(seed + 1)
    np.random.seed(seed + 2)
    random.seed(seed + 3)


def draw() -> tuple[int, int, int]:
    """One number from each of the three random states that a commit holds."""
    return (
        int(torch.randint(1 << 31, ())),
        int(np.random.randint(1 << 31)),
        random.getrandbits(31),
    )


def digest(tensors: Sequence[Tensor]) -> str:
    """Of the tensors' bytes."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class Trainer:
    """An ordinary training loop over `smart_infinity.offload`, from start or resume to its end."""

    def __init__(self, task: Task) -> None:
        self._task = task
        model = make_model(task.seed)
        self._model, self._optimizer = smart_infinity.offload(
            model,
            make_optimizer(task.optimizer, model),
            task.directories,
            dtype=getattr(torch, task.dtype),
            resume=task.resume,
            overlap=task.overlap,
            accumulation_steps=MICRO_BATCHES if task.overlap else None,
        )
        self._counter = BatchCounter()
        self._scheduler = make_scheduler(task.optimizer, self._optimizer)
        self._optimizer.register_for_checkpointing(self._scheduler, self._counter)
        self._workers: tuple[int, ...] = ()
        self._loader: Any = None
        if task.workers:
            self._start_loader()
        if self._optimizer.committed_step == 0:
            seed_random_states(task.seed)
        elif task.workers:
            self._optimizer.restore_random_state()  # a DataLoader draws a seed for its workers
        self._attempt: int | None = None
        self._is_under_way = False

    def _start_loader(self) -> None:
        begin = MICRO_BATCHES * self._optimizer.committed_step
        loader: Any = torch.utils.data.DataLoader(
            Batches(self._task.seed, self._task.attempts[0]),
            batch_size=None,
            collate_fn=tuple,  # arrays travel through a pipe; tensors would leave shared memory
            sampler=range(begin, begin + MICRO_BATCHES * ENDLESS),
            num_workers=NUM_WORKERS,
            multiprocessing_context="fork",
        )
        self._loader = iter(loader)
        self._workers = tuple(worker.pid for worker in self._loader._workers)

    def resumed(self) -> Resumed:
        """Where the run stands now."""
        return Resumed(
            step=self._optimizer.committed_step,
            weights=self._digest(),
            scheduler_steps=self._scheduler.last_epoch,
            batches_seen=self._counter.seen,
            workers=self._workers,
        )

    def step(self, attempt: int) -> Iterator[StepInputs | StepDone]:
        """One step of an attempt: the event before it, and the one after it.

        If steps overlap, the one after the step before comes first.
        """
        number = self._optimizer.steps + 1
        if attempt != self._attempt:
            self._attempt = attempt
            self._change_rate(rate_factor(self._task.seed, attempt))
        draws = draw()
        for micro_batch in range(MICRO_BATCHES):
            x, y = self._batch(attempt, MICRO_BATCHES * (number - 1) + micro_batch)
            x = x + draws[micro_batch] / (1 << 31)
            output = self._model(x.to(getattr(torch, self._task.dtype)))
            (20 * (output.float() - y - draws[2] / (1 << 31)).square().mean()).backward()
            self._counter.seen += 1
        self._counter.sum_of_draws += sum(draws)
        kind = self._task.optimizer, self._task.dtype
        limit = math.inf if kind == NOT_CLIPPED else MAX_NORM
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        yield from self.last_step()
        yield StepInputs(
            attempt=attempt,
            step=number,
            learning_rate=float(self._optimizer.param_groups[0]["lr"]).hex(),
            norm=float(norm).hex(),
            draws=draws,
        )
        self._optimizer.step()
        if number not in self._task.skip_scheduler_after:
            self._scheduler.step()
        self._optimizer.zero_grad()
        self._is_under_way = True
        if not self._task.overlap:
            yield from self.last_step()

    def last_step(self) -> Iterator[StepDone]:
        """What is to be told of the last step, if that was not done yet."""
        if self._is_under_way:
            self._is_under_way = False
            self._optimizer.synchronize()
            yield StepDone(step=self._optimizer.committed_step, weights=self._digest())

    def finished(self) -> Finished:
        """Everything that the run leaves, and close."""
        states = {
            f"{kind} of {name}": digest([tensor])
            for name, parameter in self._model.named_parameters()
            for kind, tensor in self._optimizer.read_state(parameter).items()
        }
        states["counter"] = json.dumps(self._counter.state_dict())
        states["scheduler"] = repr(self._scheduler.state_dict())
        states["next draws"] = str(draw())
        self._loader = None  # ends its workers
        self._optimizer.close()
        return Finished(states=states)

    def _digest(self) -> str:
        return digest(list(self._model.parameters()))

    def _change_rate(self, factor: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] *= factor
        self._scheduler.base_lrs = [rate * factor for rate in self._scheduler.base_lrs]

    def _batch(self, attempt: int, number: int) -> tuple[Tensor, Tensor]:
        if self._loader is not None:
            x, y = next(self._loader)
        else:
            x, y = Batches(self._task.seed, attempt)[number]
        return torch.from_numpy(x), torch.from_numpy(y)


def train(task: Task, connection: Connection) -> None:
    """The child's main function. Its workers are found by its process group once it is dead."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    logging.getLogger("smart_infinity").addHandler(logging.NullHandler())
    logging.getLogger("smart_infinity").propagate = False
    try:
        connection.send(Began())
        trainer = Trainer(task)
        connection.send(trainer.resumed())
        for attempt in task.attempts:
            for _ in range(task.steps_each):
                for event in trainer.step(attempt):
                    connection.send(event)
        for event in trainer.last_step():
            connection.send(event)
        connection.send(trainer.finished())
    except BrokenPipeError:  # the campaign is over
        return
    except Exception as error:
        failed = Failed(
            error=f"{type(error).__name__}: {error}"[:1000],
            traceback=traceback.format_exc()[-MAX_TRACEBACK:],
        )
        connection.send(failed)
