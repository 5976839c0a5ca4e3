"""``smart-infinity bench``, as a user runs it, on small sizes: what it writes, not how fast."""

import json
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from smart_infinity.benchmarks import raw, update
from smart_infinity.benchmarks.kernel import TORCH
from smart_infinity.cli import app
from smart_infinity.layout import ParameterSpec, plan_layout

PARAMS = 300_000


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_update(root: Path, num_devices: int, **options: object) -> Result:
    arguments: list[object] = []
    for index in range(num_devices):
        device = root / f"device{index}"
        device.mkdir(exist_ok=True)
        arguments += ["--devices", device]
    for name, value in {"params": "300_000", "rounds": 3, **options}.items():
        arguments += [f"--{name}", value]
    return invoke("update", *arguments)


def read_strictly(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert isinstance(content, dict)
    return content


def files_below(root: Path) -> list[str]:
    return [name for _, _, names in os.walk(root) for name in names]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_update_measures_in_turns_and_leaves_nothing(tmp_path: Path, num_devices: int) -> None:
    result = run_update(tmp_path, num_devices, json=tmp_path / "update.json")
    assert result.exit_code == 0, result.output
    assert "fraction of raw" in result.stdout
    content = read_strictly(tmp_path / "update.json")
    assert files_below(tmp_path) == ["update.json"]
    assert all(not os.listdir(tmp_path / f"device{i}") for i in range(num_devices))

    spec = ParameterSpec("0.weight", (PARAMS,), "bfloat16")
    layout = plan_layout([spec], "adamw", ("exp_avg", "exp_avg_sq"), num_devices)
    expected = sum(layout.state_nbytes(index) for index in range(num_devices))
    assert content["bytes_read"] == content["bytes_written"] == expected
    assert content["params"] == PARAMS
    assert content["devices"] == [str(tmp_path / f"device{i}") for i in range(num_devices)]
    assert content["rounds"] == 3
    assert len(content["round_seconds"]) == len(content["raw_round_seconds"]) == 3
    assert content["raw_threads"] in raw.THREADS_TO_TRY
    assert content["fraction_of_raw"] == pytest.approx(
        content["gb_per_s"] / content["raw_gb_per_s"]
    )
    low, high = content["fraction_spread"]
    assert 0 < low <= high
    median = sorted(content["round_seconds"])[1]
    assert content["gb_per_s"] == pytest.approx(2 * expected / 1e9 / median)
    assert content["params_per_s"] == pytest.approx(PARAMS / median)
    assert set(content["stages"]) == {"waiting", "reading", "computing", "writing"}


def test_update_works_where_a_device_has_nothing_to_hold(tmp_path: Path) -> None:
    result = run_update(tmp_path, 3, params=5000, rounds=1, json=tmp_path / "update.json")
    assert result.exit_code == 0, result.output
    assert read_strictly(tmp_path / "update.json")["bytes_read"] == 49152 + 12288


def test_raw_copy_moves_every_record_of_every_device(tmp_path: Path) -> None:
    spec = ParameterSpec("w", (25_000,), "float32")
    layout = plan_layout([spec], "adamw", ("exp_avg", "exp_avg_sq"), 2, 3000)
    generator = np.random.default_rng(0)
    for index in range(2):
        nbytes = layout.state_nbytes(index)
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / "state.0").write_bytes(generator.bytes(nbytes))
        (directory / "state.1").write_bytes(bytes(nbytes))
    before = [(tmp_path / str(index) / "state.0").read_bytes() for index in range(2)]
    copy = raw.RawCopy([str(tmp_path / "0"), str(tmp_path / "1")], layout, [False, False])
    try:
        copy.choose_threads()
    finally:
        copy.close()
    stride = layout.record_stride
    for index, device in enumerate(layout.devices):
        kept, copied = ((tmp_path / str(index) / f"state.{n}").read_bytes() for n in range(2))
        assert kept == before[index]
        for record in device.records:
            begin = record.index * stride
            end = begin + layout.record_nbytes(record.length)
            assert copied[begin:end] == kept[begin:end]


