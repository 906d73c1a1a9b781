"""The parts of a trainer rank, against figures that `make bench-plan` found in the real policy."""

from dataclasses import replace

import pytest
from memory_plan.cases import ALL_CASES, QWEN25_1B5, QWEN25_7B, SMOLLM2_135M, Case

from rljob_inputs.memory import trainer
from rljob_inputs.memory.limits import ShardingMode, choose_sharding

MIB, GIB = 2**20, 2**30
WHOLE = ShardingMode(keep_gathered=True, reduce_once=True)
SHARDED = ShardingMode(keep_gathered=False, reduce_once=False)
SMALL = Case("", SMOLLM2_135M, 4, 4, 512, WHOLE).build_work()
MEDIUM = Case("", QWEN25_1B5, 4, 8, 2048, SHARDED).build_work()
SELECTIVE = Case("", QWEN25_1B5, 4, 8, 2048, SHARDED, recomputation="selective").build_work()
LARGE = Case("", QWEN25_7B, 4, 8, 2048, SHARDED, recomputation="full").build_work()
WIDE = Case("", SMOLLM2_135M, 4, 2, 512, WHOLE, head_dtype="float32").build_work()
WIDE_BLOCKS = Case("", SMOLLM2_135M, 4, 8, 512, WHOLE, head_dtype="float32").build_work()


@pytest.mark.parametrize(
    ("work", "found"),
    [  # MiB, by torch's memory tracker
        (SMALL, {"state": 384.9, "activation": 1451.8, "logits": 341.7}),
        (MEDIUM, {"state": 4416.6, "activation": 45465.9, "layer_backward": 976.3}),
        (SELECTIVE, {"activation": 23062.5}),
        (LARGE, {"state": 21788.5, "activation": 3585.5, "layer_backward": 5983.1}),
        (WIDE, {"logits": 343.1}),
        (WIDE_BLOCKS, {"logits": 451.6}),
    ],
    ids=["0.135B", "1.5B", "1.5B, selective", "7B with checkpointing", "fp32 head", "fp32 head in blocks"],
)
def test_parts_are_those_of_the_memory_tracker(work, found):
    planned = {name: getattr(trainer, f"{name}_bytes")(work) / MIB for name in found}
    assert planned == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("1.5B on 4, 16k tokens", 7075.5),
        ("1.5B on 4, 16k tokens, selective", 6419.4),
        ("7B on 4, 16k tokens, checkpointing", 19274.2),
        ("32B on 16, 16k tokens, checkpointing", 22271.9),
    ],
)
def test_the_peak_of_an_update_is_that_of_the_memory_tracker(name, total):
    case = next(case for case in ALL_CASES if case.name == name)
    (update,) = trainer.plan_rank(case.with_layers(2).build_work())
    assert update.num_bytes / MIB == pytest.approx(total, rel=0.02)


def test_gradients_that_add_up_whole_are_held_in_addition_to_the_shards():
    once = replace(MEDIUM, mode=replace(SHARDED, reduce_once=True))
    parameters = MEDIUM.shape.num_parameters
    assert trainer.gradient_bytes(once) == 4 * parameters + parameters
    assert trainer.gradient_bytes(replace(once, num_shards=8)) == pytest.approx(4.5 * parameters)


def test_gradients_that_are_reduced_at_once_shrink_with_the_ranks():
    shards = [trainer.gradient_bytes(replace(LARGE, num_shards=n)) - 4 * LARGE.shape.root_parameters for n in (2, 32)]
    assert shards[0] == 16 * shards[1] == pytest.approx(2 * LARGE.shape.num_parameters)


def test_adapters_leave_the_weights_of_the_model_in_the_compute_dtype():
    adapters = MEDIUM.shape.adapter_parameters(32, [])
    work = replace(MEDIUM, adapter_parameters=adapters)
    assert trainer.state_bytes(work) * 4 == 2 * MEDIUM.shape.num_parameters + 12 * adapters
    assert trainer.gradient_bytes(work) * 4 == 4 * adapters
    assert trainer.logits_bytes(work) < trainer.logits_bytes(MEDIUM), "a frozen head has no gradient"


def test_a_reference_model_adds_a_shard_and_a_moment():
    update, reference = trainer.plan_rank(replace(MEDIUM, has_reference=True))
    own = {part.name: part.num_bytes for part in update.parts}
    assert own["reference"] * 4 == 2 * MEDIUM.shape.num_parameters
    assert "gathered reference" in {part.name for part in reference.parts}


def test_a_critic_is_trained_whole():
    (update,) = trainer.plan_rank(replace(LARGE, has_critic=True))
    critic = next(part.num_bytes for part in update.parts if part.name == "critic")
    assert critic * 4 == 16 * LARGE.shape.decoder_parameters
    assert LARGE.shape.decoder_parameters < LARGE.shape.num_parameters, "without a head"


def test_eager_attention_keeps_the_weights_of_all_pairs():
    more = trainer.layer_bytes(replace(MEDIUM, attention="eager")) - trainer.layer_bytes(MEDIUM)
    assert more == 12 * 2048 * 6


@pytest.mark.parametrize(
    ("billions", "expected"),
    [(0.5, WHOLE), (7, ShardingMode(keep_gathered=True, reduce_once=False)), (32, SHARDED)],
)
def test_a_gpu_keeps_whole_what_is_small(billions, expected):
    assert choose_sharding(int(billions * 1e9), 0, 2, 80 * GIB) == expected


def test_offload_moves_parts_from_the_device_to_the_host():
    whole = replace(MEDIUM, has_reference=True, has_critic=True)
    reference, everything = (replace(whole, offloads_reference=True, offloads_state=each) for each in (False, True))
    assert trainer.plan_offloaded(whole) == ()
    for work in (reference, everything):
        for before, after in zip(trainer.plan_rank(whole), trainer.plan_rank(work), strict=True):
            moved = sum(part.num_bytes for part in trainer.plan_offloaded(work) if is_in(part, before))
            assert before.num_bytes - after.num_bytes == moved > 0
    assert [part.name for part in trainer.plan_offloaded(reference)] == ["reference"]
    names = {part.name for part in trainer.plan_offloaded(everything)}
    assert names == {"state", "reference", "critic", "gradients"}


def is_in(part, moment):
    return part.name in {each.name for each in moment.parts}
