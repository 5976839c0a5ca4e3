"""Files and buffers: bytes out are bytes in, and no error of the system is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import processes
from smart_infinity.errors import DeviceIOError
from smart_infinity.layout import PAGE_BYTES
from smart_infinity.storage import blockfile
from smart_infinity.storage.blockfile import BlockFile, direct_io_refusal
from smart_infinity.storage.buffers import checksum, reserve

MIB = 1 << 20


def buffer_of(data: np.ndarray) -> np.ndarray:
    """A page-aligned copy."""
    buffer = reserve(data.size)[: data.size]
    buffer[:] = data
    return buffer


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_file(directory: Path, direct: bool) -> BlockFile:
    if direct and (refusal := direct_io_refusal(str(directory))):
        pytest.skip(f"O_DIRECT: {refusal}")
    return BlockFile(str(directory), str(directory / "file"), direct=direct)


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path):
    file = open_file(tmp_path, request.param)
    yield file
    file.close()


# --- round trips ---------------------------------------------------------------------------------


def round_trip(file: BlockFile, size: int, offset: int) -> None:
    data = buffer_of(random_bytes(size, seed=size))
    file.write_from(data, offset)
    back = reserve(size)[:size]
    back[:] = 0xEE
    file.read_into(back, offset)
    np.testing.assert_array_equal(back, data)
    on_disk = np.fromfile(file.path, np.uint8)
    np.testing.assert_array_equal(on_disk[offset : offset + size], data)


def test_every_size_up_to_9000_bytes_buffered(tmp_path: Path) -> None:
    file = open_file(tmp_path, direct=False)
    data = random_bytes(9000)
    back = np.empty(9000, np.uint8)
    for size in range(9001):
        file.write_from(data[:size], 0)
        assert file.nbytes() == size
        back[:] = 0
        file.read_into(back[:size], 0)
        assert np.array_equal(back[:size], data[:size])
    file.close()


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_about_a_mebibyte_at_odd_offsets_buffered(tmp_path: Path, size: int, offset: int) -> None:
    file = open_file(tmp_path, direct=False)
    round_trip(file, size, offset)
    assert file.nbytes() == offset + size
    file.close()


@pytest.mark.parametrize(
    "size", [PAGE_BYTES, 2 * PAGE_BYTES, MIB - PAGE_BYTES, MIB, MIB + PAGE_BYTES]
)
@pytest.mark.parametrize("offset", [0, PAGE_BYTES, 3 * MIB])
def test_whole_pages_direct_and_buffered(file: BlockFile, size: int, offset: int) -> None:
    round_trip(file, size, offset)
    file.sync()


def test_writes_leave_their_neighbours_alone(file: BlockFile) -> None:
    pages = buffer_of(random_bytes(5 * PAGE_BYTES))
    file.write_from(pages, 0)
    file.write_from(buffer_of(np.full(PAGE_BYTES, 7, np.uint8)), 2 * PAGE_BYTES)
    expected = pages.copy()
    expected[2 * PAGE_BYTES : 3 * PAGE_BYTES] = 7
    np.testing.assert_array_equal(np.fromfile(file.path, np.uint8), expected)


def test_reserving_takes_the_blocks_and_keeps_the_bytes(file: BlockFile) -> None:
    data = buffer_of(random_bytes(PAGE_BYTES))
    file.write_from(data, 0)
    file.reserve(10 * PAGE_BYTES)
    assert file.nbytes() == 10 * PAGE_BYTES
    assert os.stat(file.path).st_blocks * 512 >= 10 * PAGE_BYTES
    file.reserve(0)
    np.testing.assert_array_equal(np.fromfile(file.path, np.uint8)[:PAGE_BYTES], data)


# --- errors --------------------------------------------------------------------------------------


def fail_with(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def assert_names(error: DeviceIOError, file: BlockFile, operation: str, number: int) -> None:
    assert (error.device, error.path, error.operation) == (file.device, file.path, operation)
    assert error.errno == number
    for part in (file.device, file.path, operation, f"errno {number}"):
        assert part in str(error)
    if error.offset_bytes is not None:
        assert f"offset {error.offset_bytes}" in str(error)
    assert isinstance(error, OSError)


ERRORS = [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EDQUOT, errno.EROFS]


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_failing_system_calls_become_device_errors(
    file: BlockFile, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = reserve(PAGE_BYTES)
    file.write_from(buffer, 0)
    calls = [
        ("preadv", "read", lambda: file.read_into(buffer, 8192), 8192),
        ("pwritev", "write", lambda: file.write_from(buffer, 12288), 12288),
        ("fdatasync", "sync", file.sync, None),
        ("posix_fallocate", "reserve", lambda: file.reserve(PAGE_BYTES), PAGE_BYTES),
    ]
    for name, operation, call, offset in calls:
        with monkeypatch.context() as patch:
            patch.setattr(blockfile.os, name, fail_with(number))
            with pytest.raises(DeviceIOError) as caught:
                call()
        assert_names(caught.value, file, operation, number)
        assert caught.value.offset_bytes == offset
        assert caught.value.__cause__ is not None
    file.read_into(buffer, 0)  # the file is still usable


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_failing_to_open_becomes_a_device_error(
    tmp_path: Path, number: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(blockfile.os, "open", fail_with(number))
    with pytest.raises(DeviceIOError, match="open of") as caught:
        BlockFile(str(tmp_path), str(path), direct=direct)
    assert (caught.value.errno, caught.value.path) == (number, str(path))


@pytest.mark.parametrize("failing", range(4))
def test_the_offset_is_that_of_the_transfer_that_failed(
    file: BlockFile, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers of one page each; the n-th fails."""
    data = buffer_of(random_bytes(5 * PAGE_BYTES))
    file.write_from(data, 0)
    for name, operation in (("preadv", "read"), ("pwritev", "write")):
        real = getattr(os, name)
        done: list[int] = []

        def one_page(fd: int, parts: list, offset: int, real=real, done=done) -> int:
            if len(done) == failing:
                raise OSError(errno.EIO, "")
            done.append(offset)
            return real(fd, [parts[0][:PAGE_BYTES]], offset)

        with monkeypatch.context() as patch:
            patch.setattr(blockfile.os, name, one_page)
            with pytest.raises(DeviceIOError) as caught:
                (file.read_into if operation == "read" else file.write_from)(data, 0)
        assert_names(caught.value, file, operation, errno.EIO)
        assert caught.value.offset_bytes == failing * PAGE_BYTES


