"""Local devices with real files: the whole state, its commits, and coming back to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from local_sets import ALL, SPECS, LocalSet, restore
from smart_infinity.devices.base import NO_PENDING
from smart_infinity.errors import CorruptStateError, DeviceIOError
from smart_infinity.kernels.frame import decode_reference, encode_reference
from smart_infinity.storage.checksums import state_checksum
from smart_infinity.storage.ledger import newest_common


@pytest.fixture
def make_set(tmp_path: Path) -> Iterator[object]:
    made: list[LocalSet] = []

    def make(num_devices: int, **options: object) -> LocalSet:
        made.append(LocalSet(tmp_path / f"set{len(made)}", num_devices, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
    places = [device.recorded_steps().records[0].places for device in own.devices]
    own.update([1])
    after = own.state()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(old, new) == (index != 1), SPECS[index].name
    for device, plan, old in zip(own.devices, own.layout.devices, places, strict=True):
        record = device.recorded_steps().records[0]
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
            newest = device.recorded_steps().records[0]
            assert newest.step == own.step
            np.testing.assert_array_equal(newest.counts, own.counts)
            states = [(path / f"state.{place}").read_bytes() for place in (0, 1)]
            for record in plan.records:
                begin = record.index * own.layout.record_stride
                end = begin + own.layout.record_nbytes(record.length)
                stored = states[newest.places[record.index]][begin:end]
                data = np.frombuffer(stored, np.uint8)
                assert newest.checksums[record.index] == state_checksum(data, record.length, 3)
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
                newest = device.recorded_steps().records[0]
                assert restore(device, newest, broken.host) == b"step 2"
                assert [record.step for record in device.recorded_steps().records] == [2]
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
        newest = device.recorded_steps().records[0]
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
    newest = own.devices[1].recorded_steps().records[0]
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
    restore(own.devices[0], own.devices[0].recorded_steps().records[0], own.host)
    with pytest.raises(CorruptStateError, match=rf"{what}\.{place}") as caught:
        restore(own.devices[1], newest, own.host)
    assert str(own.paths[1]) in str(caught.value)


@pytest.mark.parametrize("left", [0, 100, 4096 * 7])
@pytest.mark.parametrize("cut", [(0, 1), (0,), (1,)])
def test_a_truncated_state_file_is_refused_by_name(make_set, left: int, cut: tuple) -> None:
    own = make_set(1)
    own.update(ALL)
    newest = own.devices[0].recorded_steps().records[0]
    ledger = (own.paths[0] / "ledger").read_bytes()
    own.close()
    for place in cut:
        os.truncate(own.paths[0] / f"state.{place}", left)
    reopen(own)
    with pytest.raises(CorruptStateError, match=rf"state\.{cut[0]} is cut off.* {left} bytes"):
        restore(own.devices[0], newest, own.host)
    assert (own.paths[0] / "ledger").read_bytes() == ledger, "nothing was written"


def test_a_state_file_cut_while_it_is_open_is_an_error_not_a_hang(make_set) -> None:
    own = make_set(1)
    own.update(ALL)
    for place in (0, 1):
        os.truncate(own.paths[0] / f"state.{place}", 100)
    with pytest.raises(DeviceIOError, match="bytes short"):
        own.devices[0].restore(own.host)


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


# --- in place, checked reads, amendments, snapshots ----------------------------------------------


def test_in_place_takes_half_the_space_and_gives_the_same_bits(make_set) -> None:
    beside, inside = make_set(3), make_set(3, in_place=True)
    for active in (ALL, [0, 4], ALL):
        beside.update(active)
        inside.update(active)
        assert_same_sets(beside, inside)
    for path in inside.paths:
        assert (path / "state.0").exists()
        assert not (path / "state.1").exists()
    reopen(inside)
    for device in inside.devices:
        newest = device.recorded_steps().records[0]
        assert not newest.places.any()
        assert restore(device, newest, inside.host) == b"step 3"
    beside.update(ALL)
    inside.update(ALL)
    assert_same_sets(beside, inside)


def test_durability_may_change_from_run_to_run(make_set) -> None:
    straight, own = make_set(2), make_set(2, in_place=True)
    for number, in_place in enumerate([True, False, False, True, True, False]):
        own.options = {"in_place": in_place}
        reopen(own)
        for device in own.devices:
            restore(device, newest_common([device.recorded_steps()])[0], own.host)
        own.update(ALL if number % 2 else [0, 1])
        straight.update(ALL if number % 2 else [0, 1])
        assert_same_sets(straight, own)


def test_a_step_in_place_is_marked_until_it_is_committed(make_set) -> None:
    own = make_set(2, in_place=True)
    own.update(ALL)
    assert all(not device.recorded_steps().records[0].dirty for device in own.devices)
    own.update(ALL, commit=False)
    for device in own.devices:
        newest, before = device.recorded_steps().records
        assert (newest.step, newest.dirty, before.step, before.dirty) == (2, True, 1, False)
        with pytest.raises(CorruptStateError, match="middle of step 2"):
            newest_common([device.recorded_steps()])


@pytest.mark.parametrize("check_reads", [False, True])
def test_checked_reads_find_a_flipped_bit_in_the_next_step(make_set, check_reads: bool) -> None:
    own = make_set(1, check_reads=check_reads)
    own.update(ALL)
    newest = own.devices[0].recorded_steps().records[0]
    path = own.paths[0] / f"state.{newest.places[1]}"
    with open(path, "r+b") as file:
        file.seek(own.layout.record_stride + 1234)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    if check_reads:
        with pytest.raises(
            CorruptStateError, match=rf"state record 1 in state\.{newest.places[1]}"
        ):
            own.update(ALL)
        with pytest.raises(CorruptStateError, match="state record 1"):
            own.devices[0].read_state(0)
    else:
        own.update(ALL)


def test_an_amendment_is_what_a_restore_gives(make_set) -> None:
    own = make_set(2)
    own.update(ALL)
    for device in own.devices:
        device.amend(b"amended once")
        device.amend(b"and again")
        assert device.committed.amendment == 2
    reopen(own)
    for device in own.devices:
        assert restore(device, device.recorded_steps().records[0], own.host) == b"and again"
    own.update(ALL)
    for device in own.devices:
        assert [r.step for r in device.recorded_steps().records] == [2, 1]
        assert device.committed.amendment == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_a_device_goes_back_to_its_snapshot(make_set, in_place: bool) -> None:
    own, straight = make_set(2, in_place=in_place), make_set(2)
    for one in (own, straight):
        one.update(ALL)
        one.update([1])
    for device in own.devices:
        device.snapshots.copy("two", "identity", "2026-01-01")
        device.snapshots.publish("two")
    own.update(ALL)
    own.update([4])
    for device in own.devices:
        device.snapshots.check("two")
        device.snapshots.load("two", 1)
        device.snapshots.finish("two", 1)
        assert device.restore(own.host) == b"step 2"
        assert device.committed.step_id == (1, 2, b"attempt-attempt-")
    assert_same_sets(straight, own)


def test_settling_mends_documents_and_clears_half_made_snapshots(make_set) -> None:
    own = make_set(1)
    own.update(ALL)
    (own.paths[0] / "superblock.json").write_text("{")
    (own.paths[0] / "snapshots/.half").mkdir(parents=True)
    reopen(own)
    notes: list[str] = []
    assert own.devices[0].identify(notes) is not None
    assert notes == ["superblock.json is damaged; its other copy is whole"]
    restore(own.devices[0], own.devices[0].recorded_steps().records[0], own.host)
    notes.clear()
    own.devices[0].identify(notes)
    assert notes == []
    assert os.listdir(own.paths[0] / "snapshots") == []
