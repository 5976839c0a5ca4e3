"""One process of ``bench step``: a training loop that is driven by lines on standard input.

``steps N`` makes one step and N that are measured; ``stop`` or the end of the input ends it.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import smart_infinity
from smart_infinity.benchmarks.raw import RawCopy
from smart_infinity.cli.compute import matmul_context
from smart_infinity.cli.models import load_model
from smart_infinity.storage.blockfile import direct_io_refusal

CLIP, LR, WEIGHT_DECAY = 1.0, 2e-5, 0.01

HALF = "half of the state"
STATE_BYTES_PER_PARAMETER = 12

# By mode: what offload() is told, and whether the loop clips.
OURS: dict[str, tuple[dict[str, Any], bool]] = {
    "offload": ({}, True),
    "overlap": ({"overlap": True}, True),
    "overlap_unclipped": ({"overlap": True, "accumulation_steps": 1}, False),
    "cache": ({"overlap": True, "accumulation_steps": 1, "state_cache": HALF}, False),
}


class PlainTorch:
    """Everything in memory: bf16 weights, fp32 masters and moments, torch's fused AdamW."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._masters = [p.detach().clone() for p in model.parameters()]
        model.to(torch.bfloat16)
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True
        )

    @torch.no_grad()
    def step(self) -> None:
        """Unclipped: this is the least that has to be computed."""
        for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
            parameter.copy_(master)
        self._model.zero_grad()

    def synchronize(self) -> None:
        """Nothing is ever under way."""


class Ours:
    """This library."""

    def __init__(self, model: torch.nn.Module, mode: str, directory: str) -> None:
        options, self._clips = OURS[mode]
        if options.get("state_cache") == HALF:
            num_parameters = sum(own.numel() for own in model.parameters())
            half = STATE_BYTES_PER_PARAMETER * num_parameters // 2
            options = {**options, "state_cache": half}
        source = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        _, self._optimizer = smart_infinity.offload(
            model, source, [directory], dtype=torch.bfloat16, resume=False, **options
        )
        self._model = model
        self.synchronize = self._optimizer.synchronize
        self.waited_s = 0.0
        arrivals = self._optimizer._engine.arrivals
        wait = arrivals.wait

        def timed(parameter: int) -> None:
            begin = time.perf_counter()
            wait(parameter)
            self.waited_s += time.perf_counter() - begin

        arrivals.wait = timed  # type: ignore[method-assign]

    def step(self) -> None:
        """As in anybody's loop."""
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()


def training(
    model: Any, loop: PlainTorch | Ours, batch_size: int, seq_len: int
) -> Callable[[], dict[str, float]]:
    """One step of a loop, as a function that says how long its parts took."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    context = matmul_context(torch.bfloat16)

    def step() -> dict[str, float]:
        ids = torch.randint(0, vocabulary, (batch_size, seq_len), generator=generator)
        waited = getattr(loop, "waited_s", 0.0)
        begin = time.perf_counter()
        with context:
            loss = model(input_ids=ids, labels=ids).loss
            forward = time.perf_counter()
            in_forward = getattr(loop, "waited_s", 0.0) - waited
            loss.backward()
        backward = time.perf_counter()
        loop.step()
        end = time.perf_counter()
        return {
            "begin": begin,
            "forward_s": forward - begin - in_forward,
            "backward_s": backward - forward,
            "wait_s": end - backward + in_forward,
        }

    return step


def raw_passes(model: torch.nn.Module, directory: str) -> Iterator[float]:
    """Seconds of moving the bytes of a step, in the files of a state that is not stepped."""
    source = torch.optim.AdamW(model.parameters(), lr=LR)
    _, optimizer = smart_infinity.offload(
        model, source, [directory], dtype=torch.bfloat16, resume=False
    )
    direct = [direct_io_refusal(directory) is None]
    raw = RawCopy([directory], optimizer._engine.layout, direct)
    with contextlib.closing(raw), optimizer:
        raw.choose_threads()
        while True:
            yield raw.run()


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def say(content: dict[str, Any]) -> None:
    """A line to the parent."""
    print(json.dumps(content), flush=True)


def main() -> None:
    """Be the child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    chosen = parser.parse_args()
    model = load_model(chosen.model, seed=0).model
    measure: Callable[[int], list[dict[str, float]]]
    if chosen.mode == "raw":
        passes = raw_passes(model, chosen.directory)
        next(passes)

        def measure(count: int) -> list[dict[str, float]]:
            zeros = {"forward_s": 0.0, "backward_s": 0.0, "wait_s": 0.0}
            return [{"step_s": next(passes), **zeros} for _ in range(count)]
    else:
        loop: PlainTorch | Ours
        if chosen.mode == "torch":
            loop = PlainTorch(model)
        else:
            loop = Ours(model, chosen.mode, chosen.directory)
        step = training(model, loop, chosen.batch_size, chosen.seq_len)
        step()
        loop.synchronize()

        def measure(count: int) -> list[dict[str, float]]:
            step()
            made = [step() for _ in range(count + 1)]
            loop.synchronize()
            for own, following in itertools.pairwise(made):
                own["step_s"] = following["begin"] - own["begin"]
            return made[:-1]

    say({"ready": True, "num_parameters": sum(own.numel() for own in model.parameters())})
    for line in sys.stdin:
        words = line.split()
        if words[:1] != ["steps"]:
            break
        say({"steps": measure(int(words[1])), "peak_bytes": peak_bytes()})


if __name__ == "__main__":
    main()
