"""What a directory says about itself: superblock and layout in two copies, and their removal."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from smart_infinity.errors import CorruptStateError, DeviceIOError, StateMismatchError
from smart_infinity.layout import FORMAT_VERSION
from smart_infinity.storage import slots
from smart_infinity.storage.superblock import (
    Superblock,
    decode_document,
    encode_document,
    mend_documents,
    read_layout,
    read_superblock,
    write_superblock,
)

SUPERBLOCK = Superblock(FORMAT_VERSION, "some-uuid", 1, 3, "some-hash", "adamw", "TinyGPT")
LAYOUT = {"format_version": FORMAT_VERSION, "units": [1, 2]}
FILES = ["layout.copy.json", "layout.json", "superblock.copy.json", "superblock.json"]
SUPERBLOCKS = ["superblock.json", "superblock.copy.json"]
LAYOUTS = ["layout.json", "layout.copy.json"]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    write_superblock(str(tmp_path), SUPERBLOCK, LAYOUT)
    return str(tmp_path)


def read_all(directory: str) -> tuple[Superblock | None, dict[str, object], list[str]]:
    notes: list[str] = []
    return read_superblock(directory, notes), read_layout(directory, notes), notes


def test_superblock_and_layout_round_trip(tmp_path: Path) -> None:
    assert read_superblock(str(tmp_path)) is None
    write_superblock(str(tmp_path), SUPERBLOCK, LAYOUT)
    assert read_all(str(tmp_path)) == (SUPERBLOCK, LAYOUT, [])
    assert sorted(os.listdir(tmp_path)) == FILES
    write_superblock(str(tmp_path), replace(SUPERBLOCK, device_index=2), LAYOUT)
    assert read_superblock(str(tmp_path)) == replace(SUPERBLOCK, device_index=2)


def test_both_copies_are_the_same_and_are_json_for_people(directory: str) -> None:
    for one, other in (SUPERBLOCKS, LAYOUTS):
        data = Path(directory, one).read_bytes()
        assert data == Path(directory, other).read_bytes()
        assert data.endswith(b"\n")
        assert "checksum" in json.loads(data)
    assert json.loads(Path(directory, "superblock.json").read_text())["model"] == "TinyGPT"


def test_the_layout_is_written_before_any_superblock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = os.rename

    def rename(source: str, target: str) -> None:
        order.append(os.path.basename(target))
        real(source, target)

    monkeypatch.setattr(slots.os, "rename", rename)
    write_superblock(str(tmp_path), SUPERBLOCK, LAYOUT)
    assert order == [*LAYOUTS, *SUPERBLOCKS]


# --- one copy is enough --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "damaged", "empty", "flipped"])
def test_a_lost_copy_is_noted_and_mended(directory: str, name: str, damage: str) -> None:
    path = Path(directory, name)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        path.write_bytes({"damaged": whole[:-5], "empty": b"", "flipped": bytes(flipped)}[damage])
    seen = "is missing" if damage == "missing" else "is damaged"
    expected = (SUPERBLOCK, LAYOUT, [f"{name} {seen}; its other copy is whole"])
    assert read_all(directory) == expected
    mend_documents(directory)
    assert read_all(directory) == (SUPERBLOCK, LAYOUT, [])
    assert path.read_bytes() == whole


def test_every_flipped_bit_of_a_copy_is_noticed(directory: str) -> None:
    for name, other in (SUPERBLOCKS, LAYOUTS):
        path = Path(directory, name)
        whole = path.read_bytes()
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            if damaged.split() == whole.split():
                continue  # white space
            path.write_bytes(damaged)
            superblock, layout, notes = read_all(directory)
            assert (superblock, layout) == (SUPERBLOCK, LAYOUT)
            if decode_document(bytes(damaged)) is None:
                assert notes == [f"{name} is damaged; its other copy is whole"]
            else:
                assert json.loads(damaged) == json.loads(whole)
        path.write_bytes(whole)
        assert Path(directory, other).read_bytes() == whole


def test_mending_writes_nothing_where_all_is_whole(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots.os, "rename", lambda *_: pytest.fail("nothing is to be written"))
    mend_documents(directory)
    (tmp_path / "empty").mkdir()
    mend_documents(str(tmp_path / "empty"))
    assert os.listdir(tmp_path / "empty") == []


def test_an_older_copy_beside_a_whole_one_is_noted(directory: str) -> None:
    old = encode_document({**asdict(SUPERBLOCK), "format_version": 1})
    Path(directory, "superblock.copy.json").write_bytes(old)
    assert read_all(directory) == (
        SUPERBLOCK,
        LAYOUT,
        ["superblock.copy.json is of another version; its other copy is whole"],
    )


# --- no copy is whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_copies", [1, 2])
def test_another_format_version_is_refused_by_name(tmp_path: Path, num_copies: int) -> None:
    write_superblock(str(tmp_path), replace(SUPERBLOCK, format_version=99), {})
    if num_copies == 1:
        (tmp_path / "superblock.copy.json").unlink()
    with pytest.raises(StateMismatchError, match="version 99") as caught:
        read_superblock(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "resume=False" in str(caught.value)


def test_a_directory_of_the_first_release_is_refused_by_its_version(tmp_path: Path) -> None:
    """Its superblock has neither a checksum nor a copy."""
    old = {"format_version": 1, "set_uuid": "u", "device_index": 0, "num_devices": 1}
    (tmp_path / "superblock.json").write_text(json.dumps(old, indent=1) + "\n")
    with pytest.raises(StateMismatchError, match=r"format version 1, .* reads version 2"):
        read_superblock(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe\x00",
        b"[" * 500,
        b'{"format_version": 2}',
        b'{"format_version": 2, "checksum": "0"}',
        encode_document({"format_version": FORMAT_VERSION, "surprise": 2}),
        encode_document({}),
        json.dumps({"format_version": FORMAT_VERSION, "set_uuid": "x" * 9}).encode()[:-5],
    ],
)
@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_damaged_superblock_is_refused_by_name(
    tmp_path: Path, content: bytes, num_copies: int
) -> None:
    for name in SUPERBLOCKS[:num_copies]:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((CorruptStateError, StateMismatchError)) as caught:
        read_superblock(str(tmp_path))
    if content != encode_document({}):  # whole, and of no version
        assert "superblock.json is damaged" in str(caught.value)
        assert isinstance(caught.value, CorruptStateError)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_or_damaged_layout_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CorruptStateError, match=r"layout\.json .*missing"):
        read_layout(str(tmp_path))
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(CorruptStateError, match=r"layout\.json is damaged"):
        read_layout(str(tmp_path))
    (tmp_path / "layout.copy.json").write_text("")
    with pytest.raises(CorruptStateError, match="no copy of it is whole"):
        read_layout(str(tmp_path))


@pytest.mark.parametrize("name", SUPERBLOCKS)
def test_an_unreadable_superblock_is_a_device_error(directory: str, name: str) -> None:
    Path(directory, name).unlink()
    Path(directory, name).mkdir()
    with pytest.raises(DeviceIOError, match=name.replace(".", r"\.")) as caught:
        read_superblock(directory)
    assert caught.value.operation == "read"


# --- writing and removing ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_durable_write_keeps_the_old_file(
    directory: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(slots.os, call, fail)
        with pytest.raises(DeviceIOError, match="errno 5"):
            write_superblock(directory, replace(SUPERBLOCK, device_index=2), {"a": 1})
    assert read_all(directory) == (SUPERBLOCK, LAYOUT, [])
    assert sorted(os.listdir(directory)) == FILES


def test_a_first_write_that_fails_anywhere_leaves_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first superblock is there, the directory holds nothing."""
    real = os.rename
    for failing in range(4):
        count = iter(range(4))

        def rename(source: str, target: str, failing: int = failing, count=count) -> None:
            if next(count) == failing:
                raise OSError(28, "No space left on device")
            real(source, target)

        directory = tmp_path / str(failing)
        directory.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(slots.os, "rename", rename)
            with pytest.raises(DeviceIOError, match="errno 28"):
                write_superblock(str(directory), SUPERBLOCK, LAYOUT)
        notes: list[str] = []
        found = read_superblock(str(directory), notes)
        assert found == (SUPERBLOCK if failing == 3 else None)
        assert len(notes) == (failing == 3)
        if found is not None:
            assert read_layout(str(directory)) == LAYOUT


