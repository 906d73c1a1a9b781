"""The digest ignores the layout of parameters, and detects every change of their values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.wire.weights import DigestUnit
from rljob_trainer.weights.checksum import Digest, choose_unit, digest_on_device, digest_tensor, digest_tensors

_MASK = (1 << 64) - 1


def _expected(tensor: torch.Tensor) -> Digest:
    """Compute the definition with Python integers, element by element."""
    plain = mixed = 0
    is_half = tensor.element_size() == 2
    for bits in tensor.flatten().view(torch.int16 if is_half else torch.int32).tolist():
        bits <<= 16 * is_half
        value = (bits * 0x9E3779B97F4A7C15) & _MASK
        signed = value - (1 << 64) if value >> 63 else value
        plain += bits
        mixed += signed ^ (signed >> 29)
    return Digest(plain & _MASK, mixed & _MASK)


def _expected_of_word_units(tensor: torch.Tensor) -> Digest:
    plain = parity = 0
    for bits in tensor.flatten().view(torch.int64).tolist():
        plain += bits
        parity ^= bits & _MASK
    return Digest(plain & _MASK, parity=parity)


def test_bf16_values_digest_as_the_same_values_in_fp32() -> None:
    tensor = torch.randn(321).bfloat16()
    assert digest_tensor(tensor) == digest_tensor(tensor.float())
    assert digest_tensor(tensor) != digest_tensor(tensor.float() * (1 + 2**-20))


UNITS: list[DigestUnit] = ["element", "word"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_digest_equals_its_definition(dtype: torch.dtype) -> None:
    tensor = torch.randn(123, 8).to(dtype)
    assert digest_tensor(tensor) == _expected(tensor)
    assert digest_tensor(tensor, "word") == _expected_of_word_units(tensor)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_elements", [4, 8, 12, 20, 4096, 4 * 70_001])
def test_device_has_the_digest_of_the_cpu(unit: DigestUnit, num_elements: int) -> None:
    tensor = torch.randn(num_elements).bfloat16()
    assert Digest.of_device(digest_on_device(tensor, unit)) == digest_tensor(tensor, unit)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("unit", UNITS)
def test_threads_do_not_change_the_digest(unit: DigestUnit, num_threads: int, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(num_threads)
    tensors = [torch.randn(4 * 600_000).bfloat16(), torch.randn(64).bfloat16()]
    assert digest_tensors(tensors, unit) == digest_tensor(tensors[0], unit) + digest_tensor(tensors[1], unit)


def test_digests_of_blocks_add_up() -> None:
    tensor = torch.randn((1 << 17) + 5)
    assert digest_tensor(tensor) == digest_tensors([tensor[:70_001], tensor[70_001:]])


def test_fusion_padding_transposition_and_order_do_not_change_the_digest() -> None:
    q, k, v = (torch.randn(rows, 16).bfloat16() for rows in (32, 8, 8))
    fused = torch.cat([q, k, v, torch.zeros(16, 16, dtype=torch.bfloat16)])
    assert digest_tensors([fused]) == digest_tensors([v.T, q, k])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_words_of_fused_and_sharded_layers_digest_like_the_published_tensors(data: st.DataObject) -> None:
    """Everything that engines do to the layouts of linear layers and embeddings."""
    num_shards = data.draw(st.sampled_from([1, 2, 4, 8]))
    head, hidden, mlp = 8, 32 * data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 3))
    num_kv = data.draw(st.sampled_from([1, 2, 4, 8]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shapes = {
        "q": (8 * head, hidden), "k": (num_kv * head, hidden), "v": (num_kv * head, hidden), "q.bias": (8 * head,),
        "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp), "norm": (hidden,), "embed": (24, hidden),
    }  # fmt: skip
    published = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    if num_kv * head % 32 == 0:
        published["k.bias"] = torch.randn(num_kv * head).bfloat16()
    assert choose_unit(published.values(), num_shards) == "word"
    engine: list[torch.Tensor] = []
    for rank in range(num_shards):

        def rows(name: str, rank: int = rank) -> torch.Tensor:
            return published[name].chunk(num_shards)[rank]

        replicas = max(1, num_shards // num_kv)
        kv = published["k"].chunk(min(num_kv, num_shards))[rank // replicas]
        value = published["v"].chunk(min(num_kv, num_shards))[rank // replicas]
        fused = torch.cat([rows("q"), kv, value])
        engine.append(fused if rank % replicas == 0 else fused[: len(rows("q"))])
        engine.append(torch.cat([rows("q.bias"), torch.zeros(8, dtype=torch.bfloat16)]))
        engine.append(torch.cat([rows("up"), rows("gate")]))
        engine.append(published["down"].chunk(num_shards, dim=1)[rank])
        engine.append(torch.cat([rows("embed"), torch.zeros(5, hidden, dtype=torch.bfloat16)]))
    engine.append(published["norm"])
    if "k.bias" in published:
        engine.append(published["k.bias"])
    digests = [digest_tensors([tensor], "word") for tensor in engine]
    assert sum(digests, start=Digest()) == digest_tensors(published.values(), "word")


@pytest.mark.parametrize(
    ("shape", "dtype", "num_shards", "unit"),
    [
        ((100, 32), torch.bfloat16, 1, "word"),
        ((100, 16), torch.float32, 8, "word"),
        ((32,), torch.bfloat16, 8, "word"),
        ((100, 28), torch.bfloat16, 1, "element"),  # 7 words: two shards would cut one
        ((100, 32), torch.bfloat16, 16, "element"),
        ((100, 96), torch.bfloat16, 6, "word"),
        ((4, 32, 32), torch.bfloat16, 1, "element"),  # experts
        ((), torch.float32, 1, "element"),
    ],
)
def test_words_are_chosen_only_if_no_shard_cuts_them(
    shape: tuple[int, ...], dtype: torch.dtype, num_shards: int, unit: DigestUnit
) -> None:
    tensors = [torch.empty(64, 192, dtype=torch.bfloat16), torch.empty(shape, dtype=dtype)]
    assert choose_unit(tensors, num_shards) == unit


def test_tied_parameter_counts_once() -> None:
    embedding = torch.randn(8, 4)
    assert digest_tensors([embedding, embedding.view(8, 4), embedding]) == digest_tensors([embedding])


def test_copy_of_a_parameter_counts_again() -> None:
    weight = torch.randn(8, 4)
    assert digest_tensors([weight, weight.clone()]) != digest_tensors([weight])


@pytest.mark.parametrize("unit", UNITS)
def test_any_changed_bit_changes_the_digest(unit: DigestUnit) -> None:
    tensor = torch.randn(64).bfloat16()
    before = digest_tensor(tensor, unit)
    for bit in range(15):
        changed = tensor.clone()
        changed.view(torch.int16)[17] ^= 1 << bit
        assert digest_tensor(changed, unit) != before, f"bit {bit} was not detected"


@pytest.mark.parametrize("unit", UNITS)
def test_stale_scaled_and_zeroed_slices_change_the_digest(unit: DigestUnit) -> None:
    tensor = torch.randn(64, 32).bfloat16()
    before, changed = digest_tensor(tensor, unit), [tensor.clone() for _ in range(4)]
    changed[0][8:16] = torch.randn(8, 32).bfloat16()
    changed[1][8:16] *= 2
    changed[2][8:16] = 0
    changed[3] += 1e-2
    assert len({str(digest_tensor(t, unit)) for t in changed} | {str(before)}) == 5


@pytest.mark.parametrize("unit", UNITS)
def test_changes_that_cancel_in_a_plain_sum_change_the_digest(unit: DigestUnit) -> None:
    tensor = torch.arange(1, 65, dtype=torch.float32)
    changed = tensor.clone()
    changed.view(torch.int32)[3] += 1
    changed.view(torch.int32)[9] -= 1
    assert digest_tensor(changed, unit).plain == digest_tensor(tensor, unit).plain
    assert digest_tensor(changed, unit) != digest_tensor(tensor, unit)


def test_empty_and_meta_tensors_do_not_count() -> None:
    assert digest_tensors([torch.empty(0), torch.empty(4, device="meta")]) == Digest()


def test_digests_can_be_parsed_and_added() -> None:
    left, right = digest_tensor(torch.randn(9)), digest_tensor(torch.randn(5))
    assert Digest.parse(str(left)) == left
    large = digest_tensor(torch.randn(8), "word")
    assert Digest.parse(str(large)) == large
    assert len(str(Digest())) == 48
    assert Digest.parse(str(left)) + Digest.parse(str(right)) == right + left
