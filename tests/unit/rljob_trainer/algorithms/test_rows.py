"""Scored groups to rewards, rows and denominators."""

import numpy as np
import pytest

from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import MAX_TRAJECTORIES
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.base import EpisodeAdvantages
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import (
    build_rows,
    denominator,
    episode_rewards,
    has_signal,
    inspection_rows,
    record_advantages,
    score_group,
    should_replace,
    usable_scores,
)
from rljob_trainer.episodes.types import (
    Completion,
    Episode,
    EpisodeFailure,
    Group,
    ScoredResult,
    Segment,
    TokenFacts,
    Turn,
    empty_segment,
)
from tests.support.episodes import episode


def reward(name="r", **fields):
    return Reward.model_validate({"name": name, "function": {"inline": "x"}, **fields})


PROGRAM = {"type": "program", "runner": {"function": {"inline": "x"}}, "rewardWeight": 0.5}


def algorithm_of(rewards=None, max_tokens=10, agent=None, **algorithm):
    spec = RLJobSpec.model_validate(
        {
            "model": {"source": "m"},
            "data": {"train": {"source": "d"}, "format": "chat"},
            "agent": agent or {},
            "rewards": [reward()] if rewards is None else rewards,
            "algorithm": algorithm,
            "rollout": {"sampling": {"maxTokens": max_tokens}},
        }
    )
    return build_algorithm(spec)


def results_of(**scores):
    """Return one result per reward; a score of None is an invalid result."""
    return {
        name: ScoredResult(
            id="x", valid=score is not None, score=score, reason=None if score is not None else "timeout"
        )
        for name, score in scores.items()
    }


def trajectory(sample, group=0, **scores):
    return episode([1, 2, 3], index=(0, group, sample), results=results_of(**scores))


def group_of(rewards, *scores, index=0):
    group = Group(index, Prompt(0, "p", [1]), [trajectory(i, index, **given) for i, given in enumerate(scores)])
    return scored(group, rewards)


def scored(group, rewards):
    score_group(group, rewards)
    return group


def weighted_score(each, rewards):
    return scored(Group(0, Prompt(0, "p", [1]), [each]), rewards).episodes[0].score


def answers(*lengths, scores=None, truncated=(), index=0):
    """Return a group whose episodes have answers of these lengths."""
    scores = scores or [float(i) for i in range(len(lengths))]
    episodes = [
        episode([1, *[2] * length], index=(0, index, i), truncated=i in truncated, results=results_of(r=score))
        for i, (length, score) in enumerate(zip(lengths, scores, strict=True))
    ]
    return scored(Group(index, Prompt(0, "p", [1]), episodes), [reward()])


def conversation(sample, *answers_of_segments, rewards=(), score=1.0, group=0):
    """Return an episode with segments; each segment has turns of so many tokens."""
    segments, turn = [], 0
    for turns in answers_of_segments:
        segment = empty_segment()
        for length in turns:
            segment.append_context([1, 1])
            completion = Completion([2] * length, [-0.5] * length, [3] * length, "", truncated=False)
            segment.append_sampled(completion, turn)
            turn += 1
        segments.append(segment)
    turns = [Turn("", reward=given) for given in (*rewards, *[None] * (turn - len(rewards)))]
    return Episode(0, group, sample, segments, turns, "g", results_of(r=score))


def train(groups, algorithm, facts=None):
    """Return the rows of each group, as the driver builds them."""
    settings = algorithm.settings
    return build_rows(groups, algorithm.advantages(episode_rewards(groups, settings, facts)), settings, facts)


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


def abstaining(rewards, *scores, parts=(), own=None):
    """Return the scores of a group. A score of "none" is an abstention. `parts`: those that abstain, by sample."""
    group = Group(0, Prompt(0, "p", [1]), [])
    for number, given in enumerate(scores):
        each = trajectory(number, **{name: None if score == "none" else score for name, score in given.items()})
        each.own_reward = own
        for name, score in given.items():
            changes = {"reason": InvalidReason.ABSTAINED} if score == "none" else {}
            changes |= {"abstained": parts[number]} if parts else {}
            each.results[name] = each.results[name].model_copy(update=changes)
        group.episodes.append(each)
    score_group(group, rewards)
    return [each.score for each in group.episodes]


