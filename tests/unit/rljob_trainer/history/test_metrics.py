"""Metrics of a step and of an evaluation."""

import math
from dataclasses import replace

import pytest

from rljob_api.run.metrics import AgentNumbers, ScheduleNumbers, ToolNumbers, UpdateNumbers
from rljob_trainer.episodes.types import (
    ContextBreak,
    EpisodeEnd,
    EpisodeFailure,
    ScoredResult,
    ToolCall,
    Turn,
    UpdateMetrics,
)
from rljob_trainer.history.metrics import (
    count_invalid,
    count_staleness,
    mean,
    quantile,
    std,
    summarize_episodes,
    summarize_schedule,
    summarize_scores,
    summarize_updates,
)
from tests.support.episodes import episode


def trajectory(score=None, **results):
    return episode([1], [1], results=results, score=score)


def valid(score, **components):
    return ScoredResult(id="x", valid=True, score=score, components=components)


def invalid(reason):
    return ScoredResult(id="x", valid=False, reason=reason)


def test_means_are_over_valid_results_only():
    trajectories = [trajectory(1.0, r=valid(1.0, exact=1.0)), trajectory(r=invalid("timeout"))]
    assert summarize_scores(trajectories) == {"score": 1.0, "exact": 1.0}, "an invalid result is not a zero"
    assert count_invalid(trajectories) == {"timeout": 1}


def test_summary_is_empty_without_valid_results():
    assert summarize_scores([trajectory(r=invalid("exception"))]) == {}


def test_components_of_several_rewards_have_prefixes():
    found = summarize_scores([trajectory(3.0, a=valid(1.0, acc=1.0), b=valid(2.0, acc=0.0))])
    assert found == {"score": 3.0, "a": 1.0, "a/acc": 1.0, "b": 2.0, "b/acc": 0.0}


def test_components_keep_their_prefixes_in_a_step_that_one_reward_did_not_score():
    found = summarize_scores([trajectory(1.0, a=valid(1.0, acc=0.0))], ["a", "teacher-of-other-rows"])
    assert found == {"score": 1.0, "a": 1.0, "a/acc": 0.0}


def test_reward_of_a_program_counts_as_one_with_the_numbers_of_its_info():
    info = {"solved": True, "moves": 3, "why": "text", "bad": math.nan, "huge": 10**400}
    alone = episode([1], [1], own_reward=0.5, info=info, score=0.5)
    assert summarize_scores([alone]) == {"score": 0.5, "solved": 1.0, "moves": 3.0}
    both = episode([1], [1], own_reward=0.5, info={"solved": 0}, score=1.5, results={"r": valid(1.0, exact=1.0)})
    assert summarize_scores([both]) == {"score": 1.5, "r": 1.0, "r/exact": 1.0, "runner": 0.5, "runner/solved": 0.0}
    failed = replace(alone, failure=EpisodeFailure("runner", "spec.agent.runner", "timeout", "x"), score=None)
    assert summarize_scores([failed]) == {}


def test_statistics_of_too_few_values_are_unknown():
    assert (mean([]), std([1.0]), quantile([], 0.5)) == (None, None, None)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(1, 101), 0.95) == 95


def test_huge_numbers_do_not_overflow_summaries():
    assert mean([1.7e308, 1.7e308]) == 1.7e308
    assert mean([1e308] * 3 + [-1e308]) == pytest.approx(5e307)
    assert std([1e200, -1e200]) == pytest.approx(math.sqrt(2) * 1e200)
    assert summarize_scores([trajectory(1.0, r=valid(1.0, length=1.7e308))] * 4)["length"] == 1.7e308


def test_total_reward_has_the_rewards_of_turns():
    rewarded = trajectory(0.5)
    rewarded.turns = [Turn("a", reward=-0.25), Turn("b"), Turn("c", reward=1.0)]
    assert rewarded.total_reward == 1.25
    unscored = trajectory()
    unscored.turns = rewarded.turns
    assert unscored.total_reward is None
    rewarded.score, rewarded.turns[2].reward = 1.7e308, 1.7e308
    assert rewarded.total_reward is None


def test_lengths_count_sampled_tokens_only():
    short = episode([1, 2, 3])
    long = episode([1] * 6, [0, 0, 1, 1, 1, 1], truncated=True)
    found = summarize_episodes([short, long])
    assert (found.response_tokens_mean, found.response_tokens_max, found.truncated_share) == (3.0, 4, 0.5)
    nothing = summarize_episodes([])
    assert (nothing.response_tokens_mean, nothing.response_tokens_max, nothing.truncated_share) == (None, None, None)
    assert nothing.num_samples == 0


def test_kl_without_a_reference_is_unknown():
    update = UpdateMetrics(0.1, 0.1, 0.0, 1.5, 2.0, 1e-5, 0.0, 0.02, 64, 1, 0.5)
    assert summarize_updates([update], has_reference=False).kl is None
    assert summarize_updates([update], has_reference=True).kl == 0.0
    assert summarize_updates([], has_reference=True) == UpdateNumbers()


