"""The trace of a run: what Perfetto would show."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import OPTIMIZERS, directories, offload, tiny_gpt, train
from smart_infinity.errors import UnsupportedError
from smart_infinity.trace import HOST, Trace


def events_of(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert isinstance(content, list)
    return content


def tracks_of(events: list[dict[str, Any]]) -> dict[int, str]:
    """By track, the process and the stage, such as ``"host loop"``."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {
        e["tid"]: f"{processes[e['pid']]} {e['args']['name']}"
        for e in events
        if e["name"] == "thread_name"
    }


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("options", [{}, {"overlap": True, "accumulation_steps": 1}])
def test_every_stage_of_every_device_has_its_track(options: dict[str, Any], tmp_path: Path) -> None:
    paths, file = directories(tmp_path, 2), tmp_path / "trace.json"
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    with offload(model, source, paths, trace=file, **options) as optimizer:
        train(model, optimizer, range(3), clip=None)
        num_records = [len(own.records) for own in optimizer._engine.layout.devices]
    events = events_of(file)
    tracks = tracks_of(events)
    spans = [event for event in events if event["ph"] == "X"]
    named: dict[str, list[str]] = {}
    for span in spans:
        stage = " ".join(word for word in tracks[span["tid"]].split() if not word.isdigit())
        named.setdefault(stage, []).append(span["name"])
    for path, count in zip(paths, num_records, strict=True):
        stages = {stage: named[f"device {path} {stage}"] for stage in ("read", "compute", "write")}
        # The first state is computed and written too.
        assert len(stages["read"]) == 3 * count
        assert len(stages["compute"]) == len(stages["write"]) == 4 * count
        assert set(stages["read"]) == {f"record {number}" for number in range(count)}
        link = named[f"device {path} link"]
        assert link.count("weights of record 0") == 3
        assert any(name.startswith("gradient of ") for name in link)
    assert [name for name in named["host loop"] if name.startswith("step")] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert named["host loop"].count("forward") == named["host loop"].count("backward") == 3
    assert "the step" in named["host wait"]
    # Within a track nothing overlaps, or it could not be shown.
    for track in tracks:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == track)
        for (_, end), (begin, _) in itertools.pairwise(own):
            assert begin >= end - 0.2  # microseconds, rounded


def test_spans_that_overlap_lie_in_tracks_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    trace = Trace(str(file))
    for begin, end in ((1.0, 3.0), (2.0, 4.0), (3.0, 5.0), (4.5, 6.0)):
        trace.add(HOST, "read", "x", begin, end)
    trace.close()
    trace.add(HOST, "read", "late", 7.0, 8.0)
    trace.close()
    events = events_of(file)
    assert sorted(tracks_of(events).values()) == ["host read", "host read 2"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 2, 1, 2]


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    (device,) = directories(tmp_path, 1)
    with pytest.raises(UnsupportedError, match=r"missing/trace\.json.*cannot be written"):
        offload(model, source, [device], trace=tmp_path / "missing" / "trace.json")
    assert list(device.iterdir()) == []


def test_torchs_profiler_sees_steps_and_waits(tmp_path: Path) -> None:
    model = tiny_gpt()
    source = OPTIMIZERS["adamw"](model.parameters())
    kinds = [torch.profiler.ProfilerActivity.CPU]
    optimizer = offload(model, source, directories(tmp_path, 1), overlap=True)
    with optimizer, torch.profiler.profile(activities=kinds) as profile:
        train(model, optimizer, range(2), clip=None)
        optimizer.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert {"smart_infinity.step", "smart_infinity.wait"} <= names