def test_reward_that_abstains_from_the_whole_group_is_left_out():
    """As TRL's rewards of several tasks, each of which returns None for the rows of the others."""
    rewards = [reward("math", weight=2.0), reward("code")]
    assert abstaining(rewards, {"math": 1.0, "code": "none"}, {"math": 0.0, "code": "none"}) == [2.0, 0.0]
    assert abstaining(rewards, {"math": "none", "code": 1.0}) == [1.0]
    some = {"math": 0.5, "code": "none"}, {"math": 0.5, "code": 1.0}
    assert abstaining(rewards, *some) == [None, 2.0], "one that abstains from some masks these"
    assert abstaining(rewards, {"math": "none", "code": "none"}) == [None], "no reward scored it"
    assert abstaining(rewards, {"math": "none", "code": "none"}, own=0.25) == [0.25], "its environment did"
    late = abstaining(rewards, {"math": None, "code": "none"}, {"math": 1.0, "code": "none"})
    assert late == [None, 2.0], "the other reward timed out"
    failed = abstaining(rewards, {"math": 1.0, "code": None}, {"math": 1.0, "code": "none"})
    assert failed == [None, 2.0], "a failure is no abstention"


def test_function_of_a_list_that_abstains_from_the_whole_group_is_left_out():
    rewards, scores = [reward("r")], [{"r": 1.0}, {"r": 0.5}]
    assert abstaining(rewards, *scores, parts=[["code"], ["code"]]) == [1.0, 0.5]
    assert abstaining(rewards, *scores, parts=[["code"], []]) == [None, 0.5]


def of_program(*own_rewards, rewards=(), turn_rewards=None, **scores):
    """Return a group of a program that gave these rewards. `turn_rewards`: by number of the episode."""
    episodes = [
        episode([1, 2, 3], index=(0, 0, i), results=results_of(**scores), own_reward=own)
        for i, own in enumerate(own_rewards)
    ]
    for number, given in (turn_rewards or {}).items():
        episodes[number].turns[0].reward = given
    group = Group(0, Prompt(0, "p", [1]), episodes)
    score_group(group, rewards, PROGRAM["rewardWeight"])
    return group


def test_own_reward_of_a_program_is_added_with_its_weight():
    rewards = [reward("a", weight=2.0)]
    assert [each.score for each in of_program(3.0, None, rewards=rewards, a=1.0).episodes] == [3.5, 2.0]
    assert [each.score for each in of_program(3.0, -1.0).episodes] == [1.5, -0.5]
    assert of_program(1e308 * 3, 0.0).episodes[0].score is None


def test_episode_that_its_program_left_unscored_is_masked_and_never_a_zero():
    rewards = [reward("a")]
    assert usable_scores(of_program(2.0, None, 0.0, rewards=rewards, a=1.0), rewards) == [2.0, None, 1.0]
    rewarded = of_program(2.0, None, turn_rewards={1: 1.0}, rewards=rewards, a=1.0)
    assert usable_scores(rewarded, rewards) == [2.0, 1.0], "its turn has a reward"
    assert usable_scores(of_program(None, None, rewards=rewards, a=1.0), rewards) == [1.0, 1.0]


@pytest.mark.parametrize("per_reward", [False, True])
def test_job_without_rewards_trains_on_what_its_program_gives(per_reward):
    algorithm = algorithm_of([], agent=PROGRAM, advantages={"perReward": per_reward})
    group = of_program(1.0, 0.0, 1.0, 0.0)
    [rewards] = episode_rewards([group], algorithm.settings)
    assert [list(each.components) for each in rewards] == [[1.0, 0.0], [0.0, 0.0]] * 2
    [of_group] = algorithm.advantages([rewards])
    signs = [np.sign(each.advantages).tolist() for each in of_group]
    assert signs == [[1.0, 1.0], [-1.0, -1.0]] * 2
    assert has_signal(group, algorithm)
    assert not has_signal(of_program(1.0, 1.0), algorithm), "dynamic sampling replaces it"
    assert has_signal(of_program(None, None, turn_rewards={0: 1.0, 1: 0.0}), algorithm)


