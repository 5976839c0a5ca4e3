"""LR schedulers go on where a crash at any point of the loop has left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from crashes import Counter, Everything, Run, begin, contents, copies, hyper_parameters
from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    run_python,
    same_bits,
    small_net,
    train,
    two_groups,
)

Optimizer = torch.optim.Optimizer


pytestmark = pytest.mark.usefixtures("without_syncs")


# --- LR schedulers ---------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=30, cycle_momentum=True),
    "WarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "Plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.6, patience=0),
}
# How often the scheduler is stepped after a step of the optimizer.
PATTERNS: dict[str, Callable[[int], int]] = {
    "each": lambda n: 1,
    "epoch": lambda n: int(n % 3 == 0),
    "twice": lambda n: 2,
}
STEPS, CRASHES = 7, range(1, 7)


def call(scheduler: Any, n: int, k: int) -> None:
    """The ``k``-th call after step ``n``; a plateau is told a loss that it has to remember."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float((7 * n + 3 * k) % 5))
    else:
        scheduler.step()


def is_foreseen(name: str, pattern: str, n: int) -> bool:
    """Whether the calls after step ``n`` are known when it is committed."""
    return name != "Plateau" and pattern != "epoch" and n > 1


def loop(
    run: Run, scheduler: Any, steps: range, calls: Callable[[int], int]
) -> Iterator[tuple[str, int, int]]:
    """The user's loop, which stops at each point where a crash makes a difference."""
    model, optimizer = run
    for n in steps:
        net_loss(model, n).backward()
        yield "before", n, 0
        optimizer.step()
        optimizer.zero_grad()
        yield "stepped", n, 0
        for k in range(calls(n)):
            call(scheduler, n, k)
            yield "called", n, k + 1


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_continue_after_a_crash_at_any_point(
    name: str, pattern: str, tmp_path: Path
) -> None:
    calls, make = PATTERNS[pattern], SCHEDULES[name]
    devices = directories(tmp_path, 1 + (pattern == "each"))
    run = begin(devices)
    scheduler = make(run[1])
    run[1].register_for_checkpointing(scheduler)
    after: dict[int, Everything] = {}
    found: list[tuple[int, int, list[Path], Any]] = []
    for point, n, done in loop(run, scheduler, range(1, STEPS + 1), calls):
        if point == "before":
            if n > 1:
                after[n - 1] = Everything(*run, scheduler)
            if n - 1 in CRASHES:  # a crash here finds what one after the last call does
                last = [contents([a])[str(a / "ledger")] for a in found[-1][2]]
                assert [contents([a])[str(a / "ledger")] for a in devices] == last
        elif n in CRASHES:
            crashed = copies(devices, tmp_path / f"crash{len(found)}")
            now = hyper_parameters(run[1]), scheduler.state_dict()
            found.append((n, done, crashed, now))
    after[STEPS] = Everything(*run, scheduler)
    run[1].close()

    assert len(found) == sum(1 + calls(n) for n in CRASHES)
    for n, done, crashed, now in found:
        model = small_net(seed=77)
        source = OPTIMIZERS["adamw"](two_groups(model))
        early = make(source) if n % 2 else None  # before offload() and after are the same
        optimizer = offload(model, source, crashed, resume=True)
        again = early or make(optimizer)
        optimizer.register_for_checkpointing(again)
        if not is_foreseen(name, pattern, n):
            # What had not been called is not guessed: it is as it was, and can be made up for.
            assert (hyper_parameters(optimizer), again.state_dict()) == now, (n, done)
            for k in range(done, calls(n)):
                call(again, n, k)
        after[n].check(model, optimizer, again)
        for _ in loop((model, optimizer), again, range(n + 1, n + 2), calls):
            pass
        after[n + 1].check(model, optimizer, again)
        optimizer.close()


CONTINUE = """
import sys
from pathlib import Path
import torch
from torch.optim import lr_scheduler
from helpers import *
from crashes import Everything

torch.set_num_threads(1)
*devices, out = map(Path, sys.argv[1:])
model = small_net(seed=77)
optimizer = offload(model, OPTIMIZERS["adamw"](two_groups(model)), devices, resume=True)
scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
optimizer.register_for_checkpointing(scheduler)
train(model, optimizer, range(5, 8), net_loss, scheduler=scheduler)
found = Everything(model, optimizer, scheduler)
torch.save([found.tensors, found.numbers], out)
"""


def test_a_new_process_continues_where_a_crash_left_off(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    scheduler = SCHEDULES["ExponentialLR"](optimizer)
    optimizer.register_for_checkpointing(scheduler)
    train(model, optimizer, range(4), net_loss, scheduler=scheduler)
    train(model, optimizer, range(4, 5), net_loss)
    crashed = copies(devices, tmp_path / "crash")  # before the call that belongs to step 5
    scheduler.step()
    train(model, optimizer, range(5, 8), net_loss, scheduler=scheduler)
    expected = Everything(model, optimizer, scheduler)
    optimizer.close()
    done = run_python(CONTINUE, *crashed, tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr
    tensors, numbers = torch.load(tmp_path / "out.pt")
    assert numbers == expected.numbers
    assert same_bits(tensors, expected.tensors)


@pytest.mark.parametrize("first", [1, 2])
def test_a_second_crash_soon_after_the_first(first: int, tmp_path: Path) -> None:
    devices = directories(tmp_path, 1)
    run = begin(devices)
    scheduler = SCHEDULES["ExponentialLR"](run[1])
    run[1].register_for_checkpointing(scheduler)
    train(*run, range(first), net_loss, scheduler=scheduler)
    for n in range(first, first + 3):
        devices = copies(devices, tmp_path / f"crash{n}")
        run = begin(devices, resume=True)
        scheduler = SCHEDULES["ExponentialLR"](run[1])
        run[1].register_for_checkpointing(scheduler)
        assert run[1].param_groups[0]["lr"] == pytest.approx(3e-3 * 0.9**n)
        train(*run, range(n, n + 1), net_loss)  # dies before scheduler.step()


def test_registering_one_by_one_is_registering_together(tmp_path: Path) -> None:
    devices = directories(tmp_path, 1)
    model, optimizer = begin(devices)
    objects = [Counter(3), SCHEDULES["ExponentialLR"](optimizer), Counter(4), Counter(5)]
    optimizer.register_for_checkpointing(*objects)
    train(model, optimizer, range(4), net_loss, scheduler=objects[1])
    expected = Everything(model, optimizer, *objects)
    optimizer.close()
    model, optimizer = begin(devices, resume=True)
    objects = [Counter(), SCHEDULES["ExponentialLR"](optimizer), Counter(), Counter()]
    for own in objects:
        optimizer.register_for_checkpointing(own)
    expected.check(model, optimizer, *objects)
