"""Small runs whose every state is known, and their directories as bytes: to damage and compare."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import directories, offload, offloaded_moments, two_groups, weights_of
from smart_infinity import layout, planning
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.ledger import Ledger, LedgerContents

RECORD_ELEMENTS = 500  # two pages in a record of AdamW, and several records on each of 3 devices

Image = dict[str, bytes]  # "<device>/<path in it>" -> content


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of cases, and nothing is to survive."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def use_small_records(patch: pytest.MonkeyPatch) -> None:
    cut = functools.partial(layout.plan_layout, record_elements=RECORD_ELEMENTS)
    patch.setattr(planning, "plan_layout", cut)


def read_image(root: Path) -> Image:
    """All files of the devices below ``root``."""
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def write_image(root: Path, image: Image) -> list[Path]:
    """Make ``root`` hold exactly this; returns the devices' directories."""
    shutil.rmtree(root, ignore_errors=True)
    for folder in {os.path.dirname(name) for name in image}:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, content in image.items():
        (root / name).write_bytes(content)
    return devices_of(root)


def devices_of(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def read_ledger(device: Path) -> LedgerContents:
    ledger = Ledger(BlockFile(str(device), str(device / "ledger"), direct=False, mode="r"))
    try:
        return ledger.read()
    finally:
        ledger.close()


def net() -> nn.Sequential:
    """6288 parameters by seed 0, in as many blocks as parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
    )


@dataclass(frozen=True)
class Known:
    """A state, by digests: equal means bit-equal."""

    steps: int
    weights: str
    masters_and_moments: str
    lr: tuple[float, ...]
    scheduler: int
    random: str | None  # not taken back where a run begins anew


class Run:
    """A run of `net` that can be stepped, compared, and broken off."""

    def __init__(self, devices: Sequence[Path], **options: Any) -> None:
        self.model = net()
        source = torch.optim.AdamW(two_groups(self.model), lr=1e-2, eps=1e-5)
        self.optimizer = offload(self.model, source, devices, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.optimizer.register_for_checkpointing(self.scheduler)

    @classmethod
    def new(cls, root: Path, count: int, **options: Any) -> Run:
        """Begin on ``count`` new directories below ``root``."""
        return cls(directories(root, count), **options)

    def step(self, seed: int) -> None:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        (self.model(x) * torch.rand(16)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            self.step(seed)
            self.scheduler.step()

    def known(self) -> Known:
        state = torch.get_rng_state()
        moments = offloaded_moments(self.model, self.optimizer)
        return Known(
            self.optimizer.steps,
            digest(weights_of(self.model)),
            digest([tensor for name in sorted(moments) for tensor in moments[name]]),
            tuple(group["lr"] for group in self.optimizer.param_groups),
            self.scheduler.last_epoch,
            digest([state]) if self.optimizer.steps else None,
        )

    def close(self) -> None:
        self.optimizer.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
