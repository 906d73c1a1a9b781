"""The digest ignores the layout of parameters, and detects every change of their values."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.weights.checksum import Digest, digest_tensor, digest_tensors

_MASK = (1 << 64) - 1


def _expected(tensor: torch.Tensor) -> Digest:
    """Compute the definition with Python integers, element by element."""
    plain = mixed = 0
    for bits in tensor.flatten().view(torch.int16 if tensor.element_size() == 2 else torch.int32).tolist():
        value = (bits * 0x9E3779B97F4A7C15) & _MASK
        signed = value - (1 << 64) if value >> 63 else value
        plain += bits
        mixed += signed ^ (signed >> 29)
    return Digest(plain & _MASK, mixed & _MASK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_digest_equals_its_definition(dtype: torch.dtype) -> None:
    tensor = torch.randn(123, 7).to(dtype)
    assert digest_tensor(tensor) == _expected(tensor)


def test_digests_of_blocks_add_up() -> None:
    tensor = torch.randn((1 << 17) + 5)
    assert digest_tensor(tensor) == digest_tensors([tensor[:70_001], tensor[70_001:]])


def test_fusion_padding_transposition_and_order_do_not_change_the_digest() -> None:
    q, k, v = (torch.randn(rows, 16).bfloat16() for rows in (32, 8, 8))
    fused = torch.cat([q, k, v, torch.zeros(16, 16, dtype=torch.bfloat16)])
    assert digest_tensors([fused]) == digest_tensors([v.T, q, k])


def test_tied_parameter_counts_once() -> None:
    embedding = torch.randn(8, 4)
    assert digest_tensors([embedding, embedding.view(8, 4), embedding]) == digest_tensors([embedding])


def test_copy_of_a_parameter_counts_again() -> None:
    weight = torch.randn(8, 4)
    assert digest_tensors([weight, weight.clone()]) != digest_tensors([weight])


def test_any_changed_bit_changes_the_digest() -> None:
    tensor = torch.randn(64).bfloat16()
    before = digest_tensor(tensor)
    for bit in range(15):
        changed = tensor.clone()
        changed.view(torch.int16)[17] ^= 1 << bit
        assert digest_tensor(changed) != before, f"bit {bit} was not detected"


def test_changes_that_cancel_in_a_plain_sum_change_the_digest() -> None:
    tensor = torch.arange(1, 65, dtype=torch.float32)
    changed = tensor.clone()
    changed.view(torch.int32)[3] += 1
    changed.view(torch.int32)[9] -= 1
    assert digest_tensor(changed).plain == digest_tensor(tensor).plain
    assert digest_tensor(changed) != digest_tensor(tensor)


def test_empty_and_meta_tensors_do_not_count() -> None:
    assert digest_tensors([torch.empty(0), torch.empty(4, device="meta")]) == Digest()


def test_digests_can_be_parsed_and_added() -> None:
    left, right = digest_tensor(torch.randn(9)), digest_tensor(torch.randn(5))
    assert Digest.parse(str(left)) == left
    assert len(str(Digest())) == 32
    assert Digest.parse(str(left)) + Digest.parse(str(right)) == right + left
