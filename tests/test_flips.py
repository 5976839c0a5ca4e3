"""One bit flips anywhere in a set: refused, mended with a warning, or of no consequence."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from helpers import offload, two_groups
from images import (
    Image,
    Run,
    devices_of,
    in_memory,
    net,
    read_image,
    read_ledger,
    use_small_records,
    write_image,
)
from smart_infinity.errors import CorruptStateError, SmartInfinityError
from smart_infinity.tools.verify import verify

DEVICES, STEPS = 2, 3


pytestmark = pytest.mark.usefixtures("small_records")


class Held:
    """A set at step 3 with a snapshot of step 2, and where its parts lie."""

    def __init__(self, root: Path) -> None:
        with Run.new(root, DEVICES) as run:
            run.train(range(2))
            run.optimizer.snapshot("kept")
            run.train(range(2, STEPS))
            self.known = run.known()
            self.layout = run.optimizer._engine.layout
        self.image = read_image(root)
        self.ledgers = [read_ledger(device) for device in devices_of(root)]

    def state_record(self, device: int, draw: random.Random, *, is_current: bool) -> tuple:
        """(file, first byte, number of bytes) of a state record, in its current or other place."""
        record = draw.choice(self.layout.devices[device].records)
        place = int(self.ledgers[device].records[0].places[record.index])
        name = f"device{device}/state.{place if is_current else 1 - place}"
        return (
            name,
            record.index * self.layout.record_stride,
            self.layout.record_nbytes(record.length),
        )

    def blob(self, device: int, *, is_current: bool) -> tuple:
        record = self.ledgers[device].records[0]
        place = record.blob_place if is_current else 1 - record.blob_place
        return f"device{device}/blob.{place}", 0, record.blob_nbytes

    def ledger_copy(self, device: int, place: int) -> tuple:
        name = f"device{device}/ledger"
        stride = len(self.image[name]) // 4
        return name, place * stride, len(self.ledgers[device].records[0].encode())

    def whole(self, device: int, name: str) -> tuple:
        name = f"device{device}/{name}"
        return name, 0, len(self.image[name])


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with pytest.MonkeyPatch.context() as patch, in_memory() as path:
        use_small_records(patch)
        yield Held(path / "held")


Place = Callable[[Held, int, random.Random], tuple[str, int, int]]

REFUSED, MENDED, NOTHING = "refused", "mended", "nothing"
# What is flipped -> (where it lies, what may come of it).
PARTS: dict[str, tuple[Place, set[str]]] = {
    "state": (lambda own, i, draw: own.state_record(i, draw, is_current=True), {REFUSED}),
    "other state": (lambda own, i, draw: own.state_record(i, draw, is_current=False), {NOTHING}),
    "ledger": (lambda own, i, draw: own.ledger_copy(i, draw.randrange(4)), {MENDED}),
    "ledger's padding": (lambda own, i, draw: own.whole(i, "ledger"), {MENDED, NOTHING}),
    "blob": (lambda own, i, draw: own.blob(i, is_current=True), {REFUSED}),
    "other blob": (lambda own, i, draw: own.blob(i, is_current=False), {NOTHING}),
    "blob's room": (lambda own, i, draw: own.whole(i, "blob.0"), {REFUSED, NOTHING}),
    **{
        name: (lambda own, i, draw, name=name: own.whole(i, name), {MENDED, NOTHING})
        for name in (
            "superblock.json",
            "superblock.copy.json",
            "layout.json",
            "layout.copy.json",
        )
    },
    **{
        f"snapshot's {name}": (
            lambda own, i, draw, name=name: own.whole(i, f"snapshots/kept/{name}"),
            {NOTHING},
        )
        for name in ("state", "record", "blob", "snapshot.json")
    },
}


def flipped(image: Image, name: str, offset: int, bit: int) -> Image:
    content = bytearray(image[name])
    content[offset] ^= 1 << bit
    return {**image, name: bytes(content)}


def campaign(held: Held, root: Path, rounds: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(1)
    outcomes: Counter[tuple[str, str, bool]] = Counter()
    for number in range(rounds):
        for part, (place, expected) in PARTS.items():
            name, begin, nbytes = place(held, number % DEVICES, draw)
            offset, bit = begin + draw.randrange(nbytes), draw.randrange(8)
            damaged = flipped(held.image, name, offset, bit)
            devices = write_image(root / "found", damaged)
            about = f"{part}: bit {bit} of byte {offset} of {name}"

            problems = verify(devices).problems
            assert read_image(root / "found") == damaged, f"{about}: verify changed something"
            outcome = resume(held, devices, about, caplog)
            assert outcome in expected, f"{about}: {outcome}"
            outcomes[part, outcome, bool(problems)] += 1
            if outcome is not NOTHING:
                assert problems, f"{about}: verify is silent"
            if outcome is MENDED:
                assert verify(devices).problems == [], f"{about}: a resume mends it"
            if problems:
                assert any(name.split("/")[0] in path for path, _ in problems), about
            if part.startswith("snapshot"):
                judge_snapshot(held, write_image(root / "found", damaged), bool(problems), about)
    total = outcomes.total()
    print(f"\nflips: {total} cases")
    for (part, outcome, is_reported), count in sorted(outcomes.items()):
        print(f"  {part}: {outcome}, {'' if is_reported else 'not '}reported: {count}")
    assert total == rounds * len(PARTS)
    assert {outcome for _, outcome, _ in outcomes} == {REFUSED, MENDED, NOTHING}


def resume(held: Held, devices: list[Path], about: str, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    try:
        run = Run(devices, resume=True)
    except CorruptStateError as error:
        if not any(str(device) in str(error) for device in devices):
            raise
        return REFUSED
    with run:
        assert run.known() == held.known, about
    return MENDED if any(r.levelno >= logging.WARNING for r in caplog.records) else NOTHING


def judge_snapshot(held: Held, devices: list[Path], is_reported: bool, about: str) -> None:
    """A damaged snapshot is refused when it is wanted, and nothing is changed by that."""
    with Run(devices, resume=True) as run:
        try:
            run.optimizer.restore("kept")
        except SmartInfinityError:
            assert is_reported, f"{about}: verify is silent"
            assert run.known() == held.known, about
            run.train([7])
        else:
            assert not is_reported, f"{about}: verify says that it is bad"
            assert run.optimizer.steps == 2, about


def test_single_flips(held: Held, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    campaign(held, root, 5, caplog)


@pytest.mark.long
def test_many_flips(held: Held, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    campaign(held, root, 40, caplog)


def test_a_flip_fails_the_model(held: Held, root: Path) -> None:
    """What was resumed only in part can neither compute nor be saved."""
    name, begin, _ = held.state_record(1, random.Random(3), is_current=True)
    devices = write_image(root / "found", flipped(held.image, name, begin, 0))

    model = net()
    with pytest.raises(CorruptStateError, match=r"device1: state record \d+ in state\.\d differs"):
        offload(model, torch.optim.AdamW(two_groups(model), lr=1e-2), devices, resume=True)
    with pytest.raises(SmartInfinityError):
        model.state_dict()


@pytest.mark.parametrize("how", ["flipped", "zeroed"])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_both_copies_of_the_newest_step_are_damaged(
    how: str, which: tuple[int, ...], held: Held, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step before is whole, and that it is an older one is said."""
    image = dict(held.image)
    for device in which:
        newest = held.ledgers[device].records[0].encode()
        stride = len(image[f"device{device}/ledger"]) // 4
        for place in range(4):
            name, begin, nbytes = held.ledger_copy(device, place)
            if image[name][begin : begin + nbytes] == newest:
                content = bytearray(image[name])
                if how == "flipped":
                    content[begin + 90] ^= 4
                else:
                    content[begin : begin + stride] = bytes(stride)
                image[name] = bytes(content)
    devices = write_image(root / "found", image)
    verdict = verify(devices)
    assert verdict.step == 2
    assert verdict.problems
    try:
        with Run(devices, resume=True) as run:
            assert run.optimizer.steps == 2
    except CorruptStateError:
        return
    assert "Continuing with step 2" in caplog.text
    assert f"ledger is {'damaged' if how == 'flipped' else 'empty'}" in caplog.text


