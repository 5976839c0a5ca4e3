"""Steps that are still under way when `step()` has returned: who waits for what."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    OPTIMIZERS,
    directories,
    gpt_loss,
    net_loss,
    offload,
    offloaded_moments,
    run_python,
    same_bits,
    small_net,
    tiny_gpt,
    train,
    two_groups,
    weights_of,
)
from smart_infinity.errors import (
    DeviceIOError,
    ForkedProcessError,
    OptimizerFailedError,
    UnsupportedError,
)

adamw = OPTIMIZERS["adamw"]
EARLY = {"overlap": True, "accumulation_steps": 1}


class Valve:
    """Lets reads and writes of state through up to a number of them, and then holds them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._change, self._left = threading.Condition(), float("inf")
        self.error: OSError | None = None
        for name in ("preadv", "pwritev"):
            patch.setattr(os, name, self._held(getattr(os, name)))

    def _held(self, real: Any) -> Any:
        def call(fd: int, parts: Any, offset: int) -> int:
            with self._change:
                self._change.wait_for(lambda: self._left > 0, timeout=60)
                self._left -= 1
            if self.error is not None:
                raise self.error
            return real(fd, parts, offset)

        return call

    def shut(self, after: int = 0) -> None:
        with self._change:
            self._left = after

    def open(self, error: OSError | None = None) -> None:
        with self._change:
            self._left, self.error = float("inf"), error
            self._change.notify_all()


@pytest.fixture
def valve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
    own = Valve(monkeypatch)
    yield own
    own.open()


def begin(path: Path, options: dict[str, Any] = EARLY, **more: Any) -> Any:
    model = tiny_gpt()
    return model, offload(model, adamw(model.parameters()), directories(path, 1), **options, **more)