def test_drop_sample_masks_the_sample_and_drop_group_the_group():
    scores = [{"r": 1.0}, {"r": None}, {"r": 0.0}]
    drop_sample, drop_group = reward(), reward(failurePolicy={"action": "dropGroup"})
    assert usable_scores(group_of([drop_sample], *scores), [drop_sample]) == [1.0, None, 0.0]
    assert usable_scores(group_of([drop_group], *scores), [drop_group]) == [None, None, None]
    assert usable_scores(group_of([drop_group], {"r": 1.0}, {"r": 0.0}), [drop_group]) == [1.0, 0.0]


def test_invalid_result_cannot_have_a_score():
    with pytest.raises(ValueError, match="valid with a finite score"):
        ScoredResult(id="x", valid=False, score=0.0, reason=InvalidReason.TIMEOUT)


def test_rows_have_the_sampled_tokens_and_masked_episodes_train_on_none():
    algorithm = algorithm_of()
    [rows] = train([group_of(algorithm.settings.rewards, {"r": 1.0}, {"r": None}, {"r": 0.0})], algorithm)
    assert [row.loss_mask.tolist() for row in rows] == [[False, True, True], [False] * 3, [False, True, True]]
    assert [np.sign(row.advantages).tolist() for row in rows] == [[0, 1, 1], [0, 0, 0], [0, -1, -1]]
    assert all(row.token_ids.tolist() == [1, 2, 3] for row in rows), "the sampled tokens are the trained tokens"
    assert len({row.episode for row in rows}) == 3


def test_segments_of_an_episode_share_one_weight_and_one_number():
    algorithm = algorithm_of(loss={"level": "sequence"})
    parts, whole = conversation(0, [2, 1], [3], score=1.0), conversation(1, [4], score=0.0)
    group = scored(Group(7, Prompt(0, "p", [1]), [parts, whole]), algorithm.settings.rewards)
    for each in group.episodes:
        each.group = 7
    [rows] = train([group], algorithm)
    assert [row.weight for row in rows] == [1 / 6, 1 / 6, 1 / 4]
    assert rows[0].episode == rows[1].episode != rows[2].episode
    assert denominator([group], algorithm.settings) == 2, "two episodes, not three segments"
    assert rows[0].advantages[rows[0].loss_mask].tolist() == pytest.approx([2**-0.5] * 3)
    assert rows[0].versions.tolist() == [-1, -1, 3, 3, -1, -1, 3]


@pytest.mark.parametrize(("level", "expected"), [("token", 6.0), ("sequence", 2.0), ("constant", 2.0)])
def test_denominator_counts_trained_tokens_or_episodes_and_adds_up_over_groups(level, expected):
    algorithm = algorithm_of(loss={"level": level})
    groups = [answers(2, 4, 5, scores=[1.0, 0.0, None]), answers(3, 3, index=1)]
    assert denominator(groups[:1], algorithm.settings) == expected
    assert denominator(groups, algorithm.settings) == sum(denominator([group], algorithm.settings) for group in groups)


@pytest.mark.parametrize(("level", "weights"), [("token", [1, 1]), ("sequence", [0.5, 0.25]), ("constant", [0.1, 0.1])])
def test_weight_of_a_token_depends_on_the_loss_level(level, weights):
    [rows] = train([answers(2, 4)], algorithm := algorithm_of(loss={"level": level}, max_tokens=10))
    assert [row.weight for row in rows] == weights
    assert algorithm.settings.level == level


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_answer_without_tokens_is_in_no_denominator(level):
    algorithm = algorithm_of(loss={"level": level})
    assert denominator([answers(3, 0)], algorithm.settings) == denominator([answers(3)], algorithm.settings)


