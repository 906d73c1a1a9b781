"""What is computed again in the backward pass: by the plan, and for all ranks alike."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_plan.cases import QWEN25_1B5, QWEN25_7B, QWEN25_32B, SMOLLM2_135M

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.limits import LOGITS_BLOCK_BYTES, UPDATE_SHARE_OF_DEVICE_MEMORY
from rljob_inputs.memory.plan import (
    ModelFacts,
    Question,
    build_work,
    find_recomputation,
    plan_memory,
    plan_update,
)
from rljob_inputs.memory.recomputation import CHOICES, find_stronger, plan_choices
from rljob_inputs.models.defaults import resolve_job

GIB = 2**30
LARGE = {"microBatchTokens": 16384}


def ask(config, gpu_gib, *, rows=1024, shared=False, **trainer):
    rollout = {"sampling": {"maxTokens": rows // 2}, "maxModelLen": rows}
    if shared:
        rollout |= {"placement": "trainer", "gpusPerReplica": 1}
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}},
        "rewards": [{"name": "r", "http": {"url": "http://r"}}],
        "trainer": {"gpusPerReplica": 1, **trainer},
        "rollout": rollout,
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    resolved = resolve_job(RLJob.model_validate(job), None)
    return Question(resolved, {"/m": ModelFacts(config)}, gpu_gib and int(gpu_gib * GIB))


@pytest.mark.parametrize(
    ("config", "trainer", "expected"),
    [
        (SMOLLM2_135M, LARGE, ["none", "none", "none"]),
        (QWEN25_1B5, LARGE, ["full", "full", "selective"]),
        (QWEN25_1B5, {"microBatchTokens": 8192}, ["full", "selective", "none"]),
        (QWEN25_1B5, LARGE | {"lora": {"rank": 32}}, ["full", "selective", "none"]),
        (QWEN25_7B, LARGE | {"gpusPerReplica": 8}, ["full", "full", "full"]),
        (QWEN25_7B, {"gpusPerReplica": 8, "microBatchTokens": 8192}, ["full", "full", "selective"]),
    ],
)
def test_the_least_that_fits_is_computed_again(config, trainer, expected):
    assert [find_recomputation(ask(config, gib, **trainer)) for gib in (24, 48, 80)] == expected


@pytest.mark.parametrize(
    ("config", "gib", "trainer", "expected"),
    [
        (QWEN25_1B5, 80, {}, (16384, "selective")),
        (QWEN25_7B, 80, {"gpusPerReplica": 8}, (8192, "selective")),
        (QWEN25_7B, 80, {"gpusPerReplica": 4}, (4096, "selective")),
        (QWEN25_7B, 80, {"gpusPerReplica": 8, "offload": "all"}, (16384, "full")),
        (QWEN25_7B, 80, {"gpusPerReplica": 8, "gradientCheckpointing": "full"}, (16384, "full")),
        (QWEN25_32B, 80, {"gpusPerReplica": 16}, (16384, "full")),
        (QWEN25_32B, 90, {"gpusPerReplica": 8}, (4096, "full")),
        (QWEN25_7B, 20, {"gpusPerReplica": 8}, (4096, "full")),
        (QWEN25_7B, None, {"gpusPerReplica": 8}, (16384, "full")),
        (SMOLLM2_135M, None, {"gpusPerReplica": 0}, (16384, "none")),
    ],
)
def test_micro_batches_are_the_largest_with_which_no_layer_is_computed_again(config, gib, trainer, expected):
    found = plan_update(ask(config, gib, **trainer))
    assert (found.micro_batch_tokens, found.recomputation) == expected


def test_a_micro_batch_that_the_job_sets_counts_as_it_is():
    found = plan_update(ask(QWEN25_7B, 80, gpusPerReplica=8, microBatchTokens=20000))
    assert (found.micro_batch_tokens, found.recomputation) == (20000, "full")


def test_all_logits_are_kept_where_an_update_then_leaves_some_of_the_gpu_free():
    whole = 16384 * QWEN25_1B5["vocab_size"] * 2
    kept = [plan_update(ask(QWEN25_1B5, gib, rows=2048, **LARGE)).kept_logits_bytes for gib in (24, 80)]
    assert kept == [LOGITS_BLOCK_BYTES, whole]
    assert plan_update(ask(QWEN25_1B5, None, gpusPerReplica=0)).kept_logits_bytes == LOGITS_BLOCK_BYTES


@pytest.mark.parametrize("choice", CHOICES)
def test_a_setting_of_the_job_counts_as_it_is(choice):
    assert find_recomputation(ask(QWEN25_7B, 24, gradientCheckpointing=choice)) == choice


def test_without_gpus_nothing_is_computed_again_and_without_their_memory_everything():
    assert find_recomputation(ask(QWEN25_7B, None, gpusPerReplica=0)) == "none"
    assert find_recomputation(ask(QWEN25_7B, None)) == "full"
    assert find_recomputation(ask({"model_type": "mamba"}, 80)) == "full"


@given(st.sampled_from([SMOLLM2_135M, QWEN25_1B5, QWEN25_7B]), st.integers(4, 200), st.booleans())
def test_the_choice_leaves_some_of_the_gpu_free_and_the_faster_ones_would_not(config, gib, shared):
    question = ask(config, gib, shared=shared)
    work = build_work(question, question.models["/m"].shape, question.gpu_bytes)
    needs, chosen = plan_choices(question.job.spec, work), find_recomputation(question)
    limit = UPDATE_SHARE_OF_DEVICE_MEMORY * gib * GIB
    assert list(needs) == list(CHOICES)
    assert sorted(needs.values(), reverse=True) == list(needs.values())
    assert chosen == "full" or needs[chosen] <= limit
    assert all(needs[faster] > limit for faster in CHOICES[: CHOICES.index(chosen)])
    trainer = next(need for need in plan_memory(question) if (need.role, need.resource) == ("trainer", "gpu"))
    update = next(moment for moment in trainer.moments if moment.name == "update")
    assert update.num_bytes == needs[chosen], "the plan has the choice"


@given(st.integers(1, 4096))
def test_measured_prompts_that_ranks_do_not_know_change_nothing(length):
    question = ask(QWEN25_1B5, 48)
    assert find_recomputation(replace(question, max_prompt_tokens=length)) == find_recomputation(question)


def test_each_choice_but_the_last_has_a_stronger_one():
    assert [find_stronger(choice) for choice in CHOICES] == [("selective", "full"), ("full",), ()]
