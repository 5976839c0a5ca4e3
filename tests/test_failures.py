"""I/O errors and Ctrl-C in the middle of training: loud, and nothing committed is lost."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    offloaded_moments,
    same_bits,
    small_net,
    train,
    weights_of,
)
from smart_infinity import OffloadedOptimizer
from smart_infinity.errors import (
    DeviceIOError,
    OptimizerFailedError,
    StateExistsError,
    StateMismatchError,
)

CALLS = {"read": "preadv", "write": "pwritev", "sync": "fdatasync"}
STEPS = 4


class Fault:
    """Makes the n-th call of one of the system's functions fail, or do something before it."""

    def __init__(
        self, patch: pytest.MonkeyPatch, call: str, nth: int, action: Callable[[], object]
    ) -> None:
        self.calls, self.nth, self.action = 0, nth, action
        self.real, self.lock = getattr(os, call), threading.Lock()
        patch.setattr(os, call, self)

    def __call__(self, *args: Any) -> Any:
        with self.lock:
            self.calls += 1
            now = self.calls == self.nth
        if now:
            self.action()
        return self.real(*args)


def raise_eio() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def begin(
    devices: list[Path], model: nn.Module | None = None, resume: bool | None = None
) -> tuple[nn.Module, OffloadedOptimizer]:
    model = model or small_net()
    source = OPTIMIZERS["adamw"](model.parameters())
    return model, offload(model, source, devices, dtype=torch.bfloat16, resume=resume)


