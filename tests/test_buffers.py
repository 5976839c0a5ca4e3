"""Reserved memory in a forked child, which does not have it."""

from __future__ import annotations

import gc
import os

import numpy as np

from smart_infinity.storage.buffers import reserve

SIZE = 1 << 22


def test_a_child_may_destroy_its_parents_buffers_and_keep_its_own() -> None:
    theirs = [reserve(SIZE) for _ in range(8)]
    addresses = {own.ctypes.data for own in theirs}
    child = os.fork()
    if not child:
        status = 1
        try:
            own = [reserve(SIZE) for _ in range(32)]
            status = 2 if addresses & {each.ctypes.data for each in own} else 3
            theirs.clear()
            gc.collect()
            for index, each in enumerate(own):
                each[:] = index
            if status == 2 and all((each == index).all() for index, each in enumerate(own)):
                status = 0
        finally:
            os._exit(status)
    # 3: no address was used again, so nothing was tested
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not np.concatenate(theirs).any()