def test_update_leaves_nothing_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: raw.RawCopy) -> float:
        raise RuntimeError("a fault in the middle")

    monkeypatch.setattr(raw.RawCopy, "run", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run_update(tmp_path, 2)
    assert all(not os.listdir(tmp_path / f"device{i}") for i in range(2))


def test_update_keeps_what_lies_in_the_directory(tmp_path: Path) -> None:
    device = tmp_path / "device0"
    device.mkdir()
    (device / "mine.txt").write_text("kept")
    assert run_update(tmp_path, 1, rounds=1).exit_code == 0
    assert os.listdir(device) == ["mine.txt"]


def test_update_needs_space_for_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both devices lie on one file system: three quarters of what they need together.
    monkeypatch.setattr(update, "free_nbytes", lambda path: 3 * PARAMS * 6)
    result = run_update(tmp_path, 2)
    assert result.exit_code == 1
    assert "free" in result.stderr
    assert all(not os.listdir(tmp_path / f"device{i}") for i in range(2))


@pytest.mark.parametrize("params", ["0", "-5", "1e6", "", "many", "1.5"])
def test_update_refuses_what_is_no_count(tmp_path: Path, params: str) -> None:
    assert run_update(tmp_path, 1, params=params).exit_code == 2


def test_update_refuses_more_than_memory_holds(tmp_path: Path) -> None:
    result = invoke("update", "--params", "100_000_000_000_000", "--devices", tmp_path)
    assert result.exit_code == 1
    assert "Use fewer parameters" in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_update_refuses_a_missing_directory(tmp_path: Path) -> None:
    result = invoke("update", "--params", "1000", "--devices", tmp_path / "missing")
    assert result.exit_code == 1
    assert "missing" in result.stderr


def test_update_refuses_the_same_directory_twice(tmp_path: Path) -> None:
    result = invoke("update", "--params", "1000", "--devices", tmp_path, tmp_path)
    assert result.exit_code == 1
    assert "twice" in result.stderr


def test_update_needs_a_device() -> None:
    assert invoke("update", "--params", "1000").exit_code == 2


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    result = run_update(tmp_path, 1, json=tmp_path / "missing" / "update.json")
    assert result.exit_code == 2
    assert "--json" in result.stderr


def test_kernel_measures_all_kernels(tmp_path: Path) -> None:
    output = tmp_path / "kernel.json"
    small = ["--records", 3, "--record-elements", 10_000, "--rounds", 2]
    result = invoke("kernel", *small, "--json", output)
    assert result.exit_code == 0, result.output
    assert "AdamW(fused=True)" in result.stdout
    content = read_strictly(output)
    measured = {(own["name"], own["threads"]) for own in content["kernels"]}
    names = {name for name, _ in measured}
    assert names == {
        "adamw bf16",
        "adamw fp32",
        "adamw fp16",
        "sgd momentum bf16",
        "adagrad bf16",
        "land bf16",
        "accumulate bf16",
    }
    assert TORCH not in names
    assert measured == {(name, threads) for name in names for threads in (1, 2)}
    assert all(own["mparams_per_s"] > 0 for own in content["kernels"])
    assert set(content["ratio_to_torch_fused"]) == set(content["torch_fused"]) == {"1", "2"}
    assert content["ratio_denormal"] > 0
    assert content["compile_s"]["cold"] > content["compile_s"]["cached"] > 0
    assert content["rounds"] == 2


def test_step_measures_all_modes_in_turns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "device").mkdir()
    output = tmp_path / "step.json"
    result = invoke(
        *["step", "--model", "gpt2-tiny", "--seq-len", 16, "--rounds", 2],
        *["--devices", tmp_path / "device", "--json", output],
    )
    assert result.exit_code == 0, result.output
    assert "the bound is" in " ".join(result.stdout.split())
    content = read_strictly(output)
    assert os.listdir(tmp_path / "device") == []
    assert content["raw_gb_per_s"] > 0
    modes = content["modes"]
    assert modes.pop("deepspeed") is None
    assert set(modes) == {"torch", "offload", "overlap", "overlap_unclipped", "cache"}
    for own in modes.values():
        assert len(own["steps"]) == 6
        assert own["step_s"] == pytest.approx(statistics.median(own["steps"]))
        parts = own["forward_s"] + own["backward_s"] + own["wait_s"]
        assert 0 < parts < 2 * own["step_s"]
        assert own["first_step_s"] > own["step_s"]
        assert own["peak_bytes"] > 50e6
    plain = modes["torch"]
    compute = plain["forward_s"] + plain["backward_s"]
    assert content["bound_s"] >= compute
