"""Tiny models of odd widths, batches by seed, and plain-torch loops to compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smart_infinity
from smart_infinity import OffloadedOptimizer

VOCABULARY, CONTEXT = 97, 13

# eps = 1e-5: the gradient of an attention's key bias is rounding noise, and 1e-8 makes whole
# steps of it, so that torch differs from itself by 3e-4.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-5, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-5, betas=(0.8, 0.95)),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.02, lr_decay=0.05, initial_accumulator_value=0.01
    ),
}


class Block(nn.Module):
    """A transformer block; its widths are no multiple of anything."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width + 3), nn.Linear(4 * width + 3, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        attention = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((attention @ v).transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A GPT of odd widths. ``uses`` runs its blocks several times; ``tied``: head and embedding."""

    def __init__(
        self, width: int = 65, heads: int = 5, layers: int = 2, tied: bool = False, uses: int = 1
    ) -> None:
        super().__init__()
        self.uses = uses
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[-1]]
        for block in self.h:
            for _ in range(self.uses):
                x = block(x)
        return self.head(self.norm(x))


def tiny_gpt(seed: int = 0, **sizes: Any) -> TinyGPT:
    """A `TinyGPT` with weights by seed."""
    torch.manual_seed(seed)
    return TinyGPT(**sizes)


def small_net(seed: int = 0) -> nn.Sequential:
    """Three layers, 2273 parameters, one unit: for tests in which the model does not matter."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 59), nn.GELU(), nn.Linear(59, 1)
    )


def net_loss(model: nn.Module, seed: int) -> Tensor:
    """The loss of `small_net` on the batch of a seed."""
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    x = torch.randn(6, 7, generator=generator).to(first.dtype)
    return model(x).square().mean().to(torch.promote_types(first.dtype, torch.float32))


def gpt_loss(model: nn.Module, seed: int) -> Tensor:
    """The loss of `TinyGPT` on the batch of a seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(0, VOCABULARY, (3, CONTEXT), generator=generator)
    targets = torch.randint(0, VOCABULARY, (3, CONTEXT), generator=generator)
    logits = model(tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def two_groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Decay for matrices, none for the rest: both groups occur within each unit."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def directories(base: Path, count: int, name: str = "device") -> list[Path]:
    """Make ``count`` new directories to serve as devices."""
    paths = [base / f"{name}{index}" for index in range(count)]
    for path in paths:
        path.mkdir(parents=True)
    return paths


def offload(
    model: nn.Module, optimizer: torch.optim.Optimizer, devices: Sequence[Path], **options: Any
) -> OffloadedOptimizer:
    """`smart_infinity.offload`, where the model is known already."""
    same, offloaded = smart_infinity.offload(model, optimizer, devices, **options)
    assert same is model
    return offloaded


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seeds: Iterable[int],
    loss: Callable[[nn.Module, int], Tensor] = gpt_loss,
    clip: float | None = 0.5,
    scheduler: Any = None,
) -> list[float]:
    """The ordinary loop, one batch for each seed; returns the norms before clipping."""
    norms = []
    for seed in seeds:
        loss(model, seed).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return norms


def weights_of(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]


def torch_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """By name, the moments of all parameters in a torch optimizer."""
    moments: dict[str, list[Tensor]] = {}
    for p in model.parameters():
        for name, value in optimizer.state[p].items():
            if value is not None:
                moments.setdefault(name, []).append(value)
    return moments


def offloaded_moments(model: nn.Module, optimizer: OffloadedOptimizer) -> dict[str, list[Tensor]]:
    """By name, masters and moments of all parameters on the devices."""
    states: dict[str, list[Tensor]] = {}
    for p in model.parameters():
        for name, value in optimizer.read_state(p).items():
            states.setdefault(name, []).append(value)
    return states


def distance(ours: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Relative L2 distance over all tensors together."""
    difference = norm = 0.0
    for a, b in zip(ours, reference, strict=True):
        difference += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    return (difference / norm) ** 0.5


def same_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit (also in the sign of zero, and NaN to NaN)."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def run_python(code: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run code in a new interpreter that can import these helpers."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
