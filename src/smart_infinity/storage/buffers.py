"""Buffers for direct I/O and device memory: private, page-aligned, invisible to forked children."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from smart_infinity.layout import PAGE_BYTES

ByteArray = npt.NDArray[np.uint8]

_areas: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_in_child() -> None:
    """In a forked child: never unmap the areas, whose addresses may hold something else there.

    The child has the objects but not the memory, and its own next mapping can lie in the gap. An
    object that is destroyed, at the latest when the child exits, would take that mapping away.
    """
    for area in list(_areas):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(area))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)


def checksum(array: npt.NDArray[Any]) -> int:
    """xxh3 of an array's bytes, 64 bits; releases the GIL for all but small arrays."""
    return xxhash.xxh3_64_intdigest(array.data)


def reserve(nbytes: int, *, huge_pages: bool = True) -> ByteArray:
    """Reserve zeroed, page-aligned memory of ``nbytes``, rounded up to a page.

    The mapping is private and anonymous: Python's default is a shared one, on which transparent
    huge pages do nothing, and with 4 KiB pages a request breaks into so many segments that the
    same disk gives half the bandwidth. It is left out of forked children, because pages that are
    the target of direct I/O while a fork copies them can be corrupted. Pages cost memory when
    they are first touched.
    """
    size = max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_DONTFORK)
    _areas.add(area)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)
