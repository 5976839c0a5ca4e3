"""What a local device refuses, and what it says then."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from local_sets import ALL, MOMENTS, LocalSet
from smart_infinity.devices import check_specs
from smart_infinity.devices.local import LocalDevice
from smart_infinity.errors import (
    DeviceBusyError,
    DeviceFullError,
    DeviceMemoryError,
    DeviceSpecError,
)
from smart_infinity.layout import Layout, ParameterSpec, plan_layout


def small_layout() -> Layout:
    return plan_layout([ParameterSpec("w", (70_000,), "float32")], "adamw", MOMENTS, 1)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    device = LocalDevice(str(tmp_path), small_layout(), 0, 1, threading.Semaphore(1))
    with pytest.raises(DeviceBusyError, match=str(tmp_path)):
        LocalDevice(str(tmp_path), small_layout(), 0, 1, threading.Semaphore(1))
    device.close()
    LocalDevice(str(tmp_path), small_layout(), 0, 1, threading.Semaphore(1)).close()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, seen in (("file", "is not a directory"), ("absent", "does not exist")):
        with pytest.raises(DeviceSpecError, match=seen):
            LocalDevice(str(tmp_path / name), small_layout(), 0, 1, threading.Semaphore(1))


@pytest.mark.parametrize("short", ["statvfs", "fallocate"])
def test_a_full_disk_is_refused_and_nothing_remains(
    tmp_path: Path, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    device = LocalDevice(str(tmp_path), small_layout(), 0, 1, threading.Semaphore(1))
    device.attach(None)
    if short == "statvfs":
        real = os.statvfs(tmp_path)
        full = os.statvfs_result([*real[:3], 0, 0, *real[5:10]])
        monkeypatch.setattr(os, "statvfs", lambda _: full)
    else:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(DeviceFullError, match="needs 1687552 bytes") as caught:
        device.create()
    assert str(tmp_path) in str(caught.value)
    device.close()
    assert sorted(os.listdir(tmp_path)) == ["lock", "lost+found"]


def test_refused_direct_io_is_said_once_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", refuse_direct)
    own = LocalSet(tmp_path, 1)
    own.update(ALL)
    own.close()
    lines = [r.getMessage() for r in caplog.records if "O_DIRECT" in r.getMessage()]
    assert len(lines) == 1
    assert "Invalid argument (errno 22)" in lines[0]
    assert str(own.paths[0]) in lines[0]


def test_device_memory_that_is_too_small_names_the_size(tmp_path: Path) -> None:
    device = LocalDevice(str(tmp_path), small_layout(), 0, 3, threading.Semaphore(1))
    with pytest.raises(DeviceMemoryError) as caught:
        device.attach(1000)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    with pytest.raises(DeviceMemoryError):
        device.attach(needed - 1)
    device.attach(needed)
    device.close()


def test_specifications_of_devices() -> None:
    assert check_specs([Path("/a"), "/b"]) == ["/a", "/b"]
    for bad, message in (
        ("/a", r"write \['/a'\]"),
        (Path("/a"), "list of directories"),
        ([], "names 0 directories"),
        ([f"/{i}" for i in range(17)], "names 17 directories"),
        ([b"/a"], "is bytes"),
        ([1], "list of 1 to 16"),
        (None, "list of 1 to 16"),
        (["/a", "/b", "/c/../a"], "twice: /a and /c/../a"),
    ):
        with pytest.raises(DeviceSpecError, match=message):
            check_specs(bad)
