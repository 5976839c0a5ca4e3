"""One clear error, and nothing lost: devices, disks, optimizers and models that will not do."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smart_infinity
from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    offloaded_moments,
    run_python,
    same_bits,
    small_net,
    train,
    weights_of,
)
from smart_infinity import OffloadedGradient
from smart_infinity.errors import (
    DeviceBusyError,
    DeviceFullError,
    DeviceMemoryError,
    DeviceSpecError,
    ForkedProcessError,
    OptimizerClosedError,
    SmartInfinityError,
    StateExistsError,
    UnsupportedError,
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


def files_of(directory: Path) -> list[str]:
    """What a directory holds beside an empty lock file."""
    return sorted(f.name for f in directory.iterdir() if f.name != "lock" or f.stat().st_size)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model that must be unharmed, and trainable in plain torch, when the test is over."""
    model = small_net()
    given = weights_of(model)
    yield model
    assert same_bits(weights_of(model), given)
    net_loss(model, 0).backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())


# --- devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "names 0 directories. Expected 1 to 16"),
        ("/tmp", r"single path '/tmp'. Expected a list of directories; write \['/tmp'\]"),
        (Path("/tmp"), "single path '/tmp'"),
        (None, "Expected a list of 1 to 16 directories"),
        ([3], "Expected a list of 1 to 16 directories"),
        ([b"/tmp"], "is bytes"),
        (["/no/such/place"], "/no/such/place does not exist. Expected an existing directory"),
        ([__file__], "test_bad_input.py is not a directory"),
        (["/proc"], "/proc"),
        ([f"/tmp/{n}" for n in range(17)], "names 17 directories"),
    ],
)
def test_devices_that_are_none(devices: Any, message: str, model: nn.Module) -> None:
    with pytest.raises(DeviceSpecError, match=message):
        smart_infinity.offload(model, adamw(model), devices)


def test_one_bad_device_leaves_the_others_alone(tmp_path: Path, model: nn.Module) -> None:
    good = directories(tmp_path, 2)
    with pytest.raises(DeviceSpecError, match="missing does not exist"):
        offload(model, adamw(model), [*good, tmp_path / "missing"])
    assert [files_of(device) for device in good] == [[], []]
    offload(model, adamw(model), good).close()


