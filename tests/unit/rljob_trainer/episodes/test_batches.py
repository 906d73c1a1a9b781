"""Scored groups to training samples."""

import pytest

from rljob_api.manifest.algorithm import Algorithm
from rljob_api.manifest.reward import Reward
from rljob_api.wire.protocol import InvalidReason, ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.batches import build_samples, usable_scores, weighted_score
from rljob_trainer.episodes.types import Group
from tests.support.episodes import episode


def reward(name="r", **fields):
    return Reward.model_validate({"name": name, "function": {"inline": "x"}, **fields})


def trajectory(sample, **scores):
    """Return a trajectory with one result per reward; a score of None is an invalid result."""
    results = {
        name: ScoreResult(id="x", valid=score is not None, score=score, reason=None if score is not None else "timeout")
        for name, score in scores.items()
    }
    return episode([1, 2, 3], index=(0, 0, sample), results=results)


def group_of(rewards, *scores):
    group = Group(0, Prompt(0, "p", [1]), [trajectory(i, **given) for i, given in enumerate(scores)])
    for each in group.episodes:
        each.score = weighted_score(each, rewards)
    return group


def test_score_is_the_weighted_sum():
    rewards = [reward("a", weight=2.0), reward("b", weight=-1.0)]
    assert weighted_score(trajectory(0, a=1.5, b=0.5), rewards) == 2.5


@pytest.mark.parametrize("scores", [{"a": 1.0, "b": None}, {"a": 1.0}])
def test_score_is_none_with_an_invalid_or_missing_reward(scores):
    assert weighted_score(trajectory(0, **scores), [reward("a"), reward("b", weight=0.0)]) is None


def test_score_is_none_when_the_sum_overflows():
    rewards = [reward("a", weight=10.0), reward("b")]
    assert weighted_score(trajectory(0, a=1.5e308, b=1.0), rewards) is None
    found = usable_scores(group_of(rewards, {"a": 1.5e308, "b": 1.0}, {"a": 0.5, "b": 1.0}), rewards)
    assert found == [None, 6.0], "an infinite score would leave its whole group without a signal"


def test_drop_sample_masks_the_sample_and_drop_group_the_group():
    scores = [{"r": 1.0}, {"r": None}, {"r": 0.0}]
    drop_sample, drop_group = reward(), reward(failurePolicy={"action": "dropGroup"})
    assert usable_scores(group_of([drop_sample], *scores), [drop_sample]) == [1.0, None, 0.0]
    assert usable_scores(group_of([drop_group], *scores), [drop_group]) == [None, None, None]
    assert usable_scores(group_of([drop_group], {"r": 1.0}, {"r": 0.0}), [drop_group]) == [1.0, 0.0]


def test_each_trajectory_becomes_one_sample_and_masks_are_kept():
    rewards = [reward()]
    samples = build_samples([group_of(rewards, {"r": 1.0}, {"r": None}, {"r": 0.0})], rewards, Algorithm())
    assert [sample.loss_mask for sample in samples] == [[0, 1, 1], [0, 0, 0], [0, 1, 1]]
    assert [sample.advantage > 0 for sample in samples] == [True, False, False]
    assert samples[1].advantage == 0.0
    assert all(sample.token_ids == [1, 2, 3] for sample in samples), "the sampled tokens are the trained tokens"


def test_invalid_result_cannot_have_a_score():
    with pytest.raises(ValueError, match="valid with a finite score"):
        ScoreResult(id="x", valid=False, score=0.0, reason=InvalidReason.TIMEOUT)