def test_mismatch_is_of_the_first_update_and_the_shares_are_of_all():
    update = UpdateMetrics(0.1, 0.1, 0.0, 1.5, 2.0, 1e-5, 0.0, 0.02, 64, 1, 0.5)
    first = replace(update, mismatch_kl=0.01, mismatch_max=0.5, corrected_share=0.1, effective_sample_share=0.9)
    second = replace(update, mismatch_kl=0.3, mismatch_max=9.0, corrected_share=0.3, is_skipped=True)
    found = summarize_updates([first, second], has_reference=False)
    assert (found.mismatch_kl, found.mismatch_max) == (0.01, 0.5), "the second differs on purpose"
    assert (found.corrected_share, found.effective_sample_share) == pytest.approx((0.2, 0.95))
    assert found.num_skipped_updates == 1


def test_means_over_tokens_are_of_updates_with_trained_tokens():
    """A mini-batch whose groups all have equal scores runs no forward pass."""
    update = UpdateMetrics(0.1, 0.1, 0.0, 1.5, 2.0, 1e-5, 0.0, 0.02, 60, 1, 0.5, trained_share=0.5)
    idle = UpdateMetrics(0.0, 0.0, 0.0, 0.0, 0.0, 1e-5, 0.0, 0.0, 30, 0, 0.1, trained_share=0.0)
    found = summarize_updates([idle, update], has_reference=False)
    assert (found.loss, found.entropy, found.logprob_difference) == (0.05, 1.5, 0.02)
    assert (found.num_tokens, found.trained_share) == (90, pytest.approx(1 / 3))
    unknown = summarize_updates([idle], has_reference=True)
    assert (unknown.entropy, unknown.kl, unknown.mismatch_kl, unknown.effective_sample_share) == (None,) * 4


def test_loss_of_the_critic_is_unknown_without_one():
    update = UpdateMetrics(0.1, 0.1, 0.0, 1.5, 2.0, 1e-5, 0.0, 0.02, 64, 1, 0.5)
    with_critic = [replace(update, critic_loss=loss) for loss in (0.1, 0.3)]
    assert summarize_updates([update], has_reference=False).critic_loss is None
    assert summarize_updates(with_critic, has_reference=False).critic_loss == pytest.approx(0.2)


def test_staleness_counts_sampled_tokens_from_the_steps_finished_before():
    fresh = episode([1, 2, 3], [0, 1, 1], version=7)
    mixed = episode([1, 2, 3], [0, 1, 1], version=5)
    mixed.segments[0].versions[2] = 6
    staleness = count_staleness([fresh, mixed], finished_steps=7)
    assert staleness == {0: 2, 2: 1, 1: 1}
    assert summarize_schedule(staleness, {"trainer": 0.5}, 3) == ScheduleNumbers(
        staleness_mean=0.75,
        staleness_max=2,
        staleness_histogram={0: 2, 1: 1, 2: 1},
        busy_shares={"trainer": 0.5},
        num_replaced_groups=3,
    )


def test_staleness_without_tokens_is_unknown():
    found = summarize_schedule({}, {}, 0)
    assert (found.staleness_mean, found.staleness_max, found.staleness_histogram) == (None, None, {})


def test_conversations_are_summarized_by_end_tool_and_cause():
    calls = [
        ToolCall("0", "add", {}, seconds=1.0, tool="calc"),
        ToolCall("1", "add", {}, error="timeout: 30 s", seconds=3.0, tool="calc"),
        ToolCall("2", "oops", None, error="there is no function oops"),
    ]
    first = episode(messages=[{}], end=EpisodeEnd.USER, breaks=[ContextBreak("history")])
    first.turns = [Turn("a", reward=-0.5, user_seconds=1.0), Turn("b", tool_calls=calls), Turn("c", reward=1.0)]
    failure = EpisodeFailure("user", "spec.agent.user", "timeout", "took 9 s")
    second = episode(messages=[{}], end=EpisodeEnd.FAILED, failure=failure)
    found = summarize_episodes([first, second, trajectory(1.0)])
    assert found.agent == AgentNumbers(
        turns_mean=2.0,
        turn_reward_mean=0.25,
        user_seconds_mean=1.0,
        user_seconds_max=1.0,
        tool_calls_mean=1.5,
        tools={
            "_none": ToolNumbers(calls=1, errors=1, seconds_mean=0.0, seconds_max=0.0),
            "calc": ToolNumbers(calls=2, errors=1, seconds_mean=2.0, seconds_max=3.0),
        },
        segments_mean=1.0,
        segments_by_cause={"history": 1},
        episodes_by_end={"user": 1, "failed": 1},
        failures={"user": 1},
    )
    assert (found.num_samples, found.num_invalid, found.invalid_by_reason) == (3, 1, {"timeout": 1})


def test_single_turns_have_no_part_about_conversations():
    assert summarize_episodes([trajectory(1.0)]).agent is None


def test_each_seat_has_its_mean_and_a_seat_that_failed_none():
    seats = [("first", 1.0), ("second", -1.0), ("first", 0.0), ("second", None), ("third", None)]
    found = summarize_episodes([episode(seat=seat, score=score) for seat, score in seats])
    assert found.seat_rewards == {"first": 0.5, "second": -1.0, "third": None}
    assert summarize_episodes([episode(score=1.0)]).seat_rewards == {}, "episodes with one player"
