"""The transfer handler and the local device, with real files: every record, once, to its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from smart_infinity.devices import check_specs
from smart_infinity.devices.base import NO_PENDING, Commit, StepPlan
from smart_infinity.devices.local import LocalDevice
from smart_infinity.errors import (
    CorruptStateError,
    DeviceBusyError,
    DeviceFullError,
    DeviceIOError,
    DeviceMemoryError,
    DeviceSpecError,
)
from smart_infinity.kernels import OPTIMIZERS
from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.frame import (
    T_ACTIVE,
    T_OWN,
    TABLE_COLUMNS,
    decode_reference,
    encode_reference,
)
from smart_infinity.layout import FORMAT_VERSION, Layout, ParameterSpec, Piece, Record, plan_layout
from smart_infinity.storage import blockfile
from smart_infinity.storage.blockfile import BlockFile, direct_io_refusal
from smart_infinity.storage.handler import Buffer, TransferHandler, buffer_nbytes
from smart_infinity.storage.ledger import LedgerRecord
from smart_infinity.storage.slots import Superblock

MOMENTS = ("exp_avg", "exp_avg_sq")

# --- the handler alone ---------------------------------------------------------------------------

HANDLER_LAYOUT = plan_layout(
    [ParameterSpec("w", (20_500,), "float32")], "adamw", MOMENTS, 1, record_elements=1000
)
RECORDS = HANDLER_LAYOUT.devices[0].records


class Handled:
    """A handler over two real files."""

    def __init__(self, directory: Path, num_workers: int) -> None:
        self.direct = direct_io_refusal(str(directory)) is None
        self.paths = [directory / "state.0", directory / "state.1"]
        self.files = tuple(
            BlockFile(str(directory), str(path), direct=self.direct) for path in self.paths
        )
        for file in self.files:
            file.reserve(HANDLER_LAYOUT.state_nbytes(0))
        self.handler = TransferHandler(HANDLER_LAYOUT, self.files, num_workers, 1000, "test")
        self.written: dict[int, tuple[int, int]] = {}

    def stored(self, place: int, record: Record) -> bytes:
        begin = record.index * HANDLER_LAYOUT.record_stride
        data = self.paths[place].read_bytes()
        return data[begin : begin + HANDLER_LAYOUT.record_nbytes(record.length)]

    def fill(self) -> None:
        """First state: every float of record i is i, in place 0."""

        def compute(record: Record, state: np.ndarray, buffer: Buffer) -> bool:
            state[:] = record.index
            return True

        self.handler.run(RECORDS, compute, None, self.written)


@pytest.fixture(params=[1, 2, 3])
def handled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Handled]:
    handled = Handled(tmp_path, request.param)
    yield handled
    handled.handler.close()
    for file in handled.files:
        file.close()


def add_one(record: Record, state: np.ndarray, buffer: Buffer) -> bool:
    state += 1
    return True


def test_a_first_pass_writes_place_zero_and_clears_the_padding(handled: Handled) -> None:
    handled.fill()
    assert sorted(handled.written) == [record.index for record in RECORDS]
    for record in RECORDS:
        place, checksum = handled.written[record.index]
        stored = handled.stored(place, record)
        assert place == 0
        assert checksum == xxhash.xxh3_64_intdigest(stored)
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
            assert checksum == xxhash.xxh3_64_intdigest(stored)
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

    def look(record: Record, state: np.ndarray, buffer: Buffer) -> bool:
        assert (state == record.index).all()
        seen.append(record.index)
        state[:] = -1
        return False

    written: dict[int, tuple[int, int]] = {}
    handled.handler.run(RECORDS, look, np.zeros(len(RECORDS), np.uint8), written)
    assert sorted(seen) == [record.index for record in RECORDS]
    assert written == {}
    assert [path.read_bytes() for path in handled.paths] == before


def test_check_gets_the_checksum_of_what_was_read(handled: Handled) -> None:
    handled.fill()
    found: dict[int, int] = {}
    places = np.zeros(len(RECORDS), np.uint8)
    handled.handler.run(
        RECORDS,
        lambda *_: False,
        places,
        {},
        check=lambda record, checksum: found.__setitem__(record.index, checksum),
    )
    assert found == {index: checksum for index, (_, checksum) in handled.written.items()}


def test_buffers_are_fixed_in_number_and_never_shared(handled: Handled) -> None:
    handled.fill()
    lock = threading.Lock()
    in_use: set[int] = set()
    seen: set[int] = set()

    def compute(record: Record, state: np.ndarray, buffer: Buffer) -> bool:
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
        return True

    places = np.zeros(len(RECORDS), np.uint8)
    for _ in range(5):
        written: dict[int, tuple[int, int]] = {}
        handled.handler.run(RECORDS, compute, places, written)
        for index, (place, _) in written.items():
            places[index] = place
    assert len(seen) <= handled.handler._pool._max_workers


def test_all_workers_work_at_once(tmp_path: Path) -> None:
    """Each of three records waits in compute for the other two."""
    handled = Handled(tmp_path, 3)
    handled.fill()
    together = threading.Barrier(3, timeout=60)

    def compute(record: Record, state: np.ndarray, buffer: Buffer) -> bool:
        together.wait()
        return False

    handled.handler.run(RECORDS[:3], compute, np.zeros(len(RECORDS), np.uint8), {})
    handled.handler.close()


@pytest.mark.parametrize("kind", [ValueError, DeviceIOError, KeyboardInterrupt])
def test_an_exception_stops_the_others_and_is_raised(
    handled: Handled, kind: type[BaseException]
) -> None:
    handled.fill()
    error = DeviceIOError("d", "p", "read", 0, 5) if kind is DeviceIOError else kind("here")
    computed: list[int] = []

    def compute(record: Record, state: np.ndarray, buffer: Buffer) -> bool:
        if record.index == 4:
            raise error
        computed.append(record.index)
        return False

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
    assert buffer_nbytes(HANDLER_LAYOUT, 1000) == HANDLER_LAYOUT.record_nbytes(1000) + 4000
    buffer = Buffer(HANDLER_LAYOUT, 1000)
    assert buffer.bytes.size == HANDLER_LAYOUT.record_nbytes(1000)
    assert np.shares_memory(buffer.words16, buffer.words32)


# --- a set of local devices ----------------------------------------------------------------------

SPECS = [
    ParameterSpec("embed.w", (301, 257), "bfloat16"),
    ParameterSpec("h.0.w", (40_000,), "float32"),
    ParameterSpec("h.0.scale", (), "float32"),
    ParameterSpec("h.0.empty", (0, 3), "bfloat16"),
    ParameterSpec("h.1.w", (123, 1000), "float16"),
    ParameterSpec("norm.w", (7,), "bfloat16"),
]
GROUP = {
    "lr": 0.01,
    "betas": (0.9, 0.99),
    "eps": 1e-5,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
}


class NumpyHost:
    """The host's end of the link: the parameters' words, without torch."""

    def __init__(self, words: list[np.ndarray]) -> None:
        self.words = words
        self.edited: set[int] = set()
        self.delivered: list[tuple[int, int, int]] = []

    def fetch_weights(self, record: Record, index: int, piece: Piece) -> np.ndarray:
        assert record.pieces[index] is piece
        return self.words[piece.parameter][piece.start : piece.start + piece.length]

    def edited_weights(self, record: Record, index: int, piece: Piece) -> np.ndarray | None:
        return self.fetch_weights(record, index, piece) if piece.parameter in self.edited else None

    def deliver_weights(self, record: Record, index: int, piece: Piece, words: np.ndarray) -> None:
        assert record.pieces[index] is piece
        self.words[piece.parameter][piece.start : piece.start + piece.length] = words
        self.delivered.append((piece.parameter, piece.start, piece.length))


def restore(device: LocalDevice, record: LedgerRecord, host: NumpyHost) -> bytes:
    blob = device.settle(record)
    device.restore(host)
    return blob


class LocalSet:
    """A set of local devices, driven as the engine drives them."""

    def __init__(self, root: Path, num_devices: int, record_elements: int = 5000) -> None:
        self.layout = plan_layout(SPECS, "adamw", MOMENTS, num_devices, record_elements)
        rng = np.random.default_rng(1)
        self.forms = [FORMAT_OF_DTYPE[spec.dtype] for spec in SPECS]
        self.host = NumpyHost(
            [
                encode_reference(form, rng.standard_normal(spec.numel).astype(np.float32))
                for spec, form in zip(SPECS, self.forms, strict=True)
            ]
        )
        self.paths = [root / f"device{i}" for i in range(num_devices)]
        for path in self.paths:
            path.mkdir(parents=True, exist_ok=True)
        self.step = 0
        self.counts = np.zeros(len(SPECS), np.int64)
        self.devices = self.open()
        for index, device in enumerate(self.devices):
            device.attach(None)
            device.create()
            device.initialize(self.host, self.forms, [[0.0, 0.0]] * len(SPECS), self.commit_of())
            device.seal(
                Superblock(FORMAT_VERSION, "set", index, num_devices, self.layout.hash(), "adamw")
            )

    def open(self) -> list[LocalDevice]:
        return [
            LocalDevice(str(path), self.layout, index, 2) for index, path in enumerate(self.paths)
        ]

    def commit_of(self) -> Commit:
        return Commit(self.step, b"attempt-attempt-", self.counts, f"step {self.step}".encode())

    def update(
        self, active: list[int], edited: list[frozenset[int]] | None = None, commit: bool = True
    ) -> None:
        rng = np.random.default_rng(100 + self.step)
        table = np.zeros((len(SPECS), TABLE_COLUMNS), np.float32)
        for index, (spec, form) in enumerate(zip(SPECS, self.forms, strict=True)):
            values = rng.standard_normal(spec.numel).astype(np.float32)
            if index not in active:
                continue
            words = encode_reference(form, values)
            for device, number in self.layout.runs_of[index]:
                run = self.layout.devices[device].runs[number]
                own = words[run.start : run.start + run.length]
                self.devices[device].gradients.land(number, form, own)
            self.counts[index] += 1
            row = OPTIMIZERS["adamw"].row(GROUP, int(self.counts[index]))
            table[index, :T_OWN] = 1, 1, -np.inf, np.inf
            table[index, T_OWN : T_OWN + len(row)] = row
        assert table[:, T_ACTIVE].sum() == len(active)
        self.host.delivered.clear()
        self.step += 1
        for index, device in enumerate(self.devices):
            device.update(StepPlan(table, edited[index] if edited else frozenset()), self.host)
            if commit:
                device.commit(self.commit_of())

    def state(self) -> list[np.ndarray]:
        """By parameter: master and moments, whole."""
        return [
            np.concatenate(
                [np.stack(self.devices[device].read_state(run)) for device, run in runs], axis=1
            )
            if runs
            else np.zeros((3, 0), np.float32)
            for runs in self.layout.runs_of
        ]

    def close(self) -> None:
        for device in self.devices:
            device.close()


@pytest.fixture
def make_set(tmp_path: Path) -> Iterator[object]:
    made: list[LocalSet] = []

    def make(num_devices: int, **options: int) -> LocalSet:
        made.append(LocalSet(tmp_path / f"set{len(made)}", num_devices, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


ALL = list(range(len(SPECS)))


def assert_same_sets(one: LocalSet, other: LocalSet) -> None:
    for spec, ours, theirs in zip(SPECS, one.state(), other.state(), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32), spec.name)
    for spec, ours, theirs in zip(SPECS, one.host.words, other.host.words, strict=True):
        np.testing.assert_array_equal(ours, theirs, spec.name)


def test_the_first_state_is_the_weights_and_zero_moments(make_set) -> None:
    own = make_set(3)
    for spec, form, words, state in zip(SPECS, own.forms, own.host.words, own.state(), strict=True):
        masters = decode_reference(form, words, words, spec.numel)
        np.testing.assert_array_equal(state[0], masters)
        assert not state[1:].any()


def test_the_words_on_the_host_are_the_casts_of_the_masters(make_set) -> None:
    own = make_set(2)
    for _ in range(3):
        own.update(ALL)
        covered = [0] * len(SPECS)
        for parameter, _, length in own.host.delivered:
            covered[parameter] += length
        assert covered == [spec.numel for spec in SPECS], "each element came back once"
        for form, words, state in zip(own.forms, own.host.words, own.state(), strict=True):
            np.testing.assert_array_equal(words, encode_reference(form, state[0]))


@pytest.mark.parametrize(
    ("num_devices", "record_elements"), [(2, 5000), (3, 5000), (7, 5000), (16, 5000), (1, 777)]
)
def test_the_number_of_devices_and_the_cut_into_records_change_no_bit(
    make_set, num_devices: int, record_elements: int
) -> None:
    one = make_set(1, record_elements=1 << 20)
    many = make_set(num_devices, record_elements=record_elements)
    for active in (ALL, [0, 4], ALL, [5]):
        one.update(active)
        many.update(active)
    assert_same_sets(one, many)


def test_records_without_an_active_parameter_stay_in_their_place(make_set) -> None:
    own = make_set(2)
    own.update(ALL)
    own.update([1])
    before = own.state()
    places = [device.recorded_steps()[0].places for device in own.devices]
    own.update([1])
    after = own.state()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(old, new) == (index != 1), SPECS[index].name
    for device, plan, old in zip(own.devices, own.layout.devices, places, strict=True):
        record = device.recorded_steps()[0]
        for own_record in plan.records:
            touched = any(piece.parameter == 1 for piece in own_record.pieces)
            moved = record.places[own_record.index] != old[own_record.index]
            assert moved == touched
        nbytes = sum(
            own.layout.record_nbytes(r.length)
            for r in plan.records
            if any(piece.parameter == 1 for piece in r.pieces)
        )
        timings = device.last_timings
        assert timings.bytes_read == timings.bytes_written == nbytes


def test_the_ledger_speaks_of_the_files(make_set) -> None:
    own = make_set(2)
    for active in (ALL, [0], [4, 5]):
        own.update(active)
        for path, plan, device in zip(own.paths, own.layout.devices, own.devices, strict=True):
            newest = device.recorded_steps()[0]
            assert newest.step == own.step
            np.testing.assert_array_equal(newest.counts, own.counts)
            states = [(path / f"state.{place}").read_bytes() for place in (0, 1)]
            for record in plan.records:
                begin = record.index * own.layout.record_stride
                end = begin + own.layout.record_nbytes(record.length)
                stored = states[newest.places[record.index]][begin:end]
                assert newest.checksums[record.index] == xxhash.xxh3_64_intdigest(stored)
            blob = (path / f"blob.{newest.blob_place}").read_bytes()[: newest.blob_nbytes]
            assert blob == f"step {own.step}".encode()
            assert newest.blob_checksum == xxhash.xxh3_64_intdigest(blob)


def test_an_edit_reaches_the_masters_and_costs_no_other(make_set) -> None:
    own = make_set(2)
    own.update(ALL)
    before = own.state()
    edited_element = 12_345
    own.host.words[0][edited_element] ^= 0x0100
    expected = before[0][0].copy()
    words = own.host.words[0]
    expected[edited_element] = decode_reference(own.forms[0], words, words, words.size)[
        edited_element
    ]
    # Parameter 0 is reported as edited; nothing is active.
    own.host.edited.add(0)
    edited = [
        frozenset(r.index for r in plan.records if any(p.parameter == 0 for p in r.pieces))
        for plan in own.layout.devices
    ]
    own.update([], edited)
    after = own.state()
    np.testing.assert_array_equal(after[0][0], expected)
    for old, new in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(before[0][1:], after[0][1:])


def reopen(own: LocalSet) -> None:
    own.close()
    own.devices = own.open()
    for device in own.devices:
        assert device.identify() is not None
        device.attach(None)


def test_a_reopened_set_continues_bit_for_bit(make_set) -> None:
    straight, broken = make_set(3), make_set(3)
    for step in range(4):
        straight.update(ALL)
        broken.update(ALL)
        if step == 1:
            broken.host.words = [np.zeros_like(words) for words in broken.host.words]
            reopen(broken)
            for device in broken.devices:
                newest = device.recorded_steps()[0]
                assert restore(device, newest, broken.host) == b"step 2"
                assert [record.step for record in device.recorded_steps()] == [2]
    assert_same_sets(straight, broken)


def test_an_uncommitted_step_leaves_the_last_one_whole(make_set) -> None:
    straight, broken = make_set(2), make_set(2)
    for own in (straight, broken):
        own.update(ALL)
        own.update(ALL)
    expected = straight.state()
    broken.update(ALL, commit=False)  # every byte of the step is written, the ledger is not
    reopen(broken)
    for device in broken.devices:
        newest = device.recorded_steps()[0]
        assert newest.step == 2
        restore(device, newest, broken.host)
    for ours, theirs in zip(broken.state(), expected, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    for ours, theirs in zip(broken.host.words, straight.host.words, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("what", ["state", "blob"])
def test_a_flipped_bit_is_found_on_restoring(make_set, what: str) -> None:
    own = make_set(2)
    own.update(ALL)
    newest = own.devices[1].recorded_steps()[0]
    own.close()
    place = newest.blob_place if what == "blob" else newest.places[1]
    path = own.paths[1] / f"{what}.{place}"
    offset = 2 if what == "blob" else own.layout.record_stride + 1234
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))
    reopen(own)
    restore(own.devices[0], own.devices[0].recorded_steps()[0], own.host)
    with pytest.raises(CorruptStateError, match=rf"{what}\.{place}") as caught:
        restore(own.devices[1], newest, own.host)
    assert str(own.paths[1]) in str(caught.value)


@pytest.mark.parametrize("left", [0, 100, 4096 * 7])
def test_a_truncated_state_file_is_an_error_not_a_hang(make_set, left: int) -> None:
    own = make_set(1)
    own.update(ALL)
    newest = own.devices[0].recorded_steps()[0]
    own.close()
    for place in (0, 1):
        os.truncate(own.paths[0] / f"state.{place}", left)
    reopen(own)
    with pytest.raises(DeviceIOError, match="bytes short"):
        restore(own.devices[0], newest, own.host)


def test_read_state_of_a_run_that_spans_records(make_set) -> None:
    own = make_set(1, record_elements=1000)
    own.update(ALL)
    run = own.layout.devices[0].runs[0]
    assert run.length > 50_000
    master, *moments = own.devices[0].read_state(0)
    assert master.size == run.length
    np.testing.assert_array_equal(own.host.words[0], encode_reference(own.forms[0], master))
    assert len(moments) == 2
    np.testing.assert_array_equal(own.devices[0].gradients.read(0, NO_PENDING).size, run.length)


# --- what a local device refuses -----------------------------------------------------------------


def small_layout() -> Layout:
    return plan_layout([ParameterSpec("w", (70_000,), "float32")], "adamw", MOMENTS, 1)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    device = LocalDevice(str(tmp_path), small_layout(), 0, 1)
    with pytest.raises(DeviceBusyError, match=str(tmp_path)):
        LocalDevice(str(tmp_path), small_layout(), 0, 1)
    device.close()
    LocalDevice(str(tmp_path), small_layout(), 0, 1).close()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, seen in (("file", "is not a directory"), ("absent", "does not exist")):
        with pytest.raises(DeviceSpecError, match=seen):
            LocalDevice(str(tmp_path / name), small_layout(), 0, 1)


@pytest.mark.parametrize("short", ["statvfs", "fallocate"])
def test_a_full_disk_is_refused_and_nothing_remains(
    tmp_path: Path, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    device = LocalDevice(str(tmp_path), small_layout(), 0, 1)
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
    device = LocalDevice(str(tmp_path), small_layout(), 0, 3)
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
