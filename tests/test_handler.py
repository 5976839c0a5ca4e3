"""The transfer handler, with real files: every record, once, to its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from smart_infinity.errors import DeviceIOError
from smart_infinity.layout import ParameterSpec, Record, plan_layout
from smart_infinity.storage import blockfile
from smart_infinity.storage.blockfile import BlockFile, direct_io_refusal, observing
from smart_infinity.storage.handler import TransferHandler
from smart_infinity.storage.tasklets import Buffer, Words, buffer_nbytes

HANDLER_LAYOUT = plan_layout(
    [ParameterSpec("w", (20_500,), "float32")], "adamw", ("exp_avg", "exp_avg_sq"), 1, 1000
)
RECORDS = HANDLER_LAYOUT.devices[0].records


class Handled:
    """A handler over two real files."""

    def __init__(
        self,
        directory: Path,
        num_workers: int,
        computing: threading.Semaphore | None = None,
        num_cached: int = 0,
    ) -> None:
        self.num_workers = num_workers
        self.direct = direct_io_refusal(str(directory)) is None
        self.paths = [directory / "state.0", directory / "state.1"]
        self.files = tuple(
            BlockFile(str(directory), str(path), direct=self.direct) for path in self.paths
        )
        for file in self.files:
            file.reserve(HANDLER_LAYOUT.state_nbytes(0))
        self.handler = TransferHandler(
            HANDLER_LAYOUT,
            self.files,
            num_workers,
            num_workers,
            num_cached,
            1000,
            computing or threading.Semaphore(1),
            "test",
        )
        self.written: dict[int, tuple[int, int]] = {}

    def stored(self, place: int, record: Record) -> bytes:
        begin = record.index * HANDLER_LAYOUT.record_stride
        data = self.paths[place].read_bytes()
        return data[begin : begin + HANDLER_LAYOUT.record_nbytes(record.length)]

    def fill(self) -> None:
        """First state: every float of record i is i, in place 0."""

        def compute(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
            state[:] = record.index
            return checksum_in(buffer, record)

        self.handler.run(RECORDS, compute, None, self.written)


@pytest.fixture(params=[1, 2, 3])
def handled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Handled]:
    handled = Handled(tmp_path, request.param)
    yield handled
    handled.handler.close()
    for file in handled.files:
        file.close()


def checksum_of(stored: bytes, record: Record) -> int:
    """By its definition: xxh3 of the tensors' xxh3 and of the padding."""
    size = 4 * record.length
    tensors = [stored[begin : begin + size] for begin in (0, size, 2 * size)]
    parts = b"".join(xxhash.xxh3_64_digest(own) for own in tensors)
    return xxhash.xxh3_64_intdigest(parts + stored[3 * size :])


def checksum_in(buffer: Buffer, record: Record) -> int:
    return checksum_of(
        buffer.bytes[: HANDLER_LAYOUT.record_nbytes(record.length)].tobytes(), record
    )


