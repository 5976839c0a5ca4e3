"""The checksum of a state record does not depend on how it was taken, and notices every byte."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_infinity.storage.checksums import StateChecksum, state_checksum


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 3000),
    num_tensors=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
    padding=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_blocks_and_the_whole_give_the_same(
    length: int, num_tensors: int, cuts: list[int], padding: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    used = 4 * length * num_tensors
    data = rng.integers(0, 256, used + padding, np.uint8)
    tensors = data[:used].view(np.float32).reshape(num_tensors, length)
    own = StateChecksum(num_tensors)
    ends = sorted({0, length, *(min(cut, length) for cut in cuts)})
    for begin, end in pairwise(ends):
        own.update(tensors[:, begin:end])
    expected = state_checksum(data, length, num_tensors)
    assert own.digest(data[used:]) == expected
    at = int(rng.integers(data.size))
    data[at] ^= 1 << int(rng.integers(8))
    assert state_checksum(data, length, num_tensors) != expected
