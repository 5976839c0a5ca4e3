"""Exports and imports that cannot be made: refused, and nothing half-done is left."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from crashes import Everything, contents
from helpers import (
    OPTIMIZERS,
    directories,
    net_loss,
    offload,
    run_python,
    small_net,
    train,
    two_groups,
)
from smart_infinity import save_export
from smart_infinity.cli import app
from smart_infinity.errors import (
    CorruptStateError,
    DeviceBusyError,
    DeviceFullError,
    SmartInfinityError,
    StateExistsError,
    StateMismatchError,
    UnsupportedError,
)
from smart_infinity.tools.export import export_set
from smart_infinity.tools.importing import import_set


def begin(devices: list[Path], resume: bool | None = None, **options: Any) -> Any:
    model = small_net(seed=77 if resume else 0)
    source = OPTIMIZERS["adamw"](two_groups(model))
    return model, offload(model, source, devices, resume=resume, **options)


@pytest.fixture
def held(tmp_path: Path) -> tuple[list[Path], Everything]:
    """Two devices at step 3."""
    devices = directories(tmp_path, 2)
    model, optimizer = begin(devices)
    with optimizer:
        train(model, optimizer, range(3), net_loss)
        return devices, Everything(model, optimizer)


@pytest.fixture
def exported(held: Held, tmp_path: Path) -> Path:
    export_set(held[0], tmp_path / "out")
    return tmp_path / "out"


Held = tuple[list[Path], Everything]


def cli(*arguments: object) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --- exporting -------------------------------------------------------------------------------


def test_step_0_and_a_running_set_are_refused(tmp_path: Path) -> None:
    devices = directories(tmp_path, 2)
    _, optimizer = begin(devices)
    with pytest.raises(DeviceBusyError):
        export_set(devices, tmp_path / "out")
    optimizer.close()
    with pytest.raises(UnsupportedError, match="step 0"):
        export_set(devices, tmp_path / "out")
    assert cli("export", *devices, "--to", tmp_path / "out").exit_code == 1
    assert sorted(os.listdir(tmp_path)) == ["device0", "device1"]


def test_an_out_that_holds_something_is_refused(held: Held, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(StateExistsError, match="not an empty directory"):
        export_set(held[0], out)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(StateExistsError):
        export_set(held[0], tmp_path / "file")
    assert (out / "mine").read_text() == (tmp_path / "file").read_text() == "kept"
    (out / "mine").unlink()
    assert export_set(held[0], out) == 3, "an empty one will do"
    assert cli("export", *held[0], "--to", out).exit_code == 1


def test_missing_devices_and_snapshots_are_refused(held: Held, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match="missing: device 1"):
        export_set(held[0][:1], tmp_path / "out")
    with pytest.raises(StateMismatchError, match="no snapshot 'x'"):
        export_set(held[0], tmp_path / "out", snapshot="x")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_a_damaged_state_record_leaves_nothing(
    from_snapshot: bool, held: Held, tmp_path: Path
) -> None:
    devices, _ = held
    assert cli("snapshot", *devices, "--name", "a").exit_code == 0
    damaged = list(devices[1].glob("snapshots/a/state" if from_snapshot else "state.*"))
    for state in damaged:
        data = bytearray(state.read_bytes())
        data[50] ^= 1
        state.write_bytes(data)
    before = contents(devices)
    options = {"snapshot": "a"} if from_snapshot else {}
    with pytest.raises(CorruptStateError, match="state record 0"):
        export_set(devices, tmp_path / "out", **options)
    assert not list(tmp_path.glob("*out*"))
    assert contents(devices) == before
    other = {} if from_snapshot else {"snapshot": "a"}
    assert export_set(devices, tmp_path / "out", **other) == 3


@pytest.mark.parametrize("how", ["known", "allocation", "writing"])
def test_a_full_disk_leaves_nothing(
    how: str, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if how == "known":
            patch.setattr("smart_infinity.tools.export.free_nbytes", lambda directory: 1000)
        else:
            patch.setattr(os, "posix_fallocate" if how == "allocation" else "pwritev", fail)
        with pytest.raises(OSError, match=r"space|free") as caught:
            export_set(held[0], tmp_path / "out")
        result = CliRunner().invoke(
            app, ["export", *map(str, held[0]), "--to", str(tmp_path / "o")]
        )
    assert sorted(os.listdir(tmp_path)) == ["device0", "device1"]
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert isinstance(caught.value, DeviceFullError)


PEAK = """
import resource, sys
from smart_infinity.tools.export import export_set
from smart_infinity.tools.importing import import_set

what, out, *devices = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if what == "export":
    export_set(devices, out)
else:
    import_set(out, devices)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_that_of_a_buffer(tmp_path: Path) -> None:
    """72 MB of state, one tensor of 24 MB in each file; a record takes 12 MB."""
    model = torch.nn.Linear(1000, 6000, bias=False)
    source, devices = torch.optim.AdamW(model.parameters()), directories(tmp_path, 2)
    optimizer = offload(model, source, devices)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    optimizer.close()
    grown = {}
    for what, own in (("export", devices), ("import", directories(tmp_path, 3, "moved"))):
        done = run_python(PEAK, what, tmp_path / "out", *own)
        assert done.returncode == 0, done.stderr
        grown[what] = int(done.stdout) / 1024
    assert max(grown.values()) < 30, grown