def test_the_same_directory_twice(tmp_path: Path, model: nn.Module) -> None:
    (device,) = directories(tmp_path, 1)
    link = tmp_path / "link"
    link.symlink_to(device)
    for other in (device, link, tmp_path / "link" / ".." / "device0"):
        with pytest.raises(DeviceSpecError, match="same directory twice"):
            offload(model, adamw(model), [device, other])


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount something for a test, or skip it with the reason."""
    mounted: list[Path] = []

    def run(*options: str) -> Path:
        target = tmp_path / f"mount{len(mounted)}"
        target.mkdir()
        done = subprocess.run(
            ["mount", *options, str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield run
    for target in mounted:
        subprocess.run(["umount", str(target)], check=True)


def test_a_directory_that_is_not_writable(
    mount: Callable[..., Path], tmp_path: Path, model: nn.Module
) -> None:
    if os.getuid():
        (device,) = directories(tmp_path, 1, "read-only")
        device.chmod(0o500)
    else:  # root may write whatever the mode
        device = mount("-t", "tmpfs", "-o", "ro,size=64k", "none")
    with pytest.raises(DeviceSpecError, match=r"not writable|read-only file system"):
        offload(model, adamw(model), [device])


@pytest.mark.parametrize("pages", [1, 2, 3, 5, 8, 12, 16, 18, 20, 22, 24, 26, 28, 32, 40, 50])
def test_a_full_file_system_is_refused_before_training(
    pages: int, mount: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever the room: either nothing remains reserved, or the space suffices for training."""
    model, (roomy,) = small_net(), directories(tmp_path, 1)
    given = weights_of(model)
    tight = mount("-t", "tmpfs", "-o", f"size={4 * pages}k", "none")
    try:
        optimizer = offload(model, adamw(model), [roomy, tight])
    except DeviceFullError as error:
        refusal, optimizer = str(error), None
    if optimizer is None:
        assert pages < 50, "some thirty pages of files, and some to spare"
        assert str(tight) in refusal
        assert "Free some space, or add a device" in refusal
        assert files_of(roomy) == files_of(tight) == [], "nothing remains reserved"
        assert same_bits(weights_of(model), given)
        offload(model, adamw(model), [roomy]).close()
    else:
        assert pages > 2
        with optimizer:
            train(model, optimizer, range(3), net_loss)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_disk_that_fills_while_space_is_reserved(
    nth: int, tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def reserve(fd: int, offset: int, nbytes: int, real: Any = os.posix_fallocate) -> None:
        calls.append(nbytes)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    devices = directories(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", reserve)
        with pytest.raises(DeviceFullError, match="nothing was left reserved"):
            offload(model, adamw(model), devices)
    assert [files_of(device) for device in devices] == [[], []]
    offload(model, adamw(model), devices).close()


def test_a_directory_in_use_by_this_process(tmp_path: Path, model: nn.Module) -> None:
    devices, other = directories(tmp_path, 2), small_net(seed=1)
    with offload(other, adamw(other), devices) as holder:
        with pytest.raises(DeviceBusyError, match="device1 is in use"):
            offload(model, adamw(model), [*directories(tmp_path, 1, "free"), devices[1]])
        train(other, holder, range(2), net_loss)
        assert holder.steps == 2
    offload(model, adamw(model), devices, resume=False).close()


HOLDER = """
import sys
import threading
from pathlib import Path
from helpers import *
model = small_net()
optimizer = offload(model, OPTIMIZERS["adamw"](model.parameters()), [Path(sys.argv[1])])
print("ready", flush=True)
sys.stdin.read()
import os
os.kill(os.getpid(), 9)
"""


def test_a_directory_in_use_by_another_process(tmp_path: Path, model: nn.Module) -> None:
    (device,) = directories(tmp_path, 1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(device)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(DeviceBusyError, match="device0 is in use"):
            offload(model, adamw(model), [device])
        holder.stdin.close()
        assert holder.wait(60) == -9
    offload(model, adamw(model), [device]).close()  # the kernel dropped the dead one's lock


def test_o_direct_refused_falls_back_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_(path: Any, flags: int, *args: Any, real: Any = os.open, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    results = []
    for direct in (True, False):
        model, devices = small_net(), directories(tmp_path, 1, f"direct-{direct}-")
        if not direct:
            monkeypatch.setattr(os, "open", open_)
        with caplog.at_level(logging.INFO, "smart_infinity"):
            caplog.clear()
            with offload(model, adamw(model), devices) as optimizer:
                train(model, optimizer, range(3), net_loss)
                results.append(offloaded_moments(model, optimizer))
            lines = [r.getMessage() for r in caplog.records if "O_DIRECT" in r.getMessage()]
        if not direct:
            assert len(lines) == 1
            assert "Invalid argument" in lines[0]
            assert "buffered" in lines[0]
    assert all(same_bits(results[0][kind], results[1][kind]) for kind in results[0])


# --- optimizers and models -------------------------------------------------------------------


class MyAdamW(torch.optim.AdamW):
    """A subclass, which may change the formula."""


def stepped(p: Any) -> torch.optim.Optimizer:
    p = list(p)
    optimizer = torch.optim.AdamW(p, lr=0.0, weight_decay=0.0)
    for parameter in p:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), r"amsgrad=True in param_groups\[0\]"),
        (lambda p: torch.optim.Adam(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.SGD(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.Adagrad(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
        (
            lambda p: torch.optim.AdamW(
                [{"params": [q], "amsgrad": n == 3} for n, q in enumerate(p)]
            ),
            r"amsgrad=True in param_groups\[3\]",
        ),
        (torch.optim.RMSprop, "RMSprop"),
        (torch.optim.NAdam, "NAdam"),
        (MyAdamW, "MyAdamW"),
        (stepped, "already stepped"),
        (lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(3))]), "not a parameter of"),
        (lambda p: "AdamW", "optimizer is a str"),
    ],
)
def test_optimizers_that_cannot_be_honoured(
    make: Callable[[Any], Any], message: str, tmp_path: Path, model: nn.Module
) -> None:
    devices = directories(tmp_path, 1)
    with pytest.raises(UnsupportedError, match=message):
        offload(model, make(model.parameters()), devices)
    assert files_of(devices[0]) == []


def test_flags_switched_on_later_are_refused(tmp_path: Path) -> None:
    model = small_net()
    with offload(model, adamw(model), directories(tmp_path, 1)) as optimizer:
        train(model, optimizer, range(1), net_loss)
        optimizer.param_groups[0]["amsgrad"] = True
        net_loss(model, 0).backward()
        with pytest.raises(UnsupportedError, match="amsgrad"):
            optimizer.step()
        assert optimizer.steps == 1


def shared_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight.data = model[0].weight.data
    return model


def frozen() -> nn.Module:
    return small_net().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Embedding(5, 3, sparse=True), "sparse"),
        (lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)), "module 0 .*sparse"),
        (lambda: nn.Linear(3, 3).double(), "weight is torch.float64"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "weight is torch.complex64"),
        (lambda: nn.Linear(3, 3, device="meta"), "weight is on meta"),
        (shared_memory, r"0\.weight and 1\.weight .* share memory"),
        (frozen, "no trainable parameter"),
        (lambda: nn.DataParallel(nn.Linear(3, 3)), "DataParallel"),
    ],
)
def test_models_that_cannot_be_honoured(
    make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    model, devices = make(), directories(tmp_path, 1)
    source = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match=message):
        offload(model, source, devices)
    assert files_of(devices[0]) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bfloat16"])
