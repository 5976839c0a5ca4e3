"""``inspect``, ``verify`` and ``list``, and a run of ``train`` that is killed and continued."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from crashes import contents
from helpers import OPTIMIZERS, directories, net_loss, offload, small_net, train, two_groups
from smart_infinity.cli import app
from smart_infinity.engine import Engine


def cli(*arguments: object) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def described(devices: list[Path]) -> dict[str, Any]:
    result = cli("inspect", "--json", *devices)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def begin(devices: list[Path], resume: bool | None = None, **options: Any) -> Any:
    model = small_net(seed=77 if resume else 0)
    source = OPTIMIZERS["adamw"](two_groups(model))
    return model, offload(model, source, devices, resume=resume, **options)


@pytest.fixture
def held(tmp_path: Path) -> list[Path]:
    """Two devices at step 3, with a snapshot of step 2."""
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    with optimizer:
        train(model, optimizer, range(2), net_loss)
        optimizer.snapshot("two")
        train(model, optimizer, range(2, 3), net_loss)
    return devices


def flip(path: Path, offset: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


TOP = {
    "set_uuid": str,
    "model": str,
    "optimizer": str,
    "parameters": int,
    "tensors": int,
    "format_version": int,
    "layout_hash": str,
    "committed_step": int,
    "health": str,
    "devices": list,
    "snapshots": list,
}
DEVICE = {
    "path": str,
    "index": int,
    "in_use": bool,
    "steps": list,
    "state_bytes": int,
    "disk_bytes": int,
    "free_bytes": int,
    "last_write": str,
    "health": str,
}
SNAPSHOT = {"name": str, "step": int, "created": str, "bytes": int}


def types(found: dict[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in found.items()}


def test_inspect_as_json(held: list[Path]) -> None:
    before = contents(held)
    found = described(held[::-1])
    assert contents(held) == before
    assert types(found) == TOP
    assert [types(own) for own in found["devices"]] == [DEVICE] * 2
    assert [types(own) for own in found["snapshots"]] == [SNAPSHOT]
    assert (found["model"], found["optimizer"], found["tensors"]) == ("Sequential", "adamw", 6)
    assert found["parameters"] == sum(p.numel() for p in small_net().parameters())
    assert (found["committed_step"], found["health"], found["format_version"]) == (3, "ok", 2)
    assert [own["path"] for own in found["devices"]] == list(map(str, held))
    for index, own in enumerate(found["devices"]):
        assert (own["index"], own["in_use"], own["steps"][0]) == (index, False, 3)
        assert own["health"] == "ok"
        size = (held[index] / "state.0").stat().st_size
        assert own["state_bytes"] == size
        assert own["disk_bytes"] >= 3 * size, "two places and a snapshot"
        assert own["free_bytes"] > 0
        written = datetime.fromisoformat(own["last_write"])
        assert abs((datetime.now(UTC) - written).total_seconds()) < 600
    (own,) = found["snapshots"]
    assert (own["name"], own["step"]) == ("two", 2)
    files = [f for d in held for f in (d / "snapshots" / "two").iterdir()]
    assert own["bytes"] == sum(f.stat().st_size for f in files)
    assert datetime.fromisoformat(own["created"]).tzinfo is not None


def test_inspect_as_tables(held: list[Path]) -> None:
    result = cli("inspect", *held)
    assert result.exit_code == 0
    words = result.stdout.split()
    for word in ("Sequential,", "adamw", "ok", "two", described(held)["set_uuid"]):
        assert word in words
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["committed"][2] == "3"
    assert "in use" not in result.stdout


def test_a_run_that_uses_them_is_told_and_not_disturbed(held: list[Path]) -> None:
    model, optimizer = begin(held, resume=True)
    with optimizer:
        for step in (3, 4):
            found = described(held)
            assert found["committed_step"] == step
            assert [own["in_use"] for own in found["devices"]] == [True, True]
            train(model, optimizer, range(step, step + 1), net_loss)
        assert cli("inspect", *held).stdout.count("in use") == 2
        assert "two" in cli("list", *held).stdout
        result = cli("verify", *held)
        assert result.exit_code == 1
        assert "in use" in " ".join(result.stderr.split())
        assert optimizer.steps == 5
    assert not any(own["in_use"] for own in described(held)["devices"])


@pytest.mark.parametrize(
    ("damage", "health"),
    [
        (lambda d: os.truncate(d / "state.1", 100), "state.1 is cut off"),
        (lambda d: (d / "state.0").unlink(), "state.0 is missing"),
        (lambda d: flip(d / "ledger", 60), "in the ledger is damaged"),
        (lambda d: flip(d / "superblock.json", 60), "superblock.json is damaged"),
        (lambda d: flip(d / "layout.json", 60), "layout.json is damaged"),
    ],
    ids=["cut", "missing", "ledger", "superblock", "layout"],
)
def test_health_names_what_is_wrong(
    damage: Callable[[Path], object], health: str, held: list[Path]
) -> None:
    damage(held[1])
    found = described(held)
    assert health in found["health"]
    assert health in found["devices"][1]["health"]
    assert found["devices"][0]["health"] == "ok"
    assert found["committed_step"] == 3
    assert "health" in cli("inspect", *held).stdout
    before = contents(held)
    result = cli("verify", *held)
    assert result.exit_code == 1
    assert str(held[1]) in result.stderr.replace("\n", "")
    assert contents(held) == before


def test_verify_reads_everything(held: list[Path]) -> None:
    before = contents(held)
    result = cli("verify", *held[::-1])
    assert result.exit_code == 0, result.stderr
    said = " ".join((result.stdout + result.stderr).split())
    assert "step 3 and 1 snapshots: 4 state records read, 0 problems" in said
    assert contents(held) == before


@pytest.mark.parametrize("part", ["state.*", "blob.*", "snapshots/two/state", "snapshots/two/blob"])
def test_verify_finds_one_flipped_bit(part: str, held: list[Path]) -> None:
    for path in held[1].glob(part):
        flip(path)
    before = contents(held)
    result = cli("verify", *held)
    assert result.exit_code == 1
    said = result.stderr.replace("\n", "")
    assert f"{held[1]}: " in said
    assert f"{held[0]}: " not in said
    assert ("two" in said) == part.startswith("snapshots")
    assert contents(held) == before


@pytest.mark.parametrize("command", ["inspect", "verify", "list"])
def test_what_is_no_whole_set_is_one_clear_error(
    command: str, held: list[Path], tmp_path: Path
) -> None:
    (empty,) = directories(tmp_path, 1, "empty")
    for devices in (held[:1], [*held, empty], [empty], [tmp_path / "missing"], [held[0], held[0]]):
        result = cli(command, *devices)
        assert result.exit_code == 1, devices
        assert len([line for line in result.stderr.splitlines() if "error:" in line]) == 1
    assert os.listdir(empty) == []


def test_list_with_none(tmp_path: Path) -> None:
    devices = directories(tmp_path, 1)
    begin(devices)[1].close()
    result = cli("list", *devices)
    assert result.exit_code == 0
    assert "there are no snapshots" in result.stderr + result.stdout


# --- train -----------------------------------------------------------------------------------


TINY = ["--model", "gpt2-tiny", "--batch-size", 2, "--seq-len", 32, "--lr", "3e-3", "--steps", 6]


def arguments(base: Path, *more: object) -> list[object]:
    base.mkdir(exist_ok=True)
    text = base / "text.txt"
    text.write_text("\n".join(f"Line {n}: {n * n} sheep and {n % 7} dogs." for n in range(500)))
    devices = [word for n in range(2) for word in ("--devices", base / f"device{n}")]
    return ["train", *TINY, "--text", text, *devices, "--output", base / "out", *more]


def losses(base: Path) -> list[tuple[int, float]]:
    lines = (base / "out" / "metrics.jsonl").read_text().splitlines()
    return [(own["step"], own["loss"]) for own in map(json.loads, lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at once."""
    pytest.importorskip("transformers")
    base = tmp_path_factory.mktemp("whole")
    assert cli(*arguments(base)).exit_code == 0
    return base