def once(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    gpt_loss(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def reference(steps: int, **options: Any) -> list[Tensor]:
    """Weights after plain steps, made elsewhere."""
    import tempfile

    with tempfile.TemporaryDirectory() as path:
        model, optimizer = begin(Path(path), {}, **options)
        with optimizer:
            for seed in range(steps):
                once(model, optimizer, seed)
        return weights_of(model)


# --- what waits -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_records")
def test_a_module_waits_for_its_own_weights_only(tmp_path: Path, valve: Valve) -> None:
    model, optimizer = begin(tmp_path, {"overlap": True})
    gpt_loss(model, 0).backward()
    before = weights_of(model)
    valve.shut(after=20)  # enough for the embedding, which comes first
    optimizer.step()
    assert optimizer.steps == 1
    assert optimizer.committed_step == 0
    tokens = torch.zeros(1, dtype=torch.long)
    assert not torch.equal(model.tokens(tokens), before[0][:1])
    assert torch.equal(model.head.weight, before[-1])
    rest = threading.Thread(target=model, args=(torch.zeros(1, 5, dtype=torch.long),))
    rest.start()
    rest.join(timeout=0.2)
    assert rest.is_alive()
    valve.open()
    rest.join(timeout=60)
    assert not rest.is_alive()
    optimizer.synchronize()
    assert optimizer.committed_step == 1
    assert same_bits(weights_of(model), reference(1))
    optimizer.close()


READERS: dict[str, Any] = {
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "state_dict of a part": lambda model, optimizer: model.head.state_dict(),
    "forward": lambda model, optimizer: model(torch.zeros(1, 5, dtype=torch.long)),
    "read_state": lambda model, optimizer: optimizer.read_state(model.head.weight),
    "manifest": lambda model, optimizer: optimizer.state_dict(),
    "snapshot": lambda model, optimizer: optimizer.snapshot("kept"),
    "close": lambda model, optimizer: optimizer.close(),
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
    "save": lambda model, optimizer: torch.save(model, io.BytesIO()),
}


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_weights_or_state_waits(reader: str, tmp_path: Path, valve: Valve) -> None:
    model, optimizer = begin(tmp_path)
    once(model, optimizer, 0)
    gpt_loss(model, 1).backward()
    optimizer.synchronize()
    valve.shut()
    optimizer.step()
    own = threading.Thread(target=READERS[reader], args=(model, optimizer))
    own.start()
    own.join(timeout=0.05)
    assert own.is_alive()
    valve.open()
    own.join(timeout=60)
    assert not own.is_alive()
    if reader != "forward":  # which does not need the commit
        assert same_bits(weights_of(model), reference(2))
    optimizer.close()


def test_loaded_weights_are_not_overwritten_by_the_step_under_way(
    tmp_path: Path, valve: Valve
) -> None:
    model, optimizer = begin(tmp_path)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    gpt_loss(model, 0).backward()
    valve.shut()
    optimizer.step()
    opener = threading.Timer(0.05, valve.open)
    opener.start()
    model.load_state_dict(saved)
    optimizer.synchronize()
    assert same_bits(weights_of(model), saved.values())
    opener.join()
    optimizer.close()


def test_a_copy_is_detached_and_has_the_new_weights(tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path)
    once(model, optimizer)
    twin = copy.deepcopy(model)
    content = io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    loaded = torch.load(content, weights_only=False)
    assert same_bits(weights_of(twin), reference(1))
    assert same_bits(weights_of(loaded), reference(1))
    optimizer.close()
    for own in (twin, loaded):
        gpt_loss(own, 3).backward()
        assert type(own.head.weight.grad) is Tensor
        assert own.state_dict().keys() == model.state_dict().keys()


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads its output projection's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


def attention_loss(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("options", [{"overlap": True}, EARLY], ids=["overlap", "early"])
def test_weights_that_are_used_without_their_module_are_waited_for(
    options: dict[str, Any], tmp_path: Path
) -> None:
    results = []
    for number, own in enumerate(({}, options)):
        torch.manual_seed(0)
        model = Attention()
        devices = directories(tmp_path, 2, f"run{number}-")
        with offload(model, adamw(model.parameters()), devices, **own) as optimizer:
            train(model, optimizer, range(5), attention_loss, clip=None)
        results.append(weights_of(model))
    assert same_bits(*results)


def test_a_weight_used_without_any_module_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = begin(tmp_path)
    once(model, optimizer, 0)
    with pytest.raises(UnsupportedError, match=r"head\.weight.*synchronize"):
        model.head.weight.sum().backward()
    optimizer.zero_grad()
    once(model, optimizer, 1)
    optimizer.synchronize()
    model.head.weight.sum().backward()  # waited for
    optimizer.step()
    optimizer.close()


# --- errors, ends ---------------------------------------------------------------------------------

LATER: dict[str, Any] = {
    name: READERS[name]
    for name in ("synchronize", "forward", "state_dict", "read_state", "manifest", "close")
} | {"step": once, "load": lambda model, optimizer: model.load_state_dict({}, strict=False)}


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("later", LATER)
def test_an_error_surfaces_at_the_next_call(later: str, tmp_path: Path, valve: Valve) -> None:
    model, optimizer = begin(tmp_path)
    once(model, optimizer, 0)
    optimizer.synchronize()
    gpt_loss(model, 1).backward()
    valve.shut()
    optimizer.step()
    valve.open(OSError(5, "Input/output error"))
    with pytest.raises(DeviceIOError, match="device0"):
        LATER[later](model, optimizer)
    assert (optimizer.steps, optimizer.committed_step) == (1, 1)
    valve.open()
    with pytest.raises(OptimizerFailedError):
        model(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(OptimizerFailedError):
        optimizer.step()
    again = offload(model, adamw(model.parameters()), [tmp_path / "device0"], resume=True, **EARLY)
    with again:
        assert again.steps == 1
        once(model, again, 1)
    assert same_bits(weights_of(model), reference(2))


SCRIPT = """
import sys
from pathlib import Path
from helpers import *
torch.set_num_threads(1)
model = tiny_gpt()
optimizer = offload(
    model, OPTIMIZERS["adamw"](model.parameters()), [Path(sys.argv[1])],
    overlap=True, accumulation_steps=int(sys.argv[2]) or None,
)
for seed in range(3):
    gpt_loss(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("steps", [0, 1])
def test_a_process_that_just_ends_has_committed_its_last_step(steps: int, tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    done = run_python(SCRIPT, path, steps)
    assert (done.returncode, done.stderr) == (0, "")
    model = tiny_gpt(seed=9)
    with offload(model, adamw(model.parameters()), [path], resume=True) as optimizer:
        assert optimizer.steps == 3
    assert same_bits(weights_of(model), reference(3))


def test_a_forked_child_does_not_wait_for_ever(tmp_path: Path, valve: Valve) -> None:
    model, optimizer = begin(tmp_path)
    gpt_loss(model, 0).backward()
    valve.shut()
    optimizer.step()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            model(torch.zeros(1, 5, dtype=torch.long))
        except ForkedProcessError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    valve.open()
    optimizer.close()


@pytest.mark.parametrize("after", ["backward", "step"])
def test_a_dropped_pair_is_freed_and_its_step_committed(after: str, tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    threads = set(threading.enumerate())

    def use_and_forget() -> tuple[weakref.ref[nn.Module], int]:
        model = small_net()
        optimizer = offload(
            model,
            adamw(model.parameters()),
            paths,
            resume=True if paths[0].glob("*") else None,
            **EARLY,
        )
        net_loss(model, 0).backward()
        if after == "step":
            optimizer.step()
        return weakref.ref(model), optimizer.steps

    for number in range(3):
        model, steps = use_and_forget()
        gc.collect()
        for thread in set(threading.enumerate()) - threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        gc.collect()
        assert model() is None
        assert steps == (number + 1 if after == "step" else 0)


# --- early updates: whatever comes between backward and step --------------------------------------


def change_lr(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def edit_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.data.mul_(1.5)
    model.tokens.weight.data[3] = 0.25


def drop_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.grad = None


def zero_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.tokens.weight.grad.zero_()


def replace_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.grad = torch.full_like(model.head.weight, 0.125)


def scale_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.norm.weight.grad.mul_(3.0)


def add_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gpt_loss(model, 77).backward()


def backward_anew(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    gpt_loss(model, 78).backward()


def read_between(model: nn.Module, optimizer: Any) -> None:
    if hasattr(optimizer, "read_state"):
        optimizer.read_state(model.head.weight)
        optimizer.snapshot(f"at-{optimizer.steps}")


def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The step is skipped, and the next one is made of the same gradients but this one."""
    model.norm.bias.grad.mul_(float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    model.norm.bias.grad = None


BETWEEN = [
    change_lr,
    edit_weights,
    drop_one,
    zero_one,
    replace_one,
    scale_one,
    add_backward,
    backward_anew,
    read_between,
    spoil,
]


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda own: own.__name__)
def test_whatever_comes_between_backward_and_step_counts(
    between: Any, durability: str, tmp_path: Path
) -> None:
    results = []
    for number, options in enumerate(({}, EARLY, {"accumulation_steps": 1})):
        model = tiny_gpt()
        devices = directories(tmp_path, 2, f"run{number}-")
        source = torch.optim.AdamW(two_groups(model), lr=3e-3, eps=1e-5)
        with offload(model, source, devices, durability=durability, **options) as optimizer:
            for seed in range(4):
                gpt_loss(model, seed).backward()
                if seed in (1, 2):
                    between(model, optimizer)
                optimizer.step()
                if seed != 2:  # landed gradients survive, as in torch
                    optimizer.zero_grad()
            states = offloaded_moments(model, optimizer)
        results.append([*weights_of(model), *(t for kind in states.values() for t in kind)])
    assert same_bits(results[1], results[0])
    assert same_bits(results[2], results[0])


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("steps", [2, 3])
def test_accumulation_is_updated_in_the_last_backward(steps: int, tmp_path: Path) -> None:
    results = []
    for number, options in enumerate(({}, {"overlap": True, "accumulation_steps": steps})):
        model, optimizer = begin(tmp_path / str(number), options)
        with optimizer:
            for seed in range(3):
                for micro in range(steps):
                    gpt_loss(model, 10 * seed + micro).backward()
                optimizer.step()
                optimizer.zero_grad()
            if options:
                # Nothing but the last record or so is left for step(): all was foreseen.
                assert optimizer.traffic.control > 0
        results.append(weights_of(model))
    assert same_bits(*results)


def test_clipping_by_the_engine_is_torchs(tmp_path: Path) -> None:
    results = []
    for options, clip in (({}, 0.5), ({"overlap": True, "max_grad_norm": 0.5}, None)):
        model, optimizer = begin(tmp_path / str(len(results)), options)
        with optimizer:
            train(model, optimizer, range(4), clip=clip)
        results.append(weights_of(model))
    assert same_bits(*results)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("overlap", "yes"),
        ("overlap", 1),
        ("accumulation_steps", 0),
        ("accumulation_steps", True),
        ("accumulation_steps", 1.5),
        ("max_grad_norm", 0),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", float("inf")),
        ("max_grad_norm", "1"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{option} is {value!r}. Expected"):
        begin(tmp_path, {option: value})
    assert list((tmp_path / "device0").iterdir()) == []
