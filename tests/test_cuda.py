"""Models on a GPU. What needs one is marked: ``pytest -m cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import (
    CONTEXT,
    OPTIMIZERS,
    VOCABULARY,
    directories,
    distance,
    offload,
    offloaded_moments,
    same_bits,
    tiny_gpt,
    train,
    weights_of,
)
from smart_infinity.cuda import gradients
from smart_infinity.cuda.weights import fingerprint, fingerprint_factors
from smart_infinity.errors import UnsupportedError

CPU = torch.device("cpu")
FACTORS = fingerprint_factors(100, CPU)

# What offload() is told, the loop's clipping, and the backwards of a step.
MODES: dict[str, tuple[dict[str, Any], float | None, int]] = {
    "step": ({}, 0.5, 1),
    "unclipped": ({}, None, 1),
    "overlap": ({"overlap": True}, 0.5, 1),
    "early": ({"overlap": True, "accumulation_steps": 1}, None, 1),
    "accumulated": ({}, None, 2),
    "early, accumulated": ({"overlap": True, "accumulation_steps": 2}, None, 2),
    "clipped by the engine": ({"overlap": True, "max_grad_norm": 0.5}, None, 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(data=st.data())
def test_a_fingerprint_sees_any_word_that_changes(dtype: torch.dtype, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 100))
    words = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = fingerprint(words, FACTORS)
    assert before.dtype is torch.int64
    assert before == fingerprint(words.clone(), fingerprint_factors(100, CPU))
    raw = words.view({2: torch.int16, 4: torch.int32}[words.itemsize])
    raw[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 14))
    assert fingerprint(words, FACTORS) != before


def test_a_fingerprint_sees_words_that_change_places() -> None:
    words = torch.arange(100, dtype=torch.bfloat16)
    assert fingerprint(words, FACTORS) != fingerprint(words.flip(0), FACTORS)
    assert fingerprint(words, FACTORS) != fingerprint(words.roll(1), FACTORS)


# --- with a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cuda", torch.cuda.current_device())
    torch.use_deterministic_algorithms(before)


def gpu_loss(model: nn.Module, seed: int) -> Tensor:
    """As ``gpt_loss``, with an attention mask that is on the GPU."""
    generator = torch.Generator().manual_seed(1000 + seed)
    device = next(model.parameters()).device
    tokens = torch.randint(0, VOCABULARY, (3, CONTEXT), generator=generator).to(device)
    targets = torch.randint(0, VOCABULARY, (3, CONTEXT), generator=generator).to(device)
    with torch.device(device):
        logits = model(tokens).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run(
    base: Path,
    gpu: torch.device,
    options: dict[str, Any],
    clip: float | None,
    backwards: int,
    devices: int = 2,
) -> list[Tensor]:
    """Weights and states after four steps."""
    model = tiny_gpt().to(gpu)
    source = OPTIMIZERS["adamw"](model.parameters())
    paths = directories(base, devices)
    optimizer = offload(model, source, paths, dtype=torch.bfloat16, **options)

    def loss(model: nn.Module, seed: int) -> Tensor:
        for micro in range(1, backwards):
            gpu_loss(model, 100 * seed + micro).backward()
        return gpu_loss(model, seed)

    with optimizer:
        train(model, optimizer, range(4), loss, clip)
        states = offloaded_moments(model, optimizer)
        found = [*weights_of(model), *(tensor for kind in states.values() for tensor in kind)]
    return [tensor.cpu() for tensor in found]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd-momentum", "adagrad"])
@pytest.mark.parametrize("options", [{}, {"overlap": True, "accumulation_steps": 1}])
def test_numbers_are_torchs(
    name: str, options: dict[str, Any], gpu: torch.device, tmp_path: Path
) -> None:
    plain, ours = tiny_gpt().to(gpu), tiny_gpt().to(gpu)
    train(plain, OPTIMIZERS[name](plain.parameters()), range(5), gpu_loss, None)
    source = OPTIMIZERS[name](ours.parameters())
    with offload(ours, source, directories(tmp_path, 2), **options) as optimizer:
        train(ours, optimizer, range(5), gpu_loss, None)
        optimizer.synchronize()
        assert distance(weights_of(ours), weights_of(plain)) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("chunk", [4096 * 4, gradients.CHUNK_BYTES])
@pytest.mark.parametrize("mode", MODES)
def test_the_result_is_the_same_however_it_is_made(
    mode: str, chunk: int, gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, clip, backwards = MODES[mode]
    kind = options.get("max_grad_norm", clip)
    expected = run(tmp_path / "plain", gpu, {}, kind, backwards)
    monkeypatch.setattr(gradients, "CHUNK_BYTES", chunk)
    assert same_bits(run(tmp_path / "own", gpu, options, clip, backwards, devices=3), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"overlap": True, "accumulation_steps": 1}])
def test_edits_reach_the_masters(
    options: dict[str, Any], gpu: torch.device, tmp_path: Path
) -> None:
    plain, ours = tiny_gpt().to(gpu), tiny_gpt().to(gpu)
    reference = OPTIMIZERS["adamw"](plain.parameters())
    source = OPTIMIZERS["adamw"](ours.parameters())
    with offload(ours, source, directories(tmp_path, 2), **options) as optimizer:
        for seed in range(4):
            for model, own in ((plain, reference), (ours, optimizer)):
                if model is ours:
                    optimizer.synchronize()
                model.head.weight.data[seed] = 0.5
                model.norm.bias.data = model.norm.bias.data + 0.25
                train(model, own, [seed], gpu_loss, None)
        optimizer.synchronize()
        assert distance(weights_of(ours), weights_of(plain)) < 1e-5


@pytest.mark.cuda
def test_a_resume_brings_weights_and_random_states_back(gpu: torch.device, tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    model = tiny_gpt().to(gpu)
    with offload(model, OPTIMIZERS["adamw"](model.parameters()), devices) as optimizer:
        train(model, optimizer, range(3), gpu_loss, None)
        expected, drawn = weights_of(model), torch.rand(3, device=gpu)
    other = tiny_gpt(seed=5).to(gpu)
    source = OPTIMIZERS["adamw"](other.parameters())
    with offload(other, source, devices, resume=True) as optimizer:
        assert same_bits([w.cpu() for w in weights_of(other)], [w.cpu() for w in expected])
        optimizer.restore_random_state()
        assert torch.equal(torch.rand(3, device=gpu), drawn)


@pytest.mark.cuda
def test_a_grad_scaler_skips_what_overflows(gpu: torch.device, tmp_path: Path) -> None:
    model = tiny_gpt().to(gpu)
    source = OPTIMIZERS["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    with offload(model, source, directories(tmp_path, 2)) as optimizer:
        before = weights_of(model)
        (scaler.scale(gpu_loss(model, 0)) * float("inf")).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**13
        assert all(map(torch.equal, weights_of(model), before))
        scaler.scale(gpu_loss(model, 0)).backward()
        scaler.step(optimizer)
        assert optimizer.steps == 1


@pytest.mark.cuda
def test_gradients_are_answered_for_and_fetched_to_where_the_model_is(
    gpu: torch.device, tmp_path: Path
) -> None:
    plain, ours = tiny_gpt().to(gpu), tiny_gpt().to(gpu)
    gpu_loss(plain, 0).backward()
    source = OPTIMIZERS["adamw"](ours.parameters())
    with offload(ours, source, directories(tmp_path, 2)):
        gpu_loss(ours, 0).backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert a.grad.device == gpu
            assert torch.equal(a.grad.to_dense(), b.grad)
            torch.testing.assert_close(a.grad.norm(), b.grad.norm())


@pytest.mark.cuda
def test_a_model_on_two_devices_is_refused_by_name(gpu: torch.device, tmp_path: Path) -> None:
    model = tiny_gpt().to(gpu)
    model.head.cpu()
    source = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(UnsupportedError, match=r"head\.weight"):
        offload(model, source, directories(tmp_path, 1))