def test_discard_removes_only_our_files(tmp_path: Path) -> None:
    foreign = ["lost+found/inode", "state.2", "blob", "notes.txt", "superblock.json.bak", "lock"]
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "snapshots/one").mkdir(parents=True)
    (tmp_path / "snapshots/.two").mkdir()
    ours = [*slots.OUR_FILES, *(f"{name}.tmp" for name in FILES)]
    ours += ["snapshots/one/state", "snapshots/.two/state"]
    for name in [*foreign, *ours]:
        (tmp_path / name).write_text(name)
    for _ in range(2):
        slots.discard(str(tmp_path))
        left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        assert left == sorted(foreign)
    for name in foreign:
        assert (tmp_path / name).read_text() == name


def test_a_discard_that_is_killed_anywhere_leaves_a_whole_state_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes the rest a state goes first."""
    real = os.unlink

    class Killed(BaseException):
        pass

    for survived in range(len(slots.OUR_FILES)):
        directory = tmp_path / str(survived)
        directory.mkdir()
        write_superblock(str(directory), SUPERBLOCK, LAYOUT)
        for name in (slots.LEDGER, *slots.STATE, *slots.BLOB):
            (directory / name).write_text(name)
        done: list[str] = []

        def unlink(path: str, done: list[str] = done, survived: int = survived) -> None:
            if len(done) == survived and not path.endswith(".tmp"):
                raise Killed
            real(path)
            done.append(path)

        with monkeypatch.context() as patch:
            patch.setattr(slots.os, "unlink", unlink)
            with pytest.raises(Killed):
                slots.discard(str(directory))
        if read_superblock(str(directory)) is not None:
            assert read_layout(str(directory)) == LAYOUT
            left = set(slots.OUR_FILES) - set(os.listdir(directory))
            assert left <= set(SUPERBLOCKS)
