"""The limit of prompts, and the table of their lengths."""

import pytest

from rljob_api.manifest.job import RLJob
from rljob_inputs.data.lengths import PromptLimit, find_limit, measure
from rljob_inputs.findings import describe_lengths


def spec(rollout=None, **sections):
    manifest = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}} | sections.pop("data", {}),
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "rollout": {"sampling": {"maxTokens": 32}} | (rollout or {}),
        **sections,
    }
    return RLJob.model_validate({"metadata": {"name": "j"}, "spec": manifest}).spec


@pytest.mark.parametrize(
    ("rollout", "data", "context", "expected"),
    [
        ({}, {}, None, PromptLimit()),
        ({}, {}, 128, PromptLimit(96, "the model's context 128 - rollout.sampling.maxTokens 32")),
        ({"maxModelLen": 64}, {}, 128, PromptLimit(32, "rollout.maxModelLen 64 - rollout.sampling.maxTokens 32")),
        ({"maxModelLen": 64}, {"maxPromptTokens": 20}, 128, PromptLimit(20, "data.maxPromptTokens")),
        ({}, {"maxPromptTokens": 200}, 128, PromptLimit(96, "the model's context 128 - rollout.sampling.maxTokens 32")),
    ],
)
def test_the_limit_is_the_strictest(rollout, data, context, expected):
    assert find_limit(spec(rollout, data=data), None, context) == expected


def test_evaluation_has_its_own_room():
    job = spec({"maxModelLen": 64}, data={"eval": {"source": "/e"}}, evaluation={"sampling": {"maxTokens": 50}})
    assert find_limit(job, job.held_out_sets[0], None).num_tokens == 14
    assert find_limit(job, None, None).num_tokens == 32


def test_prompt_of_a_given_conversation_needs_room_for_a_token_alone():
    assert find_limit(spec({"maxModelLen": 64}), None, 128, is_given=True) == PromptLimit(
        63, "rollout.maxModelLen 64 - the answer, at least 1"
    )


def test_a_limit_that_evaluation_shares_with_training_has_one_name():
    job = spec({"maxModelLen": 64}, data={"eval": {"source": "/e"}}, evaluation={"sampling": {"maxTokens": 32}})
    limit = find_limit(job, job.held_out_sets[0], None)
    assert limit.reason == "rollout.maxModelLen 64 - rollout.sampling.maxTokens 32"


def test_the_table_counts_what_is_left_out():
    table = measure([*range(1, 100), 6_011], "spec.data.train", 100, PromptLimit(99, "data.maxPromptTokens"))
    assert (table.min, table.median, table.p95, table.max) == (1, 50, 95, 6_011)
    assert table.num_too_long == 1
    assert describe_lengths(table) == (
        "spec.data.train: 100 prompts, in tokens: min 1, median 50, p95 95, max 6011; at most 99 "
        "(data.maxPromptTokens); 1 are left out"
    )
    sample = measure([1, 2], "spec.data.train", 50_000, PromptLimit(), is_whole=False)
    assert describe_lengths(sample).startswith(
        "spec.data.train: the first 50000 prompts (2 measured), in tokens: min 1"
    )