def test_episodes_of_different_groups_have_different_numbers():
    rows = train([answers(1, 2), answers(1, 2, index=1)], algorithm_of())
    assert len({row.episode for of_group in rows for row in of_group}) == 4


def test_truncated_answers_train_by_default():
    [rows] = train([answers(2, 10, truncated=[1])], algorithm_of())
    assert all(row.loss_mask.any() for row in rows)


def test_masked_truncated_answers_are_in_no_mean_and_no_denominator():
    algorithm = algorithm_of(truncated={"answers": "mask"})
    groups = [answers(2, 3, 10, scores=[0.0, 1.0, 9.0], truncated=[2])]
    [rows] = train(groups, algorithm)
    [without] = train([answers(2, 3)], algorithm)
    assert not rows[2].loss_mask.any()
    assert [row.advantages.tolist() for row in rows[:2]] == [row.advantages.tolist() for row in without]
    assert denominator(groups, algorithm.settings) == 5


def test_shaped_answers_lose_score_linearly_in_the_buffer():
    algorithm = algorithm_of(truncated={"answers": "shape", "bufferTokens": 4, "penalty": 2.0}, max_tokens=10)
    group = answers(6, 7, 8, 10, 5, scores=[1.0] * 5, truncated=[4])
    [rewards] = episode_rewards([group], algorithm.settings)
    assert [each.score for each in rewards] == [1.0, 0.5, 0.0, -1.0, -1.0], "at the limit, or cut for another reason"
    assert [each.components for each in rewards] == [[1, 0], [1, -0.5], [1, -1.0], [1, -2.0], [1, -2.0]]
    assert has_signal(group, algorithm), "equal scores, but other lengths"


def test_dapo_shapes_within_a_fifth_of_the_limit_and_replaces_groups():
    algorithm = algorithm_of(type="dapo", max_tokens=10)
    [rewards] = episode_rewards([answers(8, 9, scores=[1.0, 1.0])], algorithm.settings)
    assert [each.score for each in rewards] == [1.0, 0.5]
    assert algorithm.settings.max_replacements == 3 * 64
    assert should_replace(answers(2, 3, scores=[1.0, 1.0]), algorithm)
    assert not should_replace(answers(2, 3, scores=[1.0, 0.0]), algorithm)
    assert not should_replace(answers(2, 3, scores=[1.0, 1.0]), algorithm_of()), "grpo keeps them"


def test_length_of_an_episode_is_that_of_its_longest_answer():
    algorithm = algorithm_of(truncated={"answers": "shape", "bufferTokens": 4}, max_tokens=10)
    group = scored(Group(0, Prompt(0, "p", [1]), [conversation(0, [6, 6], [8])]), algorithm.settings.rewards)
    [[rewards]] = episode_rewards([group], algorithm.settings)
    assert rewards.score == 0.5, "20 tokens in all, but no answer has more than 8"


def test_turn_rewards_are_a_signal_and_are_passed_on():
    algorithm = algorithm_of()
    a, b = conversation(0, [1, 2], rewards=(1.0,)), conversation(1, [1], [2], rewards=(None, 1.0))
    group = scored(Group(0, Prompt(0, "p", [1]), [a, b]), algorithm.settings.rewards)
    [rewards] = episode_rewards([group], algorithm.settings)
    assert [each.turn_rewards for each in rewards] == [[1.0, 0.0], [0.0, 1.0]]
    assert [each.turn_of_token.tolist() for each in rewards] == [[0, 1, 1], [0, 1, 1]]
    assert has_signal(group, algorithm), "the same total, but earned in different turns"


def test_equal_scores_are_a_signal_for_a_critic():
    algorithm = algorithm_of(type="ppo")
    assert has_signal(answers(2, 3, scores=[1.0, 1.0]), algorithm)
    assert not has_signal(answers(2, 3, scores=[None, None]), algorithm)