def killed_in_step_4(base: Path, *more: object) -> None:
    child = os.fork()
    if not child:
        update = Engine._update

        def die(self: Engine, *rest: Any) -> None:
            update(self, *rest[:3], rest[3])
            if self.steps == 4:  # one device has committed step 4, perhaps
                os.kill(os.getpid(), signal.SIGKILL)

        Engine._update = die  # type: ignore[method-assign]
        try:
            cli(*arguments(base, *more))
        finally:
            os._exit(3)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("more", [[], ["--verify", "read"]])
def test_a_killed_run_continues_as_if_nothing_had_happened(
    more: list[object], whole: Path, tmp_path: Path
) -> None:
    killed_in_step_4(tmp_path, *more)
    devices = [tmp_path / "device0", tmp_path / "device1"]
    assert described(devices)["committed_step"] in (3, 4)
    assert cli("verify", *devices).exit_code == 0
    assert cli(*arguments(tmp_path, *more)).exit_code == 2, "without --resume"
    assert cli(*arguments(tmp_path, "--resume", *more)).exit_code == 0
    found, expected = dict(losses(tmp_path)), dict(losses(whole))
    assert set(found) >= {1, 2, 3, 5, 6}
    assert found == {step: expected[step] for step in found}
    name = "out/model.safetensors"
    assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_durability_none_takes_half_the_space_and_gives_the_same(
    whole: Path, tmp_path: Path
) -> None:
    assert cli(*arguments(tmp_path, "--durability", "none")).exit_code == 0
    assert losses(tmp_path) == losses(whole)
    name = "out/model.safetensors"
    assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in tmp_path.glob("device*/state.*")) == ["state.0"] * 2
    assert len(list(whole.glob("device*/state.*"))) == 4
    more = ["--durability", "none", "--resume", "--steps", 7]
    assert cli(*arguments(tmp_path, *more)).exit_code == 0
    assert losses(tmp_path)[-1][0] == 7
    bad = cli(*arguments(tmp_path, "--durability", "some", "--resume"))
    assert bad.exit_code == 2