@pytest.mark.parametrize("name", ["superblock", "layout"])
def test_both_copies_of_a_document_are_damaged(name: str, held: Held, root: Path) -> None:
    image = held.image
    for copy in (f"device1/{name}.json", f"device1/{name}.copy.json"):
        image = flipped(image, copy, len(image[copy]) // 2, 1)
    devices = write_image(root / "found", image)
    with pytest.raises(CorruptStateError, match=rf"device1.*{name}\.json is damaged"):
        Run(devices, resume=True)
    if name == "superblock":
        with pytest.raises(CorruptStateError, match=r"superblock\.json is damaged"):
            verify(devices)
    else:
        assert any("layout.json is damaged" in problem for _, problem in verify(devices).problems)


def test_verify_changes_nothing_where_nothing_may_be_written(held: Held, root: Path) -> None:
    devices = write_image(root / "found", held.image)
    files = [file for file in (root / "found").rglob("*") if file.is_file()]
    for file in files:
        file.chmod(0o444)
    before = {file: (file.stat().st_mtime_ns, file.stat().st_mode) for file in files}
    verdict = verify(devices)
    assert (verdict.problems, verdict.step, verdict.snapshots) == ([], STEPS, DEVICES)
    assert read_image(root / "found") == held.image
    assert {file: (file.stat().st_mtime_ns, file.stat().st_mode) for file in files} == before