def add_one(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
    state += 1
    return checksum_in(buffer, record)


def test_a_first_pass_writes_place_zero_and_clears_the_padding(handled: Handled) -> None:
    handled.fill()
    assert sorted(handled.written) == [record.index for record in RECORDS]
    for record in RECORDS:
        place, checksum = handled.written[record.index]
        stored = handled.stored(place, record)
        assert place == 0
        assert checksum == checksum_of(stored, record)
        values = np.frombuffer(stored, np.float32)
        assert (values[: 3 * record.length] == record.index).all()
        assert not values[3 * record.length :].any()
    assert not handled.paths[1].read_bytes().strip(b"\0")


def test_each_record_is_read_from_its_place_and_written_to_the_other(handled: Handled) -> None:
    handled.fill()
    places = np.zeros(len(RECORDS), np.uint8)
    expected = {record.index: float(record.index) for record in RECORDS}
    subsets = [RECORDS, RECORDS[::2], RECORDS[3:9], (), RECORDS[-1:], RECORDS[::-1]]
    for subset in subsets:
        before = [path.read_bytes() for path in handled.paths]
        written: dict[int, tuple[int, int]] = {}
        timings = handled.handler.run(subset, add_one, places, written)
        assert sorted(written) == sorted(record.index for record in subset)
        nbytes = sum(HANDLER_LAYOUT.record_nbytes(record.length) for record in subset)
        assert timings.bytes_read == timings.bytes_written == nbytes
        for record in subset:
            place, checksum = written[record.index]
            assert place == 1 - places[record.index]
            stored = handled.stored(place, record)
            assert checksum == checksum_of(stored, record)
            expected[record.index] += 1
            values = np.frombuffer(stored, np.float32)[: 3 * record.length]
            assert (values == expected[record.index]).all()
            places[record.index] = place
        # All bytes but those are as they were: the old places, and every record left out.
        for place, path in enumerate(handled.paths):
            restored = bytearray(path.read_bytes())
            for record in subset:
                if places[record.index] == place:
                    begin = record.index * HANDLER_LAYOUT.record_stride
                    end = begin + HANDLER_LAYOUT.record_nbytes(record.length)
                    restored[begin:end] = before[place][begin:end]
            assert bytes(restored) == before[place]


def test_a_record_that_did_not_change_is_not_written(handled: Handled) -> None:
    handled.fill()
    before = [path.read_bytes() for path in handled.paths]
    seen: list[int] = []

    def look(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
        assert (state == record.index).all()
        seen.append(record.index)
        state[:] = -1
        return None

    written: dict[int, tuple[int, int]] = {}
    handled.handler.run(RECORDS, look, np.zeros(len(RECORDS), np.uint8), written)
    assert sorted(seen) == [record.index for record in RECORDS]
    assert written == {}
    assert [path.read_bytes() for path in handled.paths] == before


def test_buffers_are_fixed_in_number_and_never_shared(handled: Handled) -> None:
    handled.fill()
    lock = threading.Lock()
    in_use: set[int] = set()
    seen: set[int] = set()

    def compute(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
        address = state.ctypes.data
        with lock:
            assert address not in in_use
            in_use.add(address)
            seen.add(address)
        state += 1
        buffer.words32[:] = record.index
        assert (buffer.words32 == record.index).all()
        with lock:
            in_use.remove(address)
        return checksum_in(buffer, record)

    places = np.zeros(len(RECORDS), np.uint8)
    for _ in range(5):
        written: dict[int, tuple[int, int]] = {}
        handled.handler.run(RECORDS, compute, places, written)
        for index, (place, _) in written.items():
            places[index] = place
    assert len(seen) <= handled.num_workers


class Crowd:
    """Counts who is inside; each who comes waits until ``size`` have been there together."""

    def __init__(self, size: int) -> None:
        self.most, self._inside, self._lock = 0, 0, threading.Lock()
        self._together = threading.Barrier(size, timeout=60)

    def visit(self) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        self._together.wait()
        with self._lock:
            self._inside -= 1


@pytest.mark.parametrize("limit", [1, 2])
def test_as_many_compute_at_once_as_may_over_all_devices(tmp_path: Path, limit: int) -> None:
    computing, crowd = threading.Semaphore(limit), Crowd(limit)
    devices = []
    for name in "ab":
        (tmp_path / name).mkdir()
        devices.append(Handled(tmp_path / name, 3, computing))
        devices[-1].fill()

    def compute(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
        crowd.visit()
        return None

    places = np.zeros(len(RECORDS), np.uint8)
    runs = [
        threading.Thread(target=device.handler.run, args=(RECORDS[:6], compute, places, {}))
        for device in devices
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    for device in devices:
        device.handler.close()
    assert crowd.most == limit


@pytest.mark.parametrize(("workers", "limit"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_more_than_half_of_the_workers_transfer_at_once(
    tmp_path: Path, workers: int, limit: int
) -> None:
    handled = Handled(tmp_path, workers)
    handled.fill()
    crowd = Crowd(limit)
    places = np.zeros(len(RECORDS), np.uint8)
    with observing(lambda path, offset, data: crowd.visit()):
        handled.handler.run(RECORDS[: 3 * limit], add_one, places, {})
    handled.handler.close()
    assert crowd.most == limit


@pytest.mark.parametrize("kind", [ValueError, DeviceIOError, KeyboardInterrupt])
def test_an_exception_stops_the_others_and_is_raised(
    handled: Handled, kind: type[BaseException]
) -> None:
    handled.fill()
    error = DeviceIOError("d", "p", "read", 0, 5) if kind is DeviceIOError else kind("here")
    computed: list[int] = []

    def compute(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
        if record.index == 4:
            raise error
        computed.append(record.index)
        return None

    places = np.zeros(len(RECORDS), np.uint8)
    endless = [*RECORDS[:5], *RECORDS[:3] * 20_000]  # that is, if nobody says stop
    with pytest.raises(kind) as caught:
        handled.handler.run(endless, compute, places, {})
    assert caught.value is error
    assert len(computed) < len(endless) // 2
    # The handler itself is whole.
    written: dict[int, tuple[int, int]] = {}
    handled.handler.run(RECORDS, add_one, places, written)
    assert len(written) == len(RECORDS)


def test_in_place_every_record_is_written_where_it_was_read(tmp_path: Path) -> None:
    own = Handled(tmp_path, 2)
    own.fill()
    inside = TransferHandler(
        HANDLER_LAYOUT, own.files[:1], 2, 2, 0, 1000, threading.Semaphore(1), "test", in_place=True
    )
    places = np.zeros(len(RECORDS), np.uint8)
    for done in (1, 2):
        written: dict[int, tuple[int, int]] = {}
        inside.run(RECORDS[1:], add_one, places, written)
        assert sorted(written) == [record.index for record in RECORDS[1:]]
        for record in RECORDS:
            values = np.frombuffer(own.stored(0, record), np.float32)[: 3 * record.length]
            assert (values == record.index + (done if record.index else 0)).all()
            if record.index:
                checksum = checksum_of(own.stored(0, record), record)
                assert written[record.index] == (0, checksum)
    assert not own.paths[1].read_bytes().strip(b"\0")
    inside.close()
    own.handler.close()


@pytest.mark.parametrize(("name", "operation"), [("preadv", "read"), ("pwritev", "write")])
def test_the_nth_transfer_fails_for_every_n(
    handled: Handled, name: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled.fill()
    places = np.zeros(len(RECORDS), np.uint8)
    real = getattr(os, name)
    for failing in range(len(RECORDS)):
        begin = failing * HANDLER_LAYOUT.record_stride

        def fail(fd: int, parts: list, offset: int, begin: int = begin) -> int:
            if offset == begin:
                raise OSError(5, "Input/output error")
            return real(fd, parts, offset)

        before = handled.paths[0].read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(blockfile.os, name, fail)
            with pytest.raises(DeviceIOError) as caught:
                handled.handler.run(RECORDS, add_one, places, {})
        assert (caught.value.operation, caught.value.offset_bytes) == (operation, begin)
        assert handled.paths[0].read_bytes() == before, "the current state is never overwritten"


def test_a_buffer_holds_one_record_and_its_words() -> None:
    assert buffer_nbytes(HANDLER_LAYOUT, 1000) == HANDLER_LAYOUT.record_nbytes(1000) + 6000
    buffer = Buffer(HANDLER_LAYOUT, 1000)
    buffer.words = Words(1000)
    assert buffer.bytes.size == HANDLER_LAYOUT.record_nbytes(1000)
    assert not np.shares_memory(buffer.words16, buffer.words32)


# --- walks that begin before all is known -------------------------------------------------------


class Reads:
    """Counts what was read, and wakes who waits for a number of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._change, self.offsets = threading.Condition(), []
        real = os.preadv

        def read(fd: int, parts: list, offset: int) -> int:
            result = real(fd, parts, offset)
            with self._change:
                self.offsets.append(offset)
                self._change.notify_all()
            return result

        patch.setattr(blockfile.os, "preadv", read)

    def wait_for(self, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: len(self.offsets) >= count, timeout=60)

    @property
    def records(self) -> list[int]:
        return [offset // HANDLER_LAYOUT.record_stride for offset in self.offsets]


def test_records_are_read_ahead_into_free_buffers_and_no_further(
    handled: Handled, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled.fill()
    reads, written = Reads(monkeypatch), {}
    places = np.zeros(len(RECORDS), np.uint8)
    handler, last = handled.handler, RECORDS[-1].index
    walk = handler.begin(RECORDS, add_one, places, written, is_ready=False, may_write=False)
    reads.wait_for(handled.num_workers)
    assert sorted(reads.records) == list(range(handled.num_workers))
    # The last record is ready first: one that was read too early gives its buffer up.
    handler.set_ready(walk, [last])
    reads.wait_for(handled.num_workers + 1)
    assert reads.records[-1] == last
    assert written == {}
    handler.allow_writes(walk)
    handler.set_ready(walk, [record.index for record in RECORDS])
    handler.wait(walk)
    assert sorted(written) == [record.index for record in RECORDS]
    for record in RECORDS:
        values = np.frombuffer(handled.stored(1, record), np.float32)[: 3 * record.length]
        assert (values == record.index + 1).all()


def test_nothing_is_written_before_it_may_be(
    handled: Handled, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled.fill()
    before = handled.paths[1].read_bytes()
    places, written = np.zeros(len(RECORDS), np.uint8), {}
    handler = handled.handler
    walk = handler.begin(RECORDS, add_one, places, written, is_ready=True, may_write=False)
    other = handler.pause(walk)
    assert len(other) <= handled.num_workers
    assert handled.paths[1].read_bytes() == before
    handler.stop(walk)
    assert (written, handled.paths[1].read_bytes()) == ({}, before)
    handler.run(RECORDS, add_one, places, written)  # all buffers are free again
    assert sorted(written) == [record.index for record in RECORDS]


@pytest.mark.parametrize("kept", [[], [0, 1], [5]])
@pytest.mark.parametrize("wanted", [range(21), range(0, 21, 2), range(3)])
def test_a_walk_that_is_planned_anew_does_what_is_not_kept_again(
    handled: Handled, kept: list[int], wanted: range
) -> None:
    handled.fill()
    places, written = np.zeros(len(RECORDS), np.uint8), {}
    handler, computed = handled.handler, threading.Semaphore(0)

    def first(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
        computed.release()
        return add_one(record, state, buffer)

    def second(record: Record, state: np.ndarray, buffer: Buffer) -> int | None:
        state += 100
        return checksum_in(buffer, record)

    walk = handler.begin(RECORDS, first, places, written, is_ready=False, may_write=True)
    handler.set_ready(walk, range(10))
    for _ in range(10):
        assert computed.acquire(timeout=60)
    assert handler.pause(walk) == set(range(10))
    records = [RECORDS[index] for index in wanted]
    stays = set(kept) & set(wanted)
    handler.plan_anew(walk, records, stays, second)
    handler.wait(walk)
    assert sorted(written) == list(wanted)
    for record in records:
        values = np.frombuffer(handled.stored(1, record), np.float32)[: 3 * record.length]
        assert (values == record.index + (1 if record.index in stays else 100)).all()
    for record in RECORDS:
        values = np.frombuffer(handled.stored(0, record), np.float32)[: 3 * record.length]
        assert (values == record.index).all(), "the current state is never overwritten"