def test_dtypes_that_cannot_be_honoured(dtype: Any, tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match="dtype is"):
        offload(model, adamw(model), directories(tmp_path, 1), dtype=dtype)


def test_distributed_models_are_refused(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = directories(tmp_path, 1)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(small_net())
        with pytest.raises(UnsupportedError, match=r"DistributedDataParallel.*model\.module"):
            offload(wrapped, adamw(wrapped), devices)
        offload(model, adamw(model), devices).close()  # a group of one is a single process
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        with pytest.raises(UnsupportedError, match="world size of 2"):
            offload(model, adamw(model), devices)
    finally:
        torch.distributed.destroy_process_group()


def test_offload_twice_without_close(tmp_path: Path) -> None:
    model = small_net()
    first, second = directories(tmp_path, 1, "first"), directories(tmp_path, 1, "second")
    with offload(model, adamw(model), first) as optimizer:
        for source in (optimizer, adamw(model)):
            with pytest.raises(UnsupportedError, match=r"offloaded already|OffloadedOptimizer"):
                offload(model, source, second)
        train(model, optimizer, range(2), net_loss)
    with offload(model, adamw(model), second) as optimizer:
        train(model, optimizer, range(2), net_loss)


def test_after_close_the_model_is_an_ordinary_one(tmp_path: Path) -> None:
    model = small_net()
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    optimizer = offload(model, adamw(model), directories(tmp_path, 2), dtype=torch.bfloat16)
    net_loss(model, 0).backward()
    optimizer.step()
    optimizer.close()
    optimizer.close()
    assert all(p.grad is None for p in model.parameters())
    assert [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()] == hooks
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights_of(model)
    net_loss(model, 0).backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())
    plain.step()
    assert not any(map(torch.equal, weights_of(model), before))
    model.state_dict()
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.read_state(model[0].weight),
    ):
        with pytest.raises(OptimizerClosedError, match="resume=True"):
            use()
    assert not any(isinstance(p.grad, OffloadedGradient) for p in model.parameters())


