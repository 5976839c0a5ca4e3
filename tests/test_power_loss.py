"""Power is lost at any instant: a whole step remains, the right one, or a refusal; see `Cut`."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from images import (
    Image,
    Known,
    Run,
    in_memory,
    read_image,
    read_ledger,
    use_small_records,
    write_image,
)
from smart_infinity.errors import CorruptStateError
from smart_infinity.layout import PAGE_BYTES
from smart_infinity.storage.blockfile import observing
from smart_infinity.tools.history import restore_snapshot

FINEST = 64  # finer than any drive tears a write


@pytest.fixture(autouse=True)
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_records(monkeypatch)

    def not_here(*_: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    # So that a snapshot is copied back by writes that the observer sees.
    monkeypatch.setattr(os, "copy_file_range", not_here)


@pytest.fixture
def root() -> Iterator[Path]:
    with in_memory() as path:
        yield path


@dataclass
class Recording:
    """All writes and syncs of a run from ``base`` on, and the states at the returns of its calls.

    Attributes:
        operations: (file, offset, bytes) of a write, (file, None, None) of a sync.
        marks: (number of operations before it, kind, state).
    """

    root: Path
    base: Image
    operations: list[tuple[str, int | None, bytes | None]] = field(default_factory=list)
    marks: list[tuple[int, str, Known]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def mark(self, kind: str, known: Known) -> None:
        self.marks.append((len(self.operations), kind, known))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        def note(path: str, offset: int | None, data: bytes | None) -> None:
            with self.lock:
                self.operations.append((os.path.relpath(path, self.root), offset, data))

        with observing(note):
            yield

    def allowed(self, cut: int) -> list[Known]:
        """The state that was durable at the cut, and the one in flight.

        A step in flight may have been committed with the scheduler's call that follows it.
        """
        durable = max(at for at, mark in enumerate(self.marks) if mark[0] <= cut)
        after = self.marks[durable + 1 : durable + 3]
        states = [self.marks[durable][2], *(mark[2] for mark in after[:1])]
        if [mark[1] for mark in after] == ["step", "scheduler"]:
            states.append(after[1][2])
        return states

    def is_quiet(self, cut: int) -> bool:
        """Whether nothing was in flight."""
        return any(mark[0] == cut for mark in self.marks)

    def image(self, cut: int, draw: random.Random) -> Image:
        """What the drives hold after a loss of power behind ``cut`` operations.

        Writes that a sync of their file followed are there. Of the others, of each file any, and
        of these any pages or sectors.
        """
        done = self.operations[:cut]
        synced = {name: at for at, (name, offset, _) in enumerate(done) if offset is None}
        unit = draw.choice([PAGE_BYTES, FINEST])
        share = {
            name: draw.choice([0, 1, draw.random(), draw.random()])
            for name in sorted({name for name, *_ in done})
        }
        is_worst = draw.random() < 0.3  # each write of a ledger is torn behind its first change
        files = {name: bytearray(content) for name, content in self.base.items()}
        for at, (name, offset, data) in enumerate(done):
            if offset is None or data is None:
                continue
            durable = at < synced.get(name, -1)
            if is_worst and not durable and "ledger" in name:
                file = files[name]
                for begin in range(offset, offset + len(data), FINEST):
                    part = data[begin - offset : begin - offset + FINEST]
                    if file[begin : begin + len(part)] != part:
                        file[begin : begin + len(part)] = part
                        break
                continue
            is_torn = draw.random() < 0.7
            if not durable and not is_torn and draw.random() >= share[name]:
                continue
            begin = offset
            while begin < offset + len(data):
                end = min(begin // unit * unit + unit, offset + len(data))
                if durable or not is_torn or draw.random() < share[name]:
                    file = files[name]
                    file.extend(bytes(max(0, end - len(file))))
                    file[begin:end] = data[begin - offset : end - offset]
                begin = end
        return {name: bytes(content) for name, content in files.items()}


@dataclass
class Campaign:
    """Runs by seed that lose power again and again; each crash continues one before it.

    Attributes:
        cuts: how many to choose of each recording; None: one behind every operation.
        kept: the state in the snapshot that later generations find.
    """

    root: Path
    num_devices: int
    durability: str
    seed: int
    cuts: int | None
    outcomes: Counter[str] = field(default_factory=Counter)
    kept: Known | None = None

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def run(self, generations: int) -> None:
        recording = self.first()
        for generation in range(generations):
            crashes = []
            for cut in self.choose(recording):
                crash = self.check(recording, cut)
                if crash is not None and crash[1].steps:
                    crashes.append(crash)
            # Rather one after which the devices differ: what is abandoned then might be mixed up.
            crashes.sort(key=lambda crash: crash[2])
            if generation + 1 < generations:
                recording = self.next(generation + 1, *self.draw.choice(crashes[-3:])[:2])

    def choose(self, recording: Recording) -> list[int]:
        count = len(recording.operations)
        if self.cuts is None:
            return list(range(count + 1))
        small = [at for at in range(count) if "state" not in recording.operations[at][0]]
        near = {at + self.draw.randrange(2) for at in self.draw.sample(small, self.cuts - 2)}
        return sorted({*near, self.draw.choice(recording.marks)[0], self.draw.randrange(count)})

    def first(self) -> Recording:
        """Three steps from the first state on."""
        run = Run.new(self.root / "live", self.num_devices, durability=self.durability)
        recording = Recording(self.root / "live", read_image(self.root / "live"))
        recording.mark("begin", run.known())
        with run, recording.recording():
            self.steps(run, recording, 3)
        return recording

    def next(self, generation: int, image: Image, known: Known) -> Recording:
        """A new attempt from a crash's image on: other data, another learning rate."""
        devices = write_image(self.root / "live", image)
        if generation == 1:
            with self.resume(devices) as run:
                run.train([self.number()])
                run.optimizer.snapshot("kept")
                self.kept = run.known()
                run.train([self.number()])
                known = run.known()
        recording = Recording(self.root / "live", read_image(self.root / "live"))
        recording.mark("begin", known)
        with recording.recording(), self.resume(devices) as run:
            assert run.known() == known
            recording.mark("resume", known)
            if generation == 2:  # only once: a second time it would be taken for the rule
                run.scheduler.step()
                recording.mark("scheduler", run.known())
            for group in run.optimizer.param_groups:
                group["lr"] *= self.draw.uniform(0.3, 3)
            if generation % 2:
                self.steps(run, recording, 1)
                run.optimizer.restore("kept")
                assert run.known() == self.kept
                recording.mark("restore", self.kept)
            self.steps(run, recording, 2)
        return recording

    def steps(self, run: Run, recording: Recording, count: int) -> None:
        for _ in range(count):
            if self.draw.random() < 0.3:
                with torch.no_grad():
                    run.model[2].weight[: self.draw.randrange(64)] *= 1.5
            run.step(self.number())
            recording.mark("step", run.known())
            run.scheduler.step()
            recording.mark("scheduler", run.known())

    def number(self) -> int:
        return self.draw.randrange(1 << 30)

    def resume(self, devices: list[Path]) -> Run:
        return Run(devices, resume=True, durability=self.durability)

    def check(self, recording: Recording, cut: int) -> tuple[Image, Known, bool] | None:
        """One case; returns what was recovered, or None where that was refused."""
        image = recording.image(cut, self.draw)
        allowed = recording.allowed(cut)
        is_quiet = recording.is_quiet(cut)
        devices = write_image(self.root / "found", image)
        newest = {read_ledger(device).records[0].step_id for device in devices}
        try:
            with self.resume(devices) as run:
                known = run.known()
        except CorruptStateError:
            if self.durability == "step" or is_quiet:
                raise
            self.outcomes["refused"] += 1
            self.check_way_back(devices)
            return None
        assert known in allowed, f"cut {cut} of {len(recording.operations)}: {known} of {allowed}"
        kind = "quiet" if is_quiet else "durable" if known == allowed[0] else "in flight"
        self.outcomes[kind] += 1
        return image, known, len(newest) > 1

    def check_way_back(self, devices: list[Path]) -> None:
        """A torn state can be replaced by a snapshot."""
        if self.kept is None:
            return
        assert restore_snapshot(devices, "kept") == self.kept.steps
        with self.resume(devices) as run:
            assert run.known() == self.kept
        self.outcomes["brought back"] += 1


SCENARIOS = [(count, durability) for durability in ("step", "none") for count in (1, 2, 3)]


@pytest.mark.parametrize(("num_devices", "durability"), SCENARIOS)
def test_a_loss_of_power_leaves_a_whole_step(num_devices: int, durability: str, root: Path) -> None:
    campaign = Campaign(root, num_devices, durability, seed=num_devices, cuts=8)
    campaign.run(3)
    judge(campaign, 15)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_devices", "durability"), SCENARIOS)
def test_a_loss_of_power_behind_every_operation(
    num_devices: int, durability: str, seed: int, root: Path
) -> None:
    campaign = Campaign(root, num_devices, durability, seed=100 + seed, cuts=None)
    campaign.run(6)
    judge(campaign, 350)


def judge(campaign: Campaign, expected: int) -> None:
    kinds = dict(campaign.outcomes)
    total = campaign.outcomes.total() - kinds.get("brought back", 0)
    where = f"{campaign.num_devices} devices, durability {campaign.durability}"
    print(f"\npower loss, {where}: {total} cases, {kinds}")
    assert total >= expected
    assert {"quiet", "durable"} <= set(kinds)
    assert ("refused" in kinds) == (campaign.durability == "none")
