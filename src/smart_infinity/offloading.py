"""`offload()`: everything is checked, opened and wired here; `Engine` is what comes of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch

from smart_infinity import kernels
from smart_infinity.beginning import begin
from smart_infinity.devices import check_specs, open_devices
from smart_infinity.devices.base import Device
from smart_infinity.engine import Engine
from smart_infinity.errors import UnsupportedError
from smart_infinity.guard import failed_guard, remember
from smart_infinity.optimizer import OffloadedOptimizer
from smart_infinity.pace import Pace
from smart_infinity.planning import (
    check_cache,
    check_choice,
    check_count,
    check_memory,
    parse_bytes,
    plan,
    summary,
)
from smart_infinity.recovery import in_order
from smart_infinity.timeline import Timeline
from smart_infinity.trace import Trace

logger = logging.getLogger("smart_infinity")

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def offload(
    model: ModuleT,
    torch_optimizer: torch.optim.Optimizer,
    devices: Sequence[str | os.PathLike[str]],
    dtype: torch.dtype | None = None,
    device_memory: int | str | None = None,
    resume: bool | None = None,
    durability: Literal["step", "none"] = "step",
    verify: Literal["resume", "read"] = "resume",
    keep_snapshots: int = 2,
    overlap: bool = False,
    accumulation_steps: int | None = None,
    max_grad_norm: float | None = None,
    state_cache: int | str | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> tuple[ModuleT, OffloadedOptimizer]:
    """Move an optimizer's state to storage devices, which from then on run the optimizer.

    Args:
        model: a module on the CPU or on one CUDA GPU. It is changed in place and returned.
        torch_optimizer: a new `torch.optim.AdamW`, `Adam`, `SGD` or `Adagrad` over parameters of
            the model; class, groups and hyper-parameters are taken from it.
        devices: 1 to 16 existing directories, one per drive. Those of a state that is resumed
            may come in any order.
        dtype: cast the parameters (not the buffers) to this after the fp32 masters were taken
            from the weights as given; None leaves them.
        device_memory: budget per device for gradients and transfer buffers, in bytes or as in
            ``"512MiB"``; None takes what is needed, and where devices work ahead (with ``overlap``
            or ``accumulation_steps``) buffers for up to half of the state, in at most an eighth
            of the memory now free.
        resume: where the directories hold a state: True continues it, False discards it and its
            snapshots, None raises. Empty or half-made directories start fresh in any case.
        durability: ``"step"`` commits each step beside the one before, so that a crash at any
            instant leaves a complete step. ``"none"`` updates in place and takes half the space:
            a crash in the middle of a step leaves nothing but snapshots, and is refused on a
            resume; between steps the state is whole.
        verify: when the checksums of state are checked: ``"resume"``, or at each ``"read"`` too.
        keep_snapshots: how many of the snapshots that ``state_dict()`` makes are kept; 0 makes
            none.
        overlap: `step()` returns at once, and each module's forward waits for its own weights;
            whoever reads parameters in another way calls ``optimizer.synchronize()`` first.
        accumulation_steps: how many backwards make a step. With it, and if nothing scales the
            gradients, devices update each record as soon as its gradients are complete; whatever
            differs in the step from what was foreseen is done again.
        max_grad_norm: `step()` clips the gradients to this norm, as ``clip_grad_norm_`` does; the
            devices then only read ahead during backward.
        state_cache: host memory, over all devices, in which part of the state stays from step to
            step so that it need not be read; bytes, or as in ``"8GiB"``. With ``durability="none"``
            it is written only by `close()`, a snapshot, or the end of the process.
        trace: a file for a trace in Chrome's format, which Perfetto shows: what the host and the
            stages of each device did when.

    Returns:
        The model, and the `OffloadedOptimizer` to use in place of ``torch_optimizer``.

    Raises:
        SmartInfinityError: one of its subclasses, before the model is changed. Only a resume that
            finds damaged state may have moved weights by then; forward and saving then raise.
    """
    if resume not in (True, False, None):
        raise UnsupportedError(f"resume is {resume!r}. Expected True, False or None")
    check_choice("durability", durability, ("step", "none"))
    check_choice("verify", verify, ("resume", "read"))
    check_count("keep_snapshots", keep_snapshots, 0)
    pace = Pace(overlap, accumulation_steps, max_grad_norm)
    paths = check_specs(devices)
    if resume:
        paths = in_order(paths)
    budget, cache = (
        parse_bytes("device_memory", device_memory),
        parse_bytes("state_cache", state_cache),
    )
    check_cache(cache)
    planned = plan(model, torch_optimizer, len(paths), dtype)
    if budget is None:
        check_memory(planned.layout)
    failed = failed_guard(model)
    timeline = Timeline(None if trace is None else Trace(os.fspath(trace)))
    kernels.prepare(planned.layout.optimizer)
    opened: list[Device] = []
    engine: Engine | None = None
    try:
        for device in open_devices(
            paths,
            planned.layout,
            in_place=durability == "none",
            check_reads=verify == "read",
            works_ahead=pace.works_ahead,
            updates_early=pace.updates_early,
            state_cache=(cache or 0) // len(paths),
            trace=timeline.trace,
        ):
            opened.append(device)
        engine = Engine(model, planned, opened, torch_optimizer, pace, timeline)
        torn_set = failed.torn_set if failed is not None else None
        begin(engine, torch_optimizer.param_groups, dtype, budget, resume, torn_set)
        engine.connect()  # hooks come last, when all is well
    except BaseException as error:
        for device in opened:
            device.abandon()
            device.close()
        if engine is not None and engine.weights_moved:
            engine.guard.alarm(model, error, engine.set_uuid)
            remember(model, engine, engine.guard)
        raise
    if failed is not None:
        failed.silence()
    remember(model, engine, engine.guard)
    logger.info("%s", summary(planned.layout))
    return model, OffloadedOptimizer(engine, torch_optimizer, keep_snapshots)
