"""A run of ``train`` from its options to its tables: the stages in order."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from smart_infinity.cli.console import print_error, print_line, print_result, status
from smart_infinity.cli.errors import EXIT_INTERRUPTED, UsageError
from smart_infinity.cli.models import LoadedModel, check_model_name, load_model
from smart_infinity.cli.options import Durability, OptimizerName, TrainOptions, Verify
from smart_infinity.cli.text import Windows, make_windows, read_texts
from smart_infinity.errors import StateExistsError

if TYPE_CHECKING:
    import torch

    from smart_infinity.cli.report import RunRecord

SGD_MOMENTUM = 0.9
DEFAULT_LR = 1e-4


def run_training(options: TrainOptions) -> None:
    """Loads, trains, saves and reports.

    Raises:
        UsageError: the options cannot be followed; nothing has been trained.
        typer.Exit: the run was interrupted.
    """
    # What can be refused is refused before anything slow begins.
    check_model_name(options.model)
    texts = read_texts(options.texts)
    _make_directories("--devices", options.devices)
    if options.output is not None:
        _make_directories("--output", [options.output])
    if options.trace is not None and not options.trace.absolute().parent.is_dir():
        raise UsageError(f"--trace {options.trace}: expected a file in an existing directory")

    with status(f"loading {options.model}"):
        loaded = load_model(options.model, options.seed)
        _check_seq_len(loaded.model, options.seq_len)
    with status("tokenising the text"):
        windows = make_windows(
            texts,
            loaded,
            num_tokens=options.num_tokens,
            seq_len=options.seq_len,
            batch_size=options.batch_size,
            seed=options.seed,
        )
    record, interrupted = _train(options, loaded, windows)
    if record.steps:
        _report(options, record, saved=not interrupted)
    if interrupted:
        print_error(
            f"interrupted; the devices hold step {record.committed_step} of {options.steps}: "
            "repeat the command with --resume (and without --fresh) to continue"
        )
        raise typer.Exit(EXIT_INTERRUPTED)


def _train(
    options: TrainOptions, loaded: LoadedModel, windows: Windows
) -> tuple["RunRecord", bool]:
    """Trains and saves the weights; the second value says whether a key press ended it early."""
    import torch

    import smart_infinity
    from smart_infinity.cli.compute import matmul_context
    from smart_infinity.cli.loop import evaluate, train_steps
    from smart_infinity.cli.progress import TrainingDisplay
    from smart_infinity.cli.report import RunRecord

    dtype: torch.dtype = getattr(torch, options.dtype)
    parameters = [weight for weight in loaded.model.parameters() if weight.requires_grad]
    try:
        model, optimizer = smart_infinity.offload(
            loaded.model,
            make_optimizer(options, parameters),
            [str(directory) for directory in options.devices],
            dtype=dtype,
            device_memory=options.device_memory,
            resume=options.resume,
            durability="none" if options.durability is Durability.NONE else "step",
            verify="read" if options.verify is Verify.READ else "resume",
            trace=options.trace,
        )
    except StateExistsError as error:
        # The library's message speaks of its own argument, not of our options.
        directories = ", ".join(str(directory) for directory in options.devices)
        raise UsageError(
            f"the devices hold the state of an earlier run ({directories}): give --resume to "
            "continue it, or --fresh to discard it"
        ) from error
    batches = windows.batches()
    with optimizer, contextlib.ExitStack() as stack:
        optimizer.register_for_checkpointing(batches)
        steps_before = optimizer.steps
        if options.lr is not None:  # also in a resumed run, whose state brings its own
            for group in optimizer.param_groups:
                group["lr"] = options.lr
        if steps_before >= options.steps:
            print_line(
                f"the devices hold step {steps_before}, and --steps {options.steps} counts from "
                "the first one: nothing is left to train"
            )
        record = RunRecord(
            options.output and options.output / "metrics.jsonl",
            keep_until_step=steps_before,
            num_parameters=sum(weight.numel() for weight in parameters),
            bytes_per_weight=dtype.itemsize,
            accumulate=options.accumulate,
        )
        stack.callback(record.close)
        compute = matmul_context(dtype)

        def note_held_out_loss() -> None:
            loss = evaluate(model, windows.held_out, compute)
            if loss is not None:
                record.held_out[optimizer.steps] = loss

        display = TrainingDisplay(completed=steps_before, total=options.steps)
        interrupted = False
        try:
            with status("measuring the loss before"):
                note_held_out_loss()
            with display:
                for metrics in train_steps(
                    model,
                    optimizer,
                    batches,
                    first_step=steps_before + 1,
                    last_step=options.steps,
                    accumulate=options.accumulate,
                    max_grad_norm=options.max_grad_norm,
                    compute=compute,
                ):
                    record.append(metrics)
                    display.show(metrics)
            with status("measuring the loss after"):
                note_held_out_loss()
        except KeyboardInterrupt:
            interrupted = True
        record.committed_step = optimizer.steps
        if options.output is not None and not interrupted:
            model.save_pretrained(options.output)
            if loaded.tokenizer is not None:
                loaded.tokenizer.save_pretrained(options.output)
    return record, interrupted


def make_optimizer(
    options: TrainOptions, parameters: Sequence["torch.nn.Parameter"]
) -> "torch.optim.Optimizer":
    """The optimizer as a user of plain torch would write it."""
    import torch

    lr = DEFAULT_LR if options.lr is None else options.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": options.weight_decay}
    match options.optimizer:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(parameters, **common)
        case OptimizerName.ADAM:
            return torch.optim.Adam(parameters, **common)
        case OptimizerName.SGD:
            return torch.optim.SGD(parameters, momentum=SGD_MOMENTUM, **common)
        case OptimizerName.ADAGRAD:
            return torch.optim.Adagrad(parameters, **common)


def _report(options: TrainOptions, record: "RunRecord", *, saved: bool) -> None:
    from smart_infinity.cli.plot import PLOT_INSTALL, plot_run
    from smart_infinity.cli.report import link_table, run_table

    print_result(run_table(record), link_table(record))
    if options.output is None:
        return
    if plot_run(record, options.output / "run.png", title=_title(options)):
        weights = " and the weights" if saved else ", without weights,"
        print_line(f"metrics.jsonl, run.png{weights} are in {options.output}")
    else:
        print_line(f"no run.png, since matplotlib is not installed: {PLOT_INSTALL}")


def _title(options: TrainOptions) -> str:
    count = len(options.devices)
    return (
        f"{Path(options.model).name}, {options.optimizer}, {options.dtype}, "
        f"{count} device{'s' * (count > 1)}"
    )


def _make_directories(option: str, directories: Sequence[Path]) -> None:
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(f"{option} {directory}: a file, expected a directory") from error
        except OSError as error:
            raise UsageError(f"{option} {directory}: cannot be made: {error.strerror}") from error


def _check_seq_len(model: Any, seq_len: int) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise UsageError(f"--seq-len {seq_len}: the model's longest sequence is {longest} tokens")
