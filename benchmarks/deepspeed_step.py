"""Measures DeepSpeed's training step with parameters and optimizer states on a drive, on the CPU.

This is the baseline of the comparisons: ZeRO-3 of DeepSpeed 0.19.8 with ``offload_param`` and
``offload_optimizer`` set to a directory (``--directory``), on DeepSpeed's CPU accelerator, training
a randomly initialised GPT-2 in bfloat16 with AdamW on random tokens. For each step it reports the
seconds of the whole step, of forward, of backward and of ``engine.step()``, in which the optimizer
states are read, updated and written; for the process, the peak of its resident memory.

It runs in an environment of its own, since DeepSpeed pins other packages than this project. It
needs a C++ compiler and the headers of libaio, with which DeepSpeed compiles two extensions at
the first run (about a minute, then cached in ``~/.cache/torch_extensions``)::

    apt-get install g++ libaio-dev
    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 transformers deepspeed==0.19.8 ninja
    printf 'steps 5\nstop\n' | ENV/bin/python benchmarks/deepspeed_step.py --directory DIR

The process is driven over standard input and answers in JSON lines on standard output; all that
DeepSpeed prints goes to standard error. After the first finished step it writes
``{"ready": true}``. Then ``steps N`` does one unmeasured and N measured steps and answers with
``{"steps": [...], "peak_bytes": ...}``; ``stop`` or the end of the input ends it. What it wrote
to the directory is left there.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODELS: dict[str, dict[str, int]] = {
    "gpt2-tiny": {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 2,
        "n_positions": 128,
        "vocab_size": 512,
    },
    "gpt2-124m": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-354m": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
}
COMPUTE = Path(__file__).parents[1] / "src" / "smart_infinity" / "cli" / "compute.py"


class _GatheredAddmm(torch.autograd.Function):
    """GPT-2's linear layer in fp32 that saves the weight parameter itself for backward.

    ``compute.py`` computes ``addmm(bias, x, weight)`` as a linear layer of ``weight.t()`` and saves
    that view for backward. ZeRO-3 replaces the parameter's data after forward and gathers it again
    before backward. The parameter then has the weights, but a view keeps pointing at the swap
    buffer, which by then holds another parameter: gradients would be silently wrong. So this
    function saves the parameter, as torch's own addmm does. The arithmetic is that of
    ``compute.py``; saving fp32 copies would also be right but hold twice the model's size.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        """The rounded product."""
        ctx.save_for_backward(input, weight)
        return torch.addmm(bias.float(), input.float(), weight.float()).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        """The rounded gradients."""
        input, weight = ctx.saved_tensors
        grad = grad_outputs[0].float()
        grad_input = grad @ weight.float().t()
        grad_weight = input.float().t() @ grad
        return tuple(g.to(torch.bfloat16) for g in (grad.sum(0), grad_input, grad_weight))


def load_compute() -> ModuleType:
    """This project's bfloat16 arithmetic, by path: the project need not be installed."""
    spec = importlib.util.spec_from_file_location("compute", COMPUTE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    replacements = module._REPLACEMENTS
    replacements[torch.addmm] = lambda func, *args: _GatheredAddmm.apply(*args)
    return module


def engine_config(options: argparse.Namespace, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration; ``largest`` is the number of elements of the largest parameter."""
    directory = str(options.directory)
    pipeline = not options.no_pipeline
    return {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000_000,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": directory,
                "buffer_count": 5,
                "buffer_size": largest,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": directory,
                "buffer_count": options.buffers,
                "pipeline_read": pipeline,
                "pipeline_write": pipeline,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8},
    }


def prepare_environment() -> None:
    """One process on the CPU; the extensions are built with the environment's ninja."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


class Trainer:
    """A model under DeepSpeed and the random tokens that it trains on."""

    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            **MODELS[options.model],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
        largest = max(parameter.numel() for parameter in model.parameters())
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        self.engine: Any = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=engine_config(options, largest),
        )[0]
        compute = load_compute()
        self.arithmetic: Callable[[], contextlib.AbstractContextManager[Any]] = lambda: (
            compute.matmul_context(torch.bfloat16)
        )
        self.shape = (options.batch_size, options.seq_len)
        self.vocabulary = config.vocab_size
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> dict[str, float]:
        """One training step and the seconds of its parts."""
        start = time.perf_counter()
        tokens = torch.randint(self.vocabulary, self.shape, generator=self.generator)
        with self.arithmetic():
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            forward = time.perf_counter()
            self.engine.backward(loss)
        backward = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        print(f"loss {loss.item():.4f}", file=sys.stderr)
        return {
            "step_s": end - start,
            "forward_s": forward - start,
            "backward_s": backward - forward,
            "wait_s": end - backward,
        }


def peak_bytes() -> int:
    """The peak of this process's resident memory since its start."""
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="where the files go")
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm limit; 0: none")
    parser.add_argument("--buffers", type=int, default=12, help="of offload_optimizer")
    parser.add_argument("--no-pipeline", action="store_true", help="with at least 4 buffers")
    return parser.parse_args()


def main() -> None:
    """Serves the commands on standard input."""
    options = parse_options()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    prepare_environment()
    options.directory.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options)
    trainer.step()
    answer({"ready": True})
    for line in sys.stdin:
        words = line.split()
        if words == ["stop"]:
            break
        if len(words) != 2 or words[0] != "steps" or not words[1].isdecimal():
            sys.exit(f"expected 'steps N' or 'stop', not {line!r}")
        trainer.step()
        steps = [trainer.step() for _ in range(int(words[1]))]
        answer({"steps": steps, "peak_bytes": peak_bytes()})


if __name__ == "__main__":
    main()
