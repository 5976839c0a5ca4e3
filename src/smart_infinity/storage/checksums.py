"""The checksum of a state record, taken while its parts are in the processor's cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from smart_infinity.storage.buffers import ByteArray


class StateChecksum:
    """xxh3 over a state record's bytes as written: over the xxh3 of each of its tensors.

    The tensors lie one behind the other, and an update visits them together, block by block. Each
    having a hash of its own, a block is hashed when it is read or written, and not once more from
    memory.
    """

    def __init__(self, num_tensors: int) -> None:
        self._hashes = [xxhash.xxh3_64() for _ in range(num_tensors)]

    def update(self, tensors: npt.NDArray[np.float32]) -> None:
        """Add the next elements of all tensors: ``[tensors, elements]``."""
        for own, values in zip(self._hashes, tensors, strict=True):
            own.update(values.data)

    def digest(self, padding: npt.NDArray[Any]) -> int:
        """The checksum, 64 bits; ``padding`` is what follows the tensors up to the page's end."""
        parts = b"".join(own.digest() for own in self._hashes)
        return xxhash.xxh3_64_intdigest(parts + padding.tobytes())


def state_checksum(data: ByteArray, length: int, num_tensors: int) -> int:
    """The same of a whole record of ``length`` elements, padding included."""
    used = 4 * length * num_tensors
    own = StateChecksum(num_tensors)
    own.update(data[:used].view(np.float32).reshape(num_tensors, length))
    return own.digest(data[used:])