def test_equal_turn_rewards_are_not_a_signal():
    algorithm = algorithm_of()
    a, b = conversation(0, [1], rewards=(1.0,)), conversation(1, [1], [2], rewards=(1.0,))
    assert not has_signal(scored(Group(0, Prompt(0, "p", [1]), [a, b]), algorithm.settings.rewards), algorithm)
    late = conversation(1, [1], score=2.0)
    assert has_signal(scored(Group(0, Prompt(0, "p", [1]), [a, late]), algorithm.settings.rewards), algorithm), (
        "1 + 1 is 2 at the end"
    )


def test_rewards_that_cancel_are_a_signal_if_each_is_normalized_alone():
    rewards = [reward("a"), reward("b")]
    group = group_of(rewards, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    assert not has_signal(group, algorithm_of(rewards))
    assert has_signal(group, algorithm_of(rewards, advantages={"perReward": True}))


def test_facts_are_put_where_their_tokens_are():
    algorithm = algorithm_of(kl={"coefficient": 0.1, "estimator": "k1"})
    group = scored(
        Group(0, Prompt(0, "p", [1]), [conversation(0, [1, 2], [1]), conversation(1, [1])]), algorithm.settings.rewards
    )
    rows = inspection_rows([group], algorithm.settings)
    assert [len(row.token_ids) for row in rows] == [7, 3, 3]
    facts = [
        TokenFacts(
            reference_logprobs=np.where(row.loss_mask, -0.5 - number, 0).astype(np.float32),
            values=np.where(row.loss_mask, number, 0).astype(np.float32),
        )
        for number, row in enumerate(rows)
    ]
    [[first, second]] = episode_rewards([group], algorithm.settings, facts)
    assert first.reference_kl.tolist() == [0, 0, 0, 1]
    assert second.reference_kl.tolist() == [2]
    assert first.values.tolist() == [0, 0, 0, 1]
    returns = [EpisodeAdvantages(np.arange(4.0), np.arange(4.0) + 5), EpisodeAdvantages(np.ones(1), np.ones(1))]
    [built] = build_rows([group], [returns], algorithm.settings, facts)
    assert built[0].returns.tolist() == [0, 0, 5, 0, 0, 6, 7]
    assert built[1].returns.tolist() == [0, 0, 8]
    assert built[1].values.tolist() == facts[1].values.tolist()
    assert built[1].reference_logprobs.tolist() == facts[1].reference_logprobs.tolist()


def test_score_of_turns_that_overflows_masks_the_episode():
    algorithm = algorithm_of()
    group = scored(
        Group(0, Prompt(0, "p", [1]), [conversation(0, [1], rewards=(1.5e308,), score=1.5e308), conversation(1, [1])]),
        algorithm.settings.rewards,
    )
    assert episode_rewards([group], algorithm.settings)[0][0] is None


def test_conversation_has_one_row_per_segment_with_the_advantages_of_its_turns():
    """The first turn got a reward of the user; the second is in a second segment."""
    algorithm = algorithm_of(advantages={"normalization": "none"})
    group = Group(0, Prompt(0, "p", [1]))
    for sample, (first, score) in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        one, two = (
            Segment([7, 8], [0, 1], [0.0, -1.0], [-1, 0], [-1, 0]),
            Segment([7, 9, 9], [0, 1, 1], [0.0, -1.0, -1.0], [-1, 0, 0], [-1, 1, 1]),
        )
        turns = [Turn("a", reward=first), Turn("b")]
        group.episodes.append(Episode(0, 0, sample, [one, two], turns, results=results_of(r=score), score=score))
    rewards = episode_rewards([group], algorithm.settings)
    advantages = algorithm.advantages(rewards)
    [rows] = build_rows([group], advantages, algorithm.settings)
    assert [len(row.token_ids) for row in rows] == [2, 3, 2, 3]
    assert [row.episode for row in rows] == [0, 0, MAX_TRAJECTORIES, MAX_TRAJECTORIES]
    by_turn = [sorted(set(row.advantages[row.loss_mask].tolist())) for row in rows]
    assert by_turn == [[0.0], [-1.0], [0.0], [1.0]], "what follows from a turn, against the other episode"
    for each in zip(group.episodes, rewards[0], advantages[0], strict=True):
        record_advantages(*each)
    assert [turn.advantage for turn in group.episodes[0].turns] == [0.0, -1.0]
    assert group.episodes[0].advantage == pytest.approx(-2 / 3)
    assert denominator([group], algorithm.settings) == 6


def test_failed_episode_is_masked_and_does_not_drop_its_group():
    policy = {"failurePolicy": {"action": "dropGroup"}}
    algorithm = algorithm_of([reward(**policy)])
    group = group_of(algorithm.settings.rewards, {"r": 1.0}, {"r": 0.0}, {"r": 1.0})
    failed = group.episodes[2]
    failed.results, failed.score = {}, None
    failed.failure = EpisodeFailure("user", "spec.agent.user", "timeout", "took 9 s")
    assert usable_scores(group, algorithm.settings.rewards) == [1.0, 0.0, None]
    [rewards] = episode_rewards([group], algorithm.settings)
    assert rewards[2] is None
    [rows] = build_rows([group], algorithm.advantages([rewards]), algorithm.settings)
    assert [bool(row.loss_mask.any()) for row in rows] == [True, True, False]


def branched(index):
    """Return an episode whose turns 0 and 2 are in one segment, with 1 between them in another."""
    found = conversation(index, [2, 3], [1], rewards=[0.5, 0.0, 2.0], score=float(index))
    first, second = found.segments
    first.turns = np.where(first.turns == 1, 2, first.turns)
    second.turns = np.where(second.turns == 2, 1, second.turns)
    return found


@pytest.mark.parametrize("level", ["token", "turn"])
def test_tokens_of_a_branched_episode_are_credited_in_the_order_of_its_turns(level):
    algorithm = algorithm_of(type="ppo", gae={"level": level, "decay": 0.5}, advantages={"normalization": "none"})
    straight = conversation(1, [2, 1, 3], rewards=[0.5, 0.0, 2.0], score=1.0)
    groups = [
        scored(Group(i, Prompt(0, "p", [1]), [each]), [reward()]) for i, each in enumerate([branched(1), straight])
    ]
    values = {0: [0.1, 0.2], 1: [0.3], 2: [0.4, 0.5, 0.6]}  # of the critic, by turn
    facts = [
        TokenFacts(values=values_of(segment, values))
        for group in groups
        for each in group.episodes
        for segment in each.segments
    ]
    of_branched, of_straight = train(groups, algorithm, facts)

    def by_turn(rows, episode, field):
        tokens = zip(rows, episode.segments, strict=True)
        return {
            turn: getattr(row, field)[np.array(segment.turns) == turn].tolist()
            for row, segment in tokens
            for turn in {*segment.turns} - {-1}
        }

    for field in ("advantages", "returns"):
        ours, expected = (
            by_turn(rows, group.episodes[0], field)
            for rows, group in zip((of_branched, of_straight), groups, strict=True)
        )
        assert ours == expected
    rewards = episode_rewards(groups[:1], algorithm.settings, facts[:2])
    [of_group] = algorithm.advantages(rewards)
    record_advantages(groups[0].episodes[0], rewards[0][0], of_group[0])
    assert [turn.advantage for turn in groups[0].episodes[0].turns] == pytest.approx(
        [float(np.mean(by_turn(of_branched, groups[0].episodes[0], "advantages")[turn])) for turn in range(3)]
    )


def values_of(segment, values):
    found = np.zeros(len(segment.turns), np.float32)
    for turn, of_turn in values.items():
        found[np.array(segment.turns) == turn] = of_turn if turn in segment.turns else []
    return found
