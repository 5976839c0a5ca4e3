"""Gradients of a GPU on their way down to the devices.

Backward gives the GPU its work long before the GPU does it, so a gradient is a promise when its
hook runs. It is copied by parts on a stream of its own, which waits for what the gradient waits
for, into a fixed pool of pinned chunks; a thread lands each part when it has come. So neither the
GPU nor the thread that runs backward waits for the devices, unless all chunks are under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from smart_infinity.cuda.pinned import PinnedPool, mark, new_stream

CHUNKS, CHUNK_BYTES = 4, 16 << 20

# Takes the number of a part and its words, flat and on the CPU, as long as the call lasts.
Land = Callable[[int, torch.Tensor], None]


class GradientDescent:
    """Brings gradients down, one after the other.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._pool = PinnedPool(CHUNKS, CHUNK_BYTES)
        # One thread: what lands later was computed later.
        self._lander = ThreadPoolExecutor(1, thread_name_prefix="smart-infinity gradients")
        self._closer = weakref.finalize(self, self._lander.shutdown, wait=False)
        self._closer.atexit = False
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    def max_elements(self, dtype: torch.dtype) -> int:
        """Of a part."""
        return CHUNK_BYTES // dtype.itemsize

    def send(self, gradient: torch.Tensor, parts: Sequence[tuple[int, int]], land: Land) -> None:
        """Begin to copy a gradient; ``land`` is called from another thread for each part.

        Args:
            gradient: dense, on the GPU, as the current stream will have computed it.
            parts: in this order, where each begins and ends, in elements of the flat gradient.
            land: see `Land`.
        """
        flat = gradient.detach().reshape(-1)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        flat.record_stream(self._stream)  # its memory is not used anew before it has been copied
        for number, (begin, end) in enumerate(parts):
            chunk = self._pool.take()
            words = chunk[: (end - begin) * flat.itemsize].view(flat.dtype)
            with torch.cuda.stream(self._stream):
                words.copy_(flat[begin:end], non_blocking=True)
                copied = mark(self._stream)
            self._queue(lambda *own: self._land(land, *own), number, chunk, words, copied)

    def after(self, call: Callable[[], None]) -> None:
        """Call this from the other thread when everything that was sent has landed."""
        self._queue(call)

    def settle(self) -> None:
        """Wait until everything has landed, and raise the first error."""
        if self._last is not None:
            self._last.result()
            self._last = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread; what is on its way lands before."""
        if self._closer.detach() is not None:
            self._lander.shutdown(wait=True)

    def _queue(self, call: Callable[..., None], *args: object) -> None:
        def guarded() -> None:
            try:
                call(*args)
            except BaseException as error:
                self._error = self._error or error

        self._last = self._lander.submit(guarded)

    def _land(
        self,
        land: Land,
        number: int,
        chunk: torch.Tensor,
        words: torch.Tensor,
        copied: torch.cuda.Event,
    ) -> None:
        try:
            copied.synchronize()
            if self._error is None:
                land(number, words)
        finally:
            self._pool.put(chunk)