# --- gradients that are not finite -----------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_with_non_finite_gradients_is_skipped(
    value: float, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_net()
    with offload(model, adamw(model), directories(tmp_path, 2), dtype=dtype) as optimizer:
        train(model, optimizer, range(2), net_loss)
        assert not optimizer.step_was_skipped
        weights, states = weights_of(model), offloaded_moments(model, optimizer)
        optimizer.traffic.reset()
        for seed in range(3):
            net_loss(model, seed).backward()
            spoiled = model[2].weight.grad.to_dense()
            spoiled[-1, -1] = value
            model[2].weight.grad = spoiled
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped
        assert optimizer.steps == optimizer.committed_step == 2
        assert optimizer.traffic.weights_to_host == optimizer.traffic.weights_to_device == 0
        assert same_bits(weights_of(model), weights)
        after = offloaded_moments(model, optimizer)
        assert all(same_bits(after[kind], states[kind]) for kind in states)
        train(model, optimizer, range(1), net_loss)
        assert not optimizer.step_was_skipped
        assert optimizer.steps == 3
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING and "skip" in r.message]
    assert len(warnings) == 1
    assert "not finite" in warnings[0].getMessage()


def test_a_factor_that_overflows_is_not_finite(tmp_path: Path) -> None:
    model = small_net()
    with offload(model, adamw(model), directories(tmp_path, 1)) as optimizer:
        net_loss(model, 0).backward()
        before = weights_of(model)
        model[0].weight.grad.mul_(1e38).mul_(1e38)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert same_bits(weights_of(model), before)


# --- forks -----------------------------------------------------------------------------------


def in_fork(action: Callable[[], Any]) -> str:
    """The name of the exception that an action raises in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        name = "nothing"
        try:
            action()
        except BaseException as error:
            name = type(error).__name__
        os.write(write, name.encode())
        os._exit(0)
    os.close(write)
    name = os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(child, 0)
    return name


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    model = small_net()
    with offload(model, adamw(model), directories(tmp_path, 2)) as optimizer:
        train(model, optimizer, range(1), net_loss)
        net_loss(model, 0).backward()
        gradient = model[0].weight.grad
        for action in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.read_state(model[0].weight),
            lambda: gradient.norm(3),
            gradient.to_dense,
            gradient.zero_,
            lambda: net_loss(model, 1).backward(),
        ):
            assert in_fork(action) == ForkedProcessError.__name__
        assert in_fork(optimizer.close) == "nothing"
        assert in_fork(lambda: model(torch.ones(1, 7))) == "nothing"
        optimizer.step()
        train(model, optimizer, range(2), net_loss)
        assert optimizer.steps == 4


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((7,), float(index))


def test_data_loader_workers_fork_during_training(tmp_path: Path) -> None:
    results = []
    for workers in (0, 2):
        model = small_net()
        devices = directories(tmp_path, 2, f"workers{workers}-")
        with offload(model, adamw(model), devices) as optimizer:
            for _ in range(2):
                loader = torch.utils.data.DataLoader(Numbers(), 3, num_workers=workers)
                for batch in loader:
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert optimizer.steps == 8
        results.append(weights_of(model))
    assert same_bits(*results)


def test_no_descriptor_and_no_thread_stays_behind(tmp_path: Path, model: nn.Module) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    devices, other = directories(tmp_path, 3), small_net()
    with offload(other, adamw(other), devices[:1]) as optimizer:
        train(other, optimizer, range(1), net_loss)
    before = held()
    for _ in range(3):
        with pytest.raises(StateExistsError):
            offload(other, adamw(other), devices[:1])
        with pytest.raises(DeviceMemoryError):
            offload(model, adamw(model), devices[1:], device_memory=5)
        with offload(other, adamw(other), devices[:1], resume=True) as optimizer:
            train(other, optimizer, range(1), net_loss)
    assert held() == before


def test_errors_are_a_closed_set(tmp_path: Path, model: nn.Module) -> None:
    for wrong in ([], [tmp_path / "missing"]):
        with pytest.raises(SmartInfinityError):
            offload(model, adamw(model), wrong)


def test_an_import_makes_no_noise() -> None:
    done = run_python("import smart_infinity")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
