"""``smart-infinity doctor``, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from smart_infinity.benchmarks import machine, raw
from smart_infinity.cli import app
from smart_infinity.storage.lock import DeviceLock


def doctor(*directories: object) -> Result:
    result = CliRunner().invoke(app, ["doctor", *map(str, directories)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "BLOCK_NBYTES", 1 << 20)
    monkeypatch.setattr(machine, "PROBE_NBYTES", 8 << 20)


def test_without_directories_it_shows_versions_and_processor() -> None:
    result = doctor()
    assert result.exit_code == 0
    for word in ("python", "torch", "numpy", "numba", "kernel", "vector features", "bf16"):
        assert word in result.stdout
    assert "GB/s" not in result.stdout


def test_a_good_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    result = doctor(tmp_path)
    assert result.exit_code == 0, result.output
    for word in ("O_DIRECT", "read", "write", "mixed", "free", "million parameters", "no state"):
        assert word in result.stdout
    assert os.listdir(tmp_path) == []


def test_a_refused_direct_mode_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "direct_io_refusal", lambda directory: "Invalid argument")
    result = doctor(tmp_path)
    assert result.exit_code == 0
    assert "refused: Invalid argument" in result.stdout


def test_a_missing_directory_does_not_hide_a_good_one(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    result = doctor(tmp_path / "missing", good)
    assert result.exit_code == 1
    assert "missing does not exist" in result.stderr
    assert "million parameters" in result.stdout


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    result = doctor(path)
    assert result.exit_code == 1
    assert "is not a directory" in result.stderr
    assert path.read_text() == "kept"


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, whom no mode keeps out.
    monkeypatch.setattr(machine.os, "access", lambda path, mode: not mode & os.W_OK)
    result = doctor(tmp_path)
    assert result.exit_code == 1
    assert "is not writable" in result.stderr


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_nbytes", lambda directory: 4096)
    result = doctor(tmp_path)
    assert result.exit_code == 1
    assert "is full: 4096 bytes" in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fails_while_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("smart_infinity.storage.blockfile.os.fdatasync", fail)
    result = doctor(tmp_path)
    assert result.exit_code == 1
    assert "errno 5" in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_directory_in_use_is_not_disturbed(tmp_path: Path) -> None:
    lock = DeviceLock(str(tmp_path))
    try:
        result = doctor(tmp_path)
    finally:
        lock.release()
    assert result.exit_code == 1
    assert "is in use" in result.stderr
    assert os.listdir(tmp_path) == ["lock"]


def test_a_state_is_named(tmp_path: Path) -> None:
    import torch

    import smart_infinity

    model = torch.nn.Linear(8, 8)
    _, optimizer = smart_infinity.offload(
        model, torch.optim.AdamW(model.parameters()), [str(tmp_path)]
    )
    optimizer.close()
    before = sorted(os.listdir(tmp_path))
    result = doctor(tmp_path)
    assert result.exit_code == 0
    assert "state of adamw, device 1 of 1" in result.stdout
    assert sorted(os.listdir(tmp_path)) == before


def test_output_is_plain_where_there_is_no_terminal(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "smart_infinity.cli", "doctor", tmp_path / "missing"],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 1
    assert "\x1b" not in child.stdout + child.stderr
    assert child.stderr.splitlines()[-1] == f"error: {tmp_path / 'missing'} does not exist"
