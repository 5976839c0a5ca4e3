"""Sets of local devices, driven as the engine drives them, but without torch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from smart_infinity.devices.base import StepPlan
from smart_infinity.devices.local import LocalDevice
from smart_infinity.kernels import OPTIMIZERS
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.frame import T_ACTIVE, T_OWN, TABLE_COLUMNS, encode_reference
from smart_infinity.layout import FORMAT_VERSION, ParameterSpec, Piece, Record, plan_layout
from smart_infinity.storage.ledger import LedgerRecord
from smart_infinity.storage.store import Commit
from smart_infinity.storage.superblock import Superblock

MOMENTS = ("exp_avg", "exp_avg_sq")

SPECS = [
    ParameterSpec("embed.w", (301, 257), "bfloat16"),
    ParameterSpec("h.0.w", (40_000,), "float32"),
    ParameterSpec("h.0.scale", (), "float32"),
    ParameterSpec("h.0.empty", (0, 3), "bfloat16"),
    ParameterSpec("h.1.w", (123, 1000), "float16"),
    ParameterSpec("norm.w", (7,), "bfloat16"),
]
ALL = list(range(len(SPECS)))
GROUP = {
    "lr": 0.01,
    "betas": (0.9, 0.99),
    "eps": 1e-5,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
}


class NumpyHost:
    """The host's end of the link: the parameters' words, without torch."""

    def __init__(self, words: list[np.ndarray]) -> None:
        self.words = words
        self.edited: set[int] = set()
        self.delivered: list[tuple[int, int, int]] = []

    def fetch_weights(self, record: Record, index: int, piece: Piece) -> np.ndarray:
        assert record.pieces[index] is piece
        return self.words[piece.parameter][piece.start : piece.start + piece.length]

    def edited_weights(self, record: Record, index: int, piece: Piece) -> np.ndarray | None:
        return self.fetch_weights(record, index, piece) if piece.parameter in self.edited else None

    def deliver_weights(self, record: Record, index: int, piece: Piece, words: np.ndarray) -> None:
        assert record.pieces[index] is piece
        self.words[piece.parameter][piece.start : piece.start + piece.length] = words
        self.delivered.append((piece.parameter, piece.start, piece.length))


def restore(device: LocalDevice, record: LedgerRecord, host: NumpyHost) -> bytes:
    superblock = device.identify()
    assert superblock is not None
    blob = device.open(record, superblock)
    device.settle(record)
    device.restore(host)
    return blob


class LocalSet:
    """A set of local devices, driven as the engine drives them."""

    def __init__(
        self, root: Path, num_devices: int, record_elements: int = 5000, **options: bool
    ) -> None:
        self.options = options
        self.layout = plan_layout(SPECS, "adamw", MOMENTS, num_devices, record_elements)
        rng = np.random.default_rng(1)
        self.forms = [FORMAT_OF_DTYPE[spec.dtype] for spec in SPECS]
        self.host = NumpyHost(
            [
                encode_reference(form, rng.standard_normal(spec.numel).astype(np.float32))
                for spec, form in zip(SPECS, self.forms, strict=True)
            ]
        )
        self.paths = [root / f"device{i}" for i in range(num_devices)]
        for path in self.paths:
            path.mkdir(parents=True, exist_ok=True)
        self.step = 0
        self.counts = np.zeros(len(SPECS), np.int64)
        self.devices = self.open()
        for index, device in enumerate(self.devices):
            device.attach(None)
            device.create()
            device.initialize(self.host, self.forms, [[0.0, 0.0]] * len(SPECS), self.commit_of())
            device.seal(
                Superblock(
                    FORMAT_VERSION, "set", index, num_devices, self.layout.hash(), "adamw", "Net"
                )
            )

    def open(self) -> list[LocalDevice]:
        return [
            LocalDevice(str(path), self.layout, index, 2, threading.Semaphore(1), **self.options)
            for index, path in enumerate(self.paths)
        ]

    def commit_of(self) -> Commit:
        step_id = 0, self.step, b"attempt-attempt-"
        return Commit(step_id, self.counts, f"step {self.step}".encode())

    def update(
        self, active: list[int], edited: list[frozenset[int]] | None = None, commit: bool = True
    ) -> None:
        rng = np.random.default_rng(100 + self.step)
        table = np.zeros((len(SPECS), TABLE_COLUMNS), np.float32)
        for index, (spec, form) in enumerate(zip(SPECS, self.forms, strict=True)):
            values = rng.standard_normal(spec.numel).astype(np.float32)
            if index not in active:
                continue
            words = encode_reference(form, values)
            for device, number in self.layout.runs_of[index]:
                run = self.layout.devices[device].runs[number]
                own = words[run.start : run.start + run.length]
                self.devices[device].gradients.land(number, form, own)
            self.counts[index] += 1
            row = OPTIMIZERS["adamw"].row(GROUP, int(self.counts[index]))
            table[index, :T_OWN] = 1, 1, -np.inf, np.inf
            table[index, T_OWN : T_OWN + len(row)] = row
        assert table[:, T_ACTIVE].sum() == len(active)
        self.host.delivered.clear()
        self.step += 1
        for index, device in enumerate(self.devices):
            own = edited[index] if edited else frozenset()
            device.update(StepPlan(self.commit_of().step_id, table, own), self.host)
            if commit:
                device.commit(self.commit_of())

    def state(self) -> list[np.ndarray]:
        """By parameter: master and moments, whole."""
        return [
            np.concatenate(
                [np.stack(self.devices[device].read_state(run)) for device, run in runs], axis=1
            )
            if runs
            else np.zeros((3, 0), np.float32)
            for runs in self.layout.runs_of
        ]

    def close(self) -> None:
        for device in self.devices:
            device.close()
