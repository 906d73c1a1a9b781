"""What changed in a chunk: applied to the old one it is the new one, and damage changes nothing without a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.weights.checksum import CHUNK_BYTES
from rljob_trainer.weights.deltas import apply, encode


@given(
    st.integers(0, 40),
    st.dictionaries(st.integers(0, 79), st.integers(0, 255), max_size=10),
)
def test_delta_turns_the_old_chunk_into_the_new_one(num_halfwords: int, changes: dict[int, int]) -> None:
    old, new = bytearray(2 * num_halfwords), bytearray(2 * num_halfwords)
    for place, value in changes.items():
        if place < len(new):
            new[place] = value
    delta = encode(memoryview(old), memoryview(new))
    if delta:
        apply(delta, memoryview(old))
        assert old == new
    else:
        different = sum(old[i : i + 2] != new[i : i + 2] for i in range(0, len(new), 2))
        assert different > num_halfwords / 8


def test_chunk_with_an_odd_end_has_no_delta() -> None:
    assert encode(memoryview(b"abc"), memoryview(b"abc")) == b""


@pytest.mark.parametrize(("rate", "most"), [(1e-6, 0.03), (3e-6, 0.06)])
def test_update_with_a_small_learning_rate_is_a_small_delta(rate: float, most: float) -> None:
    torch.manual_seed(0)
    masters = 0.02 * torch.randn(CHUNK_BYTES // 2)
    update = rate * torch.randn(masters.shape).sign()
    old, new = (
        memoryview(values.bfloat16().view(torch.int16).numpy().tobytes()) for values in (masters, masters + update)
    )
    delta = encode(old, new)
    assert 0 < len(delta) < most * CHUNK_BYTES
    target = bytearray(old)
    apply(delta, memoryview(target))
    assert target == new


def test_much_that_changed_has_no_delta() -> None:
    old, new = np.zeros(1000, np.uint8), np.arange(1000).astype(np.uint8)
    assert encode(memoryview(old.data), memoryview(new.data)) == b""


def test_damaged_delta_is_an_error_and_changes_nothing() -> None:
    old, new = bytearray(1000), bytearray(1000)
    new[::100] = b"x" * 10
    delta = encode(memoryview(old), memoryview(new))
    for damaged in (delta[:-1], delta[:5], b"", bytes([delta[0] ^ 1]) + delta[1:], delta[:-1] + b"?"):
        with pytest.raises(ValueError, match="a delta is"):
            apply(damaged, memoryview(old))
        assert old == bytes(1000)
    with pytest.raises(ValueError, match="damaged"):
        apply(delta, memoryview(bytearray(100)))  # of a longer chunk
