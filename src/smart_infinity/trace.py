"""A trace of what ran when, in the Chrome format that Perfetto and chrome://tracing show.

One process of the trace for the host and one for each device, one track in it for each stage;
where a stage runs several times at once, its further tracks are numbered. No torch in here.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import IO

from smart_infinity.errors import UnsupportedError

HOST = "host"


class Trace:
    """Writes spans to a file as they end, so that a run that dies leaves what it had.

    Args:
        path: the file; it is overwritten.

    Raises:
        UnsupportedError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file: IO[str] | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UnsupportedError(
                f"trace is {path!r}, which cannot be written: {error.strerror}. Expected the path "
                "of a file to make"
            ) from error
        self._lock, self._zero = threading.Lock(), time.perf_counter()
        self._owners = {HOST: 0}
        # By owner and stage, what its tracks are numbered and when their last span ended.
        self._tracks: dict[tuple[str, str], list[tuple[int, float]]] = {}
        self._num_tracks = 0
        self._file.write("[\n" + self._named("process_name", HOST, 0, 0))

    @contextlib.contextmanager
    def span(self, owner: str, stage: str, name: str) -> Iterator[None]:
        """Note what the block does."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(owner, stage, name, begin, time.perf_counter())

    def add(self, owner: str, stage: str, name: str, begin: float, end: float) -> None:
        """Note something that has ended.

        Args:
            owner: `HOST`, or a device's directory.
            stage: such as ``"read"``.
            name: of the thing.
            begin: by ``time.perf_counter``.
            end: the same.
        """
        with self._lock:
            if self._file is None:
                return
            process, track = self._place(owner, stage, begin, end)
            event = {
                "name": name,
                "ph": "X",
                "ts": round(1e6 * (begin - self._zero), 1),
                "dur": round(1e6 * (end - begin), 1),
                "pid": process,
                "tid": track,
            }
            self._write(json.dumps(event))

    def close(self) -> None:
        """End the file; what comes later is dropped."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def _place(self, owner: str, stage: str, begin: float, end: float) -> tuple[int, int]:
        """The process and the first track of the stage that is free at ``begin``."""
        process = self._owners.get(owner)
        if process is None:
            process = self._owners[owner] = len(self._owners)
            self._write(self._named("process_name", f"device {owner}", process, 0))
        tracks = self._tracks.setdefault((owner, stage), [])
        for position, (track, last_end) in enumerate(tracks):
            if last_end <= begin:
                tracks[position] = track, end
                return process, track
        self._num_tracks += 1
        tracks.append((self._num_tracks, end))
        label = stage if len(tracks) == 1 else f"{stage} {len(tracks)}"
        self._write(self._named("thread_name", label, process, self._num_tracks))
        return process, self._num_tracks

    def _named(self, kind: str, name: str, process: int, track: int) -> str:
        event = {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
        return json.dumps(event)

    def _write(self, event: str) -> None:
        assert self._file is not None
        self._file.write(",\n" + event)


def spanning(
    trace: Trace | None, owner: str, stage: str, name: str
) -> contextlib.AbstractContextManager[None]:
    """A span of a trace, if there is one."""
    return contextlib.nullcontext() if trace is None else trace.span(owner, stage, name)
