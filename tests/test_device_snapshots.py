"""Snapshots on one device: copied, published, damaged, gone back to, and cut short by crashes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from smart_infinity.errors import (
    CorruptStateError,
    DeviceIOError,
    StateMismatchError,
)
from smart_infinity.storage import blockfile
from smart_infinity.storage.blockfile import BlockFile
from smart_infinity.storage.ledger import newest_common
from smart_infinity.storage.snapshots import Snapshots
from smart_infinity.storage.superblock import encode_document
from stores import SET, US, Kept, flip, layout_of, tree

PARTS = ["blob", "record", "snapshot.json", "state"]


@pytest.fixture(params=[False, True], ids=["beside", "in_place"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    """At step 2, whose records lie in both places where there are two."""
    kept = Kept(tmp_path / "device", in_place=request.param)
    kept.write(1, indices=range(0, 21, 2))
    kept.write(2, indices=range(0, 21, 3))
    yield kept
    kept.store.close()


def take(kept: Kept, name: str, created: str = "2026-01-01") -> dict[int, int]:
    """A snapshot; returns what should be in it."""
    kept.snapshots.copy(name, f"identity of {name}", created)
    kept.snapshots.publish(name)
    return dict(kept.expected)


def names(kept: Kept) -> list[str]:
    return [own.name for own in kept.snapshots.whole()]


def problems(kept: Kept, name: str) -> list[str]:
    return list(kept.snapshots.problems(name))


# --- making --------------------------------------------------------------------------------------


def test_a_snapshot_holds_the_committed_step(kept: Kept) -> None:
    before = tree(kept.path)
    expected = take(kept, "one")
    after = tree(kept.path)
    assert {name for name in after if name not in before} == {f"snapshots/one/{p}" for p in PARTS}
    assert all(after[name] == data for name, data in before.items())
    assert problems(kept, "one") == []
    kept.snapshots.check("one")
    (about,) = kept.snapshots.whole()
    record = kept.store.record
    assert (about.name, about.identity, about.created) == ("one", "identity of one", "2026-01-01")
    assert (about.set_uuid, about.device_index) == (SET, 0)
    assert (about.step, about.attempt) == (2, US.hex())
    with kept.snapshots.reader("one") as reader:
        assert not reader.record.places.any()
        assert reader.record.blob_place == 0
        for own in kept.records:
            data = kept.payload(own.index, expected[own.index]).view(np.float32)
            found = reader.read(own)
            assert found is not None
            np.testing.assert_array_equal(found.reshape(-1), data[: 3 * own.length])
        np.testing.assert_array_equal(reader.record.checksums, record.checksums)
    assert after["snapshots/one/blob"] == kept.blob(2)
    assert len(after["snapshots/one/state"]) == kept.store.state_nbytes


def test_a_copy_is_no_snapshot_until_it_is_published(kept: Kept) -> None:
    kept.snapshots.copy("one", "identity", "now")
    assert names(kept) == []
    with pytest.raises(StateMismatchError, match="no snapshot 'one'"):
        problems(kept, "one")
    kept.snapshots.remove_half_made()
    assert os.listdir(kept.path / "snapshots") == []
    with pytest.raises(DeviceIOError, match="rename"):
        kept.snapshots.publish("one")


def test_a_half_made_copy_is_made_anew(kept: Kept) -> None:
    half = kept.path / "snapshots/.one"
    half.mkdir(parents=True)
    (half / "state").write_bytes(b"x" * 10_000_000)
    (half / "rubbish").write_text("")
    take(kept, "one")
    assert sorted(os.listdir(kept.path / "snapshots/one")) == PARTS
    assert problems(kept, "one") == []


def test_snapshots_are_listed_by_age_and_removed_by_name(kept: Kept) -> None:
    assert names(kept) == []
    kept.snapshots.remove("nothing")
    kept.snapshots.remove_half_made()
    for name, created in (("b", "2026-01-03"), ("c", "2026-01-01"), ("a", "2026-01-02")):
        take(kept, name, created)
    assert names(kept) == ["c", "a", "b"]
    (kept.path / "snapshots/.a").mkdir()  # a removal that was cut short
    kept.snapshots.remove("a")
    kept.snapshots.remove("a")
    assert names(kept) == ["c", "b"]
    assert sorted(os.listdir(kept.path / "snapshots")) == ["b", "c"]


def test_later_steps_leave_snapshots_alone(kept: Kept) -> None:
    take(kept, "one")
    before = tree(kept.path / "snapshots")
    for step in range(3, 7):
        kept.write(step)
    assert tree(kept.path / "snapshots") == before
    assert problems(kept, "one") == []


# --- copying -------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("served", [0, 3])
def test_where_ranges_cannot_be_copied_bytes_are(
    kept: Kept, refusal: int, served: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after some calls that worked, and one that copied a part only."""
    expected = take(kept, "ranges")
    real, calls = os.copy_file_range, iter(range(100))

    def refuse(source: int, target: int, nbytes: int, *offsets: int) -> int:
        number = next(calls)
        if number < served:
            return real(source, target, nbytes if number < served - 1 else nbytes // 3, *offsets)
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(blockfile.os, "copy_file_range", refuse)
    take(kept, "bytes")
    found = tree(kept.path / "snapshots")
    assert found["bytes/state"] == found["ranges/state"]
    assert problems(kept, "bytes") == []
    kept.write(3)
    kept.snapshots.load("bytes", 1)
    kept.snapshots.finish("bytes", 1)
    kept.expected = expected
    kept.assert_holds()


def test_ranges_may_be_copied_in_small_parts(tmp_path: Path, monkeypatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    files = [BlockFile("d", str(tmp_path / name), direct=False) for name in "ab"]
    files[0].write_from(data, 0)
    real = os.copy_file_range
    monkeypatch.setattr(
        blockfile.os, "copy_file_range", lambda a, b, n, *at: real(a, b, min(n, 777), *at)
    )
    files[0].copy_to(files[1], 9000, 500, 123)
    assert (tmp_path / "b").read_bytes() == bytes(123) + data[500:9500].tobytes()
    with pytest.raises(DeviceIOError, match=r"copy of .* 501 bytes short") as caught:
        files[0].copy_to(files[1], 9000, 1501, 0)
    assert caught.value.offset_bytes == 10_000
    for file in files:
        file.close()


@pytest.mark.parametrize("call", ["copy_file_range", "pwritev", "fdatasync", "fsync", "rename"])
def test_an_error_in_the_middle_of_a_copy_leaves_nothing(
    kept: Kept, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(kept.path)
    real = getattr(os, call)
    if call == "pwritev":
        monkeypatch.setattr(
            blockfile.os, "copy_file_range", lambda *_: (_ for _ in ()).throw(OSError(38, "no"))
        )
    for failing in range(100):
        calls = iter(range(1000))

        def fail(*arguments: object, failing: int = failing, calls=calls) -> object:
            if next(calls) == failing:
                raise OSError(5, "Input/output error")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                kept.snapshots.copy("one", "identity", "now")
            except DeviceIOError as error:
                assert error.errno == 5  # noqa: PT017
            else:
                break
        assert tree(kept.path) == before
        assert os.listdir(kept.path / "snapshots") == []
    assert failing >= (1 if call == "fdatasync" else 3)
    kept.snapshots.publish("one")
    assert problems(kept, "one") == []


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 9, 20])
def test_a_damaged_state_record_is_named(kept: Kept, index: int) -> None:
    take(kept, "one")
    flip(kept.path / "snapshots/one/state", index * kept.layout.record_stride + 4095)
    assert problems(kept, "one") == [f"its state record {index} is damaged or cut off"]
    with pytest.raises(CorruptStateError, match="Nothing was changed") as caught:
        kept.snapshots.check("one")
    assert f"'one': its state record {index}" in str(caught.value)


def test_what_is_cut_off_a_snapshot_is_named(kept: Kept) -> None:
    take(kept, "one")
    os.truncate(kept.path / "snapshots/one/state", 18 * kept.layout.record_stride)
    flip(kept.path / "snapshots/one/state", 5)
    flip(kept.path / "snapshots/one/blob", 5)
    lost = [f"its state record {index} is damaged or cut off" for index in (0, 18, 19, 20)]
    assert problems(kept, "one") == ["its blob is damaged", *lost]


@pytest.mark.parametrize("part", ["blob", "record"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_part_is_named(kept: Kept, part: str, damage: str) -> None:
    take(kept, "one")
    path = kept.path / "snapshots/one" / part
    if damage == "flipped":
        flip(path, path.stat().st_size - 1)
    else:
        os.truncate(path, path.stat().st_size - 1 if damage == "cut" else 0)
    assert problems(kept, "one") == [f"its {part} is damaged"]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_an_error_that_names_it(kept: Kept, part: str) -> None:
    take(kept, "one")
    (kept.path / "snapshots/one" / part).unlink()
    try:
        found = problems(kept, "one")
    except (DeviceIOError, StateMismatchError) as error:
        found = [str(error)]
    assert len(found) == 1
    assert part in found[0] or (part == "snapshot.json" and "no snapshot 'one'" in found[0])


def test_a_snapshot_that_does_not_say_what_it_is_is_reported(kept: Kept) -> None:
    for name in ("one", "two", "three"):
        take(kept, name)
    flip(kept.path / "snapshots/two/snapshot.json", 20)
    (kept.path / "snapshots/three/snapshot.json").write_bytes(encode_document({"name": "three"}))
    assert names(kept) == ["one"]
    assert kept.snapshots.damaged() == ["three", "two"]
    with pytest.raises(StateMismatchError, match=r"no snapshot 'two'. It has \['one'\]"):
        kept.snapshots.check("two")
    kept.snapshots.remove("two")
    assert kept.snapshots.damaged() == ["three"]


@pytest.mark.parametrize(
    ("key", "value"), [("set_uuid", "other"), ("layout_hash", "other"), ("device_index", 1)]
)
def test_a_snapshot_of_another_set_layout_or_device_is_refused(
    kept: Kept, key: str, value: object
) -> None:
    take(kept, "one")
    path = kept.path / "snapshots/one/snapshot.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_bytes(encode_document({**content, key: value}))
    with pytest.raises(StateMismatchError, match="its own set only"):
        kept.snapshots.check("one")
    assert names(kept) == ([] if key == "set_uuid" else ["one"])


def test_a_snapshot_carried_to_another_set_is_refused(kept: Kept, tmp_path: Path) -> None:
    take(kept, "one")
    other = Kept(tmp_path / "other", layout=layout_of(numel=20_000))
    shutil.copytree(kept.path / "snapshots", other.path / "snapshots")
    with pytest.raises(StateMismatchError, match="its own set only"):
        other.snapshots.check("one")
    stranger = Snapshots(kept.store, "another-set")
    assert stranger.whole() == []
    with pytest.raises(StateMismatchError, match=f"set {SET}. Expected device 0 of set another"):
        stranger.check("one")
    other.store.close()


# --- going back ----------------------------------------------------------------------------------


def test_going_back_brings_the_state_of_the_snapshot(kept: Kept) -> None:
    expected = take(kept, "two")
    for step in (3, 4, 5):
        kept.write(step, indices=range(step, 21))
    for branch in (1, 2):  # and again, after another step
        kept.snapshots.check("two")
        kept.snapshots.load("two", branch)
        kept.snapshots.finish("two", branch)
        assert kept.store.record.step_id == (branch, 2, US)
        kept.expected = dict(expected)
        kept.assert_holds()
        kept.write(3, indices=range(5), branch=branch)
    again = kept.reopened()
    assert again.store.record.step_id == (2, 3, US)
    again.assert_holds()
    assert problems(again, "two") == []
    again.store.close()


def test_loading_beside_leaves_the_committed_step_whole(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.write(1)
    take(kept, "one")
    kept.write(2, indices=range(9))
    ledger = (tmp_path / "ledger").read_bytes()
    kept.snapshots.load("one", 1)
    assert (tmp_path / "ledger").read_bytes() == ledger
    kept.assert_holds()
    again = kept.reopened()  # killed before it was finished
    again.assert_holds()
    assert again.store.record.step_id == (0, 2, US)
    again.write(3)
    again.assert_holds()
    again.store.close()


def test_loading_in_place_is_marked_before_a_byte_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path, in_place=True)
    kept.write(1)
    expected = take(kept, "one")
    kept.write(2)
    state = (tmp_path / "state.0").read_bytes()

    def fail(*_: object) -> None:
        assert (tmp_path / "state.0").read_bytes() == state
        newest = kept.store.ledger_contents().records[0]
        assert (newest.branch, newest.step, newest.dirty) == (1, 1, True)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(blockfile.os, "copy_file_range", fail)
        with pytest.raises(DeviceIOError):
            kept.snapshots.load("one", 1)
    kept.snapshots.load("one", 2)  # killed before it was finished
    with pytest.raises(CorruptStateError, match="middle of step 1"):
        newest_common([kept.store.ledger_contents()])
    again = kept.reopened(settle=False)
    again.store.settle(again.store.ledger_contents().records[0])  # as the tools do: still torn
    with pytest.raises(CorruptStateError, match="middle of step 1"):
        newest_common([again.store.ledger_contents()])
    again.snapshots.load("one", 3)
    again.snapshots.finish("one", 3)
    again.expected = expected
    again = again.reopened()
    assert again.store.record.step_id == (3, 1, US)
    again.assert_holds()
    again.store.close()


def test_an_amended_step_is_copied_as_amended(kept: Kept) -> None:
    kept.store.amend(b"as amended")
    take(kept, "one")
    kept.write(3)
    kept.snapshots.load("one", 1)
    kept.snapshots.finish("one", 1)
    assert kept.store.read_blob(kept.store.record) == b"as amended"
    assert replace(kept.store.record, blob_place=0).blob_nbytes == len(b"as amended")
