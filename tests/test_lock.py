"""The kernel-held lock of a directory: rivals, forks, and death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import processes
from smart_infinity.errors import DeviceBusyError, DeviceSpecError
from smart_infinity.storage.lock import DeviceLock

HOLD = """
import os
from smart_infinity.storage.lock import DeviceLock
lock = DeviceLock(sys.argv[1])
print("held", flush=True)
"""


def assert_busy(directory: Path) -> None:
    with pytest.raises(DeviceBusyError, match="in use") as caught:
        DeviceLock(str(directory))
    assert str(directory) in str(caught.value)


def assert_free(directory: Path) -> None:
    DeviceLock(str(directory)).release()


def test_a_second_lock_in_this_process_is_refused(tmp_path: Path) -> None:
    lock = DeviceLock(str(tmp_path))
    assert_busy(tmp_path)
    lock.release()
    lock.release()
    assert_free(tmp_path)


def test_a_lock_that_is_forgotten_is_dropped(tmp_path: Path) -> None:
    lock = DeviceLock(str(tmp_path))
    del lock
    assert_free(tmp_path)


def test_another_process_is_refused_and_kill_9_frees(tmp_path: Path) -> None:
    with processes.start(HOLD + "sys.stdin.read()", tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert_busy(tmp_path)
        holder.kill()
        assert holder.wait() == -signal.SIGKILL
        assert_free(tmp_path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A DataLoader worker outlives the trainer that was killed."""
    script = """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    print("child", flush=True)
    os.read(reading, 1)  # until the test closes stdin, long after the trainer died
    sys.stdin.read()
    print("child lived on", flush=True)
    os._exit(0)
sys.stdout.flush()
os.close(reading)
os.kill(os.getpid(), 9)
"""
    with processes.start(HOLD + script, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.wait() == -signal.SIGKILL
        assert sorted([holder.stdout.readline(), holder.stdout.readline()]) == ["child\n", "held\n"]
        assert_free(tmp_path)  # and the child still runs:
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.stdout.readline() == "child lived on\n"


def test_a_child_that_ends_does_not_free_the_parents_lock(tmp_path: Path) -> None:
    script = """
child = os.fork()
if child == 0:
    sys.exit(0)  # with all its finalizers
assert os.waitpid(child, 0)[1] == 0
print("waited", flush=True)
sys.stdin.read()
"""
    with processes.start(HOLD + script, tmp_path) as holder:
        assert holder.stdout is not None
        assert [holder.stdout.readline(), holder.stdout.readline()] == ["held\n", "waited\n"]
        assert_busy(tmp_path)
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait() == 0
        assert_free(tmp_path)


def test_a_directory_without_a_place_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(DeviceSpecError, match="cannot open its lock file"):
        DeviceLock(str(tmp_path / "absent"))


# --- without writing -----------------------------------------------------------------------------


def test_who_only_reads_needs_a_lock_file_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceSpecError, match="was never a device") as caught:
        DeviceLock(str(tmp_path), writable=False)
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []
    DeviceLock(str(tmp_path)).release()
    os.chmod(tmp_path / "lock", 0o444)
    lock = DeviceLock(str(tmp_path), writable=False)
    assert_busy(tmp_path)
    lock.release()


def test_who_only_reads_is_refused_while_another_writes(tmp_path: Path) -> None:
    lock = DeviceLock(str(tmp_path))
    with pytest.raises(DeviceBusyError, match="in use"):
        DeviceLock(str(tmp_path), writable=False)
    lock.release()
    DeviceLock(str(tmp_path), writable=False).release()


def test_the_reason_why_a_lock_file_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(DeviceSpecError, match="Is a directory"):
        DeviceLock(str(tmp_path))
