"""How an engine begins: with a first state, with the one it finds, or by going back to another."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Any

import torch

from smart_infinity import snapshots
from smart_infinity.errors import DeviceFullError, DeviceIOError
from smart_infinity.interrupts import deferred_interrupt
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.layout import FORMAT_VERSION
from smart_infinity.recipe import initial_moment
from smart_infinity.recovery import Found, recover
from smart_infinity.storage.superblock import Superblock
from smart_infinity.weights import DTYPES

if TYPE_CHECKING:
    from smart_infinity.engine import Engine

logger = logging.getLogger("smart_infinity")

Groups = list[dict[str, Any]]


def begin(
    engine: Engine,
    groups: Groups,
    dtype: torch.dtype | None,
    device_memory: int | None,
    resume: bool | None,
    torn_set: str | None,
) -> None:
    """Make the first state, or continue the one found.

    ``torn_set`` is the set whose failure tore the model's weights, or None.
    """
    found = recover(engine.devices, engine.layout, resume, torn_set)
    for device in engine.devices:
        device.attach(device_memory)
    if found is not None:
        _continue_from(engine, found, groups, dtype)  # fingerprints are taken on delivery
        return
    if torn_set is not None:
        logger.warning(
            "the model's weights were torn by a failure, and resume=False takes them as "
            "they are now. Load weights into the model first, unless that was done"
        )
    if resume:
        logger.warning(
            "resume=True, but %s hold no step yet: starting fresh",
            [device.path for device in engine.devices],
        )
    try:
        _begin_anew(engine, groups)
    except DeviceIOError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DeviceFullError(
            f"device {error.device}: its file system became full while {error.path} was "
            "written. Free some space, or add a device; nothing was left reserved"
        ) from error
    _cast(engine, dtype)
    engine.weights.take_fingerprints()


def _begin_anew(engine: Engine, groups: Groups) -> None:
    for device in engine.devices:
        device.create()
    formats = [FORMAT_OF_DTYPE[DTYPES[p.dtype]] for p in engine.parameters]
    moments: list[list[float]] = [[] for _ in engine.parameters]
    for group in groups:
        value = initial_moment(engine.layout.optimizer, group)
        for parameter in group["params"]:
            if id(parameter) in engine.index_of:
                moments[engine.index_of[id(parameter)]] = [value] * len(engine.layout.moments)
    commit = engine.make_commit(0, groups)
    engine.weights.follow()
    engine.on_all_devices(
        lambda device, index: device.initialize(
            engine.weights.port(index), formats, moments, commit
        )
    )
    # Superblocks come last: where there is one, there is a state.
    for index, device in enumerate(engine.devices):
        device.seal(
            Superblock(
                FORMAT_VERSION,
                engine.set_uuid,
                index,
                len(engine.devices),
                engine.layout.hash(),
                engine.layout.optimizer,
                type(engine.model()).__name__,
            )
        )


def _continue_from(engine: Engine, found: Found, groups: Groups, dtype: torch.dtype | None) -> None:
    """Go back to a committed step. All that can be refused is, before anything is written."""
    blobs = engine.on_all_devices(
        lambda device, index: device.open(found.records[index], found.superblocks[index])
    )
    # A crash may have left the host's part amended on some devices only: the last one counts.
    amendments = [record.amendment for record in found.records]
    blob = blobs[amendments.index(max(amendments))]
    engine.host_state.check(blob, engine.members(groups))
    engine.on_all_devices(lambda device, index: device.settle(found.records[index]))
    engine.set_uuid = found.superblocks[0].set_uuid
    for device, amendment in zip(engine.devices, amendments, strict=True):
        if amendment < max(amendments):
            device.amend(blob)
    with deferred_interrupt():
        engine.weights_moved = True
        _cast(engine, dtype)
        _restore(engine)
        engine.host_state.load(blob, groups)
    engine.adopt(found.records[0])


def go_back(engine: Engine, name: str, groups: Groups) -> None:
    """Make a snapshot the committed step, and take all of it over."""
    keepers = [device.snapshots for device in engine.devices]
    snapshots.restore(keepers, name, engine.step_id[0])
    engine.host_state.load(_restore(engine)[0], groups)
    engine.adopt(engine.devices[0].committed)


def _restore(engine: Engine) -> list[bytes]:
    """Take over the weights that all devices have committed; returns what the host committed."""
    engine.weights.follow()
    blobs = engine.on_all_devices(lambda device, index: device.restore(engine.weights.port(index)))
    engine.weights.show_all()
    return blobs


def _cast(engine: Engine, dtype: torch.dtype | None) -> None:
    model = engine.model()
    if dtype is not None and model is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype is not dtype:
                parameter.data = parameter.data.to(dtype)
    engine.weights.bind()
