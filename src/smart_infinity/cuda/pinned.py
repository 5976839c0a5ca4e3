"""Page-locked memory, which a GPU copies from and to while the processor does something else."""

from __future__ import annotations

import queue

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside those of the training loop."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """What has happened when the stream has come to here; threads sleep while they wait for it."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class PinnedPool:
    """A fixed number of chunks of pinned memory; whoever finds none free waits for one.

    Args:
        count: chunks.
        nbytes: of each.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        memory = torch.empty((count, nbytes), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._free: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]]
        self._free = queue.SimpleQueue()
        for chunk in memory:
            self._free.put((chunk, None))

    def take(self) -> torch.Tensor:
        """A chunk that nothing uses any longer: uint8, of all its bytes."""
        chunk, used = self._free.get()
        if used is not None:
            used.synchronize()
        return chunk

    def put(self, chunk: torch.Tensor, used: torch.cuda.Event | None = None) -> None:
        """Give a chunk back; the GPU may still read it until ``used`` has happened."""
        self._free.put((chunk, used))