def result(model: nn.Module, optimizer: OffloadedOptimizer) -> list[Tensor]:
    states = offloaded_moments(model, optimizer)
    return [*weights_of(model), *(tensor for kind in states.values() for tensor in kind)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """Weights and states of a run of `STEPS` steps."""
    model, optimizer = begin(directories(tmp_path_factory.mktemp("undisturbed"), 2))
    with optimizer:
        train(model, optimizer, range(STEPS), net_loss)
        return result(model, optimizer)


@pytest.mark.parametrize("operation", CALLS)
def test_an_error_in_any_operation(
    operation: str, tmp_path: Path, undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail the n-th operation of a two-step run, for every n."""
    nth, resumed_at = 0, set()
    while True:
        nth += 1
        devices = directories(tmp_path / str(nth), 2)
        model, optimizer = begin(devices)
        with monkeypatch.context() as patch:
            fault = Fault(patch, CALLS[operation], nth, raise_eio)
            try:
                train(model, optimizer, range(2), net_loss)
            except DeviceIOError as error:
                caught = error
            else:
                assert fault.calls < nth, "the error was swallowed"
                optimizer.close()
                break
        assert caught.device in map(str, devices)
        assert Path(caught.path).parent == Path(caught.device)
        assert (caught.operation, caught.errno) == (operation, errno.EIO)
        assert (caught.offset_bytes is None) == (operation == "sync")
        for part in (caught.device, caught.path, operation, f"errno {errno.EIO}", "resume=True"):
            assert part in str(caught)
        model, optimizer = begin(devices, model, resume=True)
        with optimizer:
            resumed_at.add(optimizer.steps)
            train(model, optimizer, range(optimizer.steps, STEPS), net_loss)
            assert same_bits(result(model, optimizer), undisturbed)
    assert nth > 2, "some operation was made to fail"
    assert {0, 1} <= resumed_at


@pytest.fixture
def failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.Module, OffloadedOptimizer, list[Path]]:
    """A model whose very first step failed when some weights had arrived already."""
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    given = weights_of(model)
    with monkeypatch.context() as patch:
        Fault(patch, "pwritev", 2, raise_eio)
        with pytest.raises(DeviceIOError):
            train(model, optimizer, range(1), net_loss)
    assert not same_bits(weights_of(model), given), "weights are torn"
    return model, optimizer, devices


Failed = tuple[nn.Module, OffloadedOptimizer, list[Path]]


def assert_alarmed(model: nn.Module, optimizer: OffloadedOptimizer, path: Path) -> None:
    for use in (
        lambda: model(torch.ones(1, 7)),
        lambda: model[2](torch.ones(1, 33)),
        model.state_dict,
        lambda: torch.save(model.state_dict(), path / "model.pt"),
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.read_state(model[0].weight),
    ):
        with pytest.raises(OptimizerFailedError, match="resume=True"):
            use()
    assert not (path / "model.pt").exists()


def test_nothing_may_be_computed_or_saved_after_a_failure(failed: Failed, tmp_path: Path) -> None:
    model, optimizer, _ = failed
    optimizer.zero_grad()
    assert_alarmed(model, optimizer, tmp_path)
    optimizer.close()
    assert_alarmed(model, optimizer, tmp_path)


def test_a_failed_attempt_to_resume_leaves_the_alarms_on(
    failed: Failed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, devices = failed
    with pytest.raises(StateExistsError, match="resume=True"):
        begin(devices, model)
    assert_alarmed(model, optimizer, tmp_path)
    with pytest.raises(StateMismatchError, match="torn"):
        begin(directories(tmp_path, 2, "other"), model, resume=True)
    assert_alarmed(model, optimizer, tmp_path)
    with monkeypatch.context() as patch:
        Fault(patch, "preadv", 9, raise_eio)
        Fault(patch, "fdatasync", 1, raise_eio)
        with pytest.raises(DeviceIOError):
            begin(devices, model, resume=True)
    assert_alarmed(model, optimizer, tmp_path)


def test_resume_after_the_first_step_failed(failed: Failed, undisturbed: list[Tensor]) -> None:
    model, _, devices = failed
    model, optimizer = begin(devices, model, resume=True)
    with optimizer:
        assert optimizer.steps == 0
        assert same_bits(weights_of(model), weights_of(small_net().bfloat16()))
        train(model, optimizer, range(STEPS), net_loss)
        assert same_bits(result(model, optimizer), undisturbed)
    model.state_dict()


def test_load_other_weights_after_a_failure(
    failed: Failed, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, devices = failed
    model.load_state_dict(small_net(seed=1).state_dict())
    model, optimizer = begin(devices, model, resume=False)
    assert "Load weights into the model first" in caplog.text
    with optimizer:
        assert same_bits(weights_of(model), weights_of(small_net(seed=1).bfloat16()))
        train(model, optimizer, range(2), net_loss)


# --- Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS.values())
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_ctrl_c_waits_for_the_end_of_the_step(
    call: str, nth: int, tmp_path: Path, undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = begin(directories(tmp_path, 2))
    handler, done = signal.getsignal(signal.SIGINT), 0

    def begun() -> Iterator[int]:
        nonlocal done
        for seed in range(STEPS):
            done += 1
            yield seed

    with optimizer:
        with monkeypatch.context() as patch:
            fault = Fault(patch, call, nth, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, begun(), net_loss)
            assert fault.calls >= nth
        assert optimizer.steps == optimizer.committed_step == done
        assert signal.getsignal(signal.SIGINT) is handler
        optimizer.zero_grad()
        train(model, optimizer, range(done, STEPS), net_loss)
        assert same_bits(result(model, optimizer), undisturbed)


def test_a_handler_of_the_user_is_called_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = begin(directories(tmp_path, 1))
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(optimizer.committed_step))
    try:
        with optimizer, monkeypatch.context() as patch:
            Fault(patch, "pwritev", 1, lambda: os.kill(os.getpid(), signal.SIGINT))
            train(model, optimizer, range(2), net_loss)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_steps_work_in_a_thread(tmp_path: Path, undisturbed: list[Tensor]) -> None:
    """Signals belong to the main thread; a step elsewhere must not touch them."""
    model, optimizer = begin(directories(tmp_path, 2))
    with optimizer:
        thread = threading.Thread(target=train, args=(model, optimizer, range(STEPS), net_loss))
        thread.start()
        thread.join()
        assert same_bits(result(model, optimizer), undisturbed)