@pytest.mark.parametrize("at_most", [PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES - 1])
def test_short_transfers_are_continued(
    file: BlockFile, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system moves less than asked for, at odd lengths; direct mode goes on from a page."""
    data = buffer_of(random_bytes(7 * PAGE_BYTES))
    offsets: list[int] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def short(fd: int, parts: list, offset: int, real=real) -> int:
            offsets.append(offset)
            whole = min(len(parts[0]), -(-at_most // PAGE_BYTES) * PAGE_BYTES)
            return min(at_most, real(fd, [parts[0][:whole]], offset))

        monkeypatch.setattr(blockfile.os, name, short)
    file.write_from(data, 0)
    back = reserve(data.size)
    file.read_into(back, 0)
    np.testing.assert_array_equal(back, data)
    assert len(offsets) > 4
    if file.direct:
        assert all(offset % PAGE_BYTES == 0 for offset in offsets)


def test_one_byte_at_a_time_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(tmp_path, direct=False)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            blockfile.os,
            name,
            lambda fd, parts, offset, real=real: real(fd, [parts[0][:1]], offset),
        )
    data = random_bytes(300)
    file.write_from(data, 5)
    back = np.zeros(300, np.uint8)
    file.read_into(back, 5)
    np.testing.assert_array_equal(back, data)
    file.close()


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES, PAGE_BYTES + 100])
def test_reading_past_the_end(file: BlockFile, size: int) -> None:
    Path(file.path).write_bytes(bytes(size))
    with pytest.raises(DeviceIOError, match="bytes short") as caught:
        file.read_into(reserve(3 * PAGE_BYTES), 0)
    assert f"{3 * PAGE_BYTES - size} bytes short" in str(caught.value)
    assert_names(caught.value, file, "read", 0)


@pytest.mark.parametrize(("direct", "count"), [(False, 0), (True, 0), (True, 100)])
def test_a_write_that_makes_no_progress(
    tmp_path: Path, direct: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(tmp_path, direct)
    monkeypatch.setattr(blockfile.os, "pwritev", lambda *_: count)
    with pytest.raises(DeviceIOError, match=f"{count} bytes written") as caught:
        file.write_from(reserve(PAGE_BYTES), PAGE_BYTES)
    assert_names(caught.value, file, "write", errno.ENOSPC)
    assert caught.value.offset_bytes == PAGE_BYTES
    file.close()


def test_a_file_larger_than_the_file_system(tmp_path: Path) -> None:
    """No fault injected: the system itself refuses."""
    file = open_file(tmp_path, direct=False)
    with pytest.raises(DeviceIOError) as caught:
        file.reserve(1 << 62)
    assert caught.value.operation == "reserve"
    assert caught.value.errno in {errno.ENOSPC, errno.EFBIG}
    file.close()


def test_a_device_that_is_full() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    file = BlockFile("/dev", "/dev/full", direct=False)
    with pytest.raises(DeviceIOError) as caught:
        file.write_from(np.zeros(10, np.uint8), 0)
    assert_names(caught.value, file, "write", errno.ENOSPC)
    file.close()


def test_using_a_closed_file_is_an_error_not_another_file(tmp_path: Path) -> None:
    file = open_file(tmp_path, direct=False)
    file.close()
    file.close()
    for call in (
        lambda: file.read_into(np.zeros(1, np.uint8), 0),
        lambda: file.write_from(np.zeros(1, np.uint8), 0),
    ):
        with pytest.raises(DeviceIOError) as caught:
            call()
        assert caught.value.errno == errno.EBADF


# --- whether O_DIRECT works ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tmp", "shm"])
def test_direct_io_is_tried_for_real_and_leaves_nothing_behind(where: str, tmp_path: Path) -> None:
    directory = tmp_path
    if where == "shm":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no tmpfs here")
        directory = Path("/dev/shm") / f"smart-infinity-test-{os.getpid()}"
        directory.mkdir()
    try:
        refusal = direct_io_refusal(str(directory))
        assert list(directory.iterdir()) == []
        # What it says is what a file then meets (tmpfs takes O_DIRECT since Linux 6.6).
        try:
            os.close(os.open(directory / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        except OSError as error:
            expected = f"{error.strerror} (errno {error.errno})"
        else:
            expected = None
        assert refusal == expected
    finally:
        (directory / "probe").unlink(missing_ok=True)
        if where == "shm":
            directory.rmdir()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_refusal_says_why_and_leaves_nothing_behind(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode)

    monkeypatch.setattr(blockfile.os, "open", refuse_direct)
    assert direct_io_refusal(str(tmp_path)) == f"{os.strerror(number)} (errno {number})"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_file_system_that_refuses_only_the_transfer(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockfile.os, name, fail_with(errno.EINVAL))
    assert direct_io_refusal(str(tmp_path)) == f"Invalid argument (errno {errno.EINVAL})"
    assert list(tmp_path.iterdir()) == []


def test_a_short_page_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockfile.os, "preadv", lambda *_: 512)
    assert "short" in (direct_io_refusal(str(tmp_path)) or "")
    assert list(tmp_path.iterdir()) == []


# --- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * MIB])
def test_buffers_are_zeroed_aligned_and_whole_pages(nbytes: int) -> None:
    buffer = reserve(nbytes)
    assert buffer.size == max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
    assert buffer.ctypes.data % PAGE_BYTES == 0
    assert buffer.flags.writeable
    assert not buffer.any()


def test_checksums_are_those_of_the_bytes() -> None:
    words = np.arange(1000, dtype=np.float32)
    assert checksum(words) == checksum(words.view(np.uint8))
    assert checksum(words) != checksum(words[::-1].copy())
    assert checksum(np.zeros(0, np.uint8)) == 0x2D06800538D394C2  # xxh3 of nothing


@pytest.mark.parametrize("huge_pages", [False, True])
def test_a_forked_child_does_not_see_the_buffers(huge_pages: bool) -> None:
    """Pages that direct I/O writes to must not be shared with a child: there they are gone."""
    out = processes.run(
        """
import faulthandler, os, signal
import numpy as np
from smart_infinity.storage.buffers import reserve
buffer, ordinary = reserve(1 << 21, huge_pages=bool(int(sys.argv[1]))), np.ones(1 << 20, np.uint8)
buffer[:] = 5
for name, memory in (("ordinary", ordinary), ("buffer", buffer)):
    child = os.fork()
    if child == 0:
        memory[100]
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        print(name, signal.Signals(os.WTERMSIG(status)).name)
    else:
        print(name, os.waitstatus_to_exitcode(status))
assert buffer[100] == 5
""",
        int(huge_pages),
    )
    assert out.split() == ["ordinary", "0", "buffer", "SIGSEGV"]
