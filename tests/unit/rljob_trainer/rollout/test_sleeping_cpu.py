"""Memory that tensors give back."""

from __future__ import annotations

import torch

from rljob_trainer.rollout.sleeping_cpu import drop_pages
from rljob_trainer.weights.heap import resident_bytes

NUM_BYTES = 64 << 20


def test_dropped_tensors_hold_no_memory_and_zeros_until_they_are_written() -> None:
    tensor = torch.ones(NUM_BYTES // 4)
    view, address, before = tensor[1000:].view(-1), tensor.data_ptr(), resident_bytes()
    drop_pages([tensor, view])
    assert before - resident_bytes() > NUM_BYTES * 0.95
    assert tensor.data_ptr() == address
    assert view[3000:-3000].abs().max() == 0, "all but the first and the last page"
    tensor.fill_(2)
    assert view.eq(2).all(), "the view still is one of it"


def test_neighbours_of_a_dropped_tensor_keep_their_content() -> None:
    tensors = [torch.full((1500,), float(number)) for number in range(200)]
    drop_pages([*tensors[::2], torch.empty(0), torch.ones(3)])
    for number, tensor in enumerate(tensors[1::2]):
        assert tensor.eq(2 * number + 1).all()