# --- importing -------------------------------------------------------------------------------


def test_a_state_is_not_overwritten_without_a_word(
    held: Held, exported: Path, tmp_path: Path
) -> None:
    devices, expected = held
    new = tmp_path / "new"
    before = contents(devices)
    with pytest.raises(StateExistsError, match="device1 holds a state"):
        import_set(exported, [*directories(tmp_path, 1, "empty"), devices[1]])
    assert cli("import", *devices, "--from", exported).exit_code == 1
    assert contents(devices) == before
    assert not [name for name in os.listdir(tmp_path / "empty0") if name != "lock"]
    result = cli("import", *devices, new, "--from", exported, "--fresh")
    assert result.exit_code == 0, result.stderr
    assert "step 3" in result.stdout + result.stderr
    model, optimizer = begin([new, *devices], resume=True)
    with optimizer:
        expected.check(model, optimizer)
        with pytest.raises(DeviceBusyError):
            import_set(exported, [new, *devices], discard=True)


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "posix_fallocate"])
def test_a_failure_leaves_nothing(
    call: str, nth: int, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = directories(tmp_path, 2, "new")
    (devices[0] / "mine").write_text("kept")
    real, calls = getattr(os, call), iter(range(1, 10**9))

    def fail(*arguments: Any) -> Any:
        if next(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(SmartInfinityError):
            import_set(exported, devices)
    left = [name for device in devices for name in os.listdir(device)]
    assert sorted(left) == ["lock", "lock", "mine"]
    assert import_set(exported, devices) == 3


def test_no_room_is_found_out_before(
    held: Held, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(held[0])
    (other,) = directories(tmp_path, 1, "other")
    monkeypatch.setattr("smart_infinity.storage.slots.free_nbytes", lambda directory: 20_000)
    with pytest.raises(DeviceFullError, match="20000 are free"):
        import_set(exported, [other])
    assert os.listdir(other) == ["lock"]
    # What is discarded makes room.
    assert import_set(exported, held[0], discard=True) == 3
    assert contents(held[0]) != before


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(export: Path) -> None:
        about = json.loads((export / "state.json").read_text())
        change(about)
        (export / "state.json").write_text(json.dumps(about))

    return damage


def flip(name: str, offset: int) -> Callable[[Path], None]:
    def damage(export: Path) -> None:
        data = bytearray((export / name).read_bytes())
        data[offset] ^= 0x10
        (export / name).write_bytes(data)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no state.json": lambda e: (e / "state.json").unlink(),
    "no committed": lambda e: (e / "committed").unlink(),
    "no model": lambda e: (e / "model.safetensors").unlink(),
    "no optimizer": lambda e: (e / "optimizer.safetensors").unlink(),
    "cut state.json": lambda e: os.truncate(e / "state.json", 50),
    "cut committed": lambda e: os.truncate(e / "committed", 50),
    "empty committed": lambda e: os.truncate(e / "committed", 0),
    "cut model": lambda e: os.truncate(e / "model.safetensors", 2000),
    "cut optimizer": lambda e: os.truncate(e / "optimizer.safetensors", 9000),
    "header": flip("model.safetensors", 20),
    "committed": flip("committed", 30),
    "version": edit(lambda about: about.update(export_version=99)),
    "optimizer": edit(lambda about: about.update(optimizer="lion")),
    "no optimizer's name": edit(lambda about: about.pop("optimizer")),
    "no step": edit(lambda about: about.pop("step")),
    "no parameters": edit(lambda about: about.pop("parameters")),
    "shape": edit(lambda about: about["parameters"][0].update(shape=[7, 33])),
    "no shape": edit(lambda about: about["parameters"][0].pop("shape")),
    "dtype": edit(lambda about: about["parameters"][0].update(dtype="int3")),
    "name": edit(lambda about: about["parameters"][0].update(name="other")),
    "moments": edit(lambda about: about.update(moments=["sum"])),
    "fewer": edit(lambda about: about["parameters"].pop()),
    "step": edit(lambda about: about.update(step="three")),
    "list": lambda e: (e / "state.json").write_text("[]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused(kind: str, exported: Path, tmp_path: Path) -> None:
    DAMAGE[kind](exported)
    devices = directories(tmp_path, 2, "new")
    with pytest.raises(SmartInfinityError):
        import_set(exported, devices)
    assert not [name for own in devices for name in os.listdir(own) if name != "lock"]


def test_what_is_no_export_is_refused(held: Held, tmp_path: Path) -> None:
    devices = directories(tmp_path, 1, "new")
    for source in (tmp_path / "missing", held[0][0], devices[0]):
        with pytest.raises(StateMismatchError, match="is not an export"):
            import_set(source, devices)
        assert cli("import", *devices, "--from", source).exit_code == 1
    assert not [name for name in os.listdir(devices[0]) if name != "lock"]


def test_a_full_disk_while_a_torch_run_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_net()
    optimizer = OPTIMIZERS["adamw"](two_groups(model))
    train(model, optimizer, range(2), net_loss)
    monkeypatch.setattr("smart_infinity.tools.export.free_nbytes", lambda directory: 1000)
    with pytest.raises(DeviceFullError):
        save_export(tmp_path / "out", model, optimizer, step=2)
    assert os.listdir(tmp_path) == []
