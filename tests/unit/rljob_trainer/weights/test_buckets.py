"""Tensors through buckets: all sizes and dtypes arrive as they were, and a bucket is written when it is asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.weights.buckets import Assembly, Part, pack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]
SHAPES = st.lists(st.integers(0, 40), max_size=3)


def build_tensors(shapes: list[list[int]]) -> dict[str, torch.Tensor]:
    dtypes = [DTYPES[i % len(DTYPES)] for i in range(len(shapes))]
    numbers = [torch.arange(int(torch.Size(shape).numel())).reshape(shape) % 97 for shape in shapes]
    return {str(i): each.to(dtype) for i, (each, dtype) in enumerate(zip(numbers, dtypes, strict=True))}


def carry(tensors: dict[str, torch.Tensor], bucket_bytes: int, num_buckets: int = 2) -> dict[str, torch.Tensor]:
    """Return what arrives, with each bucket read before the next is written."""
    memory, assembly = torch.empty(num_buckets * bucket_bytes, dtype=torch.uint8), Assembly(CPU)
    buckets = memory.split(bucket_bytes)
    done = [assembly.add(part, buckets[i]) for i, parts in pack(tensors.items(), buckets) for part in parts]
    assert assembly.is_complete
    return dict(filter(None, done))


@given(st.lists(SHAPES, max_size=6), st.sampled_from([256, 512, 4096]))
def test_tensors_arrive_as_they_were(shapes: list[list[int]], bucket_bytes: int) -> None:
    tensors = build_tensors(shapes)
    found = carry(tensors, bucket_bytes)
    assert list(found) == list(tensors), "all, in their order"
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_bucket_is_written_again_only_after_the_one_between_was_yielded() -> None:
    memory = torch.zeros(2 * 256, dtype=torch.uint8)
    packing = pack({"a": torch.full((4 * 256,), 7, dtype=torch.uint8)}.items(), memory.split(256))
    numbers = []
    for number, _ in packing:
        numbers.append(number)
        assert memory[number * 256] == 7
        memory[number * 256 : (number + 1) * 256] = number  # the receiver's until the next one is asked for
    assert numbers == [0, 1, 0, 1]


def test_a_view_that_is_not_contiguous_arrives_as_its_values() -> None:
    tensor = torch.arange(60, dtype=torch.float32).reshape(6, 10).T
    assert torch.equal(carry({"t": tensor}, 256)["t"], tensor)


def test_parts_out_of_order_are_an_error() -> None:
    assembly, bucket = Assembly(CPU), torch.zeros(256, dtype=torch.uint8)
    assert assembly.add(Part("a", "uint8", (300,), 0, 200, 0), bucket) is None
    assert not assembly.is_complete
    with pytest.raises(ValueError, match="a part of b comes out of order"):
        assembly.add(Part("b", "uint8", (10,), 0, 10, 0), bucket)
    with pytest.raises(ValueError, match="out of order"):
        Assembly(CPU).add(Part("a", "uint8", (300,), 200, 100, 0), bucket)
