"""Episodes with several seats: each seat is compared with itself alone, and a zero-sum game has a signal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import (
    build_rows,
    denominator,
    episode_rewards,
    find_advantages,
    has_signal,
    training_scores,
)
from rljob_trainer.episodes.types import EpisodeFailure, Group
from tests.support.episodes import episode


def algorithm_of(type="grpo", **fields):
    return build_algorithm(
        RLJobSpec.model_validate(
            {
                "model": {"source": "m"},
                "data": {"train": {"source": "d"}, "format": "chat"},
                "agent": {"type": "program", "runner": {"function": {"inline": "x"}}, "seats": ["a", "b"]},
                "algorithm": {"type": type, **fields},
                "rollout": {"sampling": {"maxTokens": 8}},
            }
        )
    )


def group_of(*games, index=0, baseline="group"):
    """Return a group of episodes; `games`: for each its trajectories, as (seat, reward). None: it has failed."""
    episodes = []
    for sample, game in enumerate(games):
        for number, (seat, reward) in enumerate(game):
            failure = EpisodeFailure("runner", "spec.agent.runner", "timeout", "") if reward is None else None
            episodes.append(
                episode(
                    [1, 2, 3],
                    index=(0, index, sample),
                    seat=seat,
                    trajectory=number,
                    own_reward=reward,
                    score=reward,
                    failure=failure,
                    baseline=baseline,
                )
            )
    return Group(index, Prompt(0, "p", [1]), episodes)


def advantages_of(group, algorithm):
    """Return the advantage of each trajectory; None for a masked one."""
    [found] = find_advantages([group], episode_rewards([group], algorithm.settings), algorithm)
    return [None if each is None else float(each.advantages[0]) for each in found]


def test_a_zero_sum_game_has_a_signal_for_each_seat():
    group = group_of(*[(("a", won), ("b", -won)) for won in (1.0, 1.0, 1.0, -1.0)])
    algorithm = algorithm_of(advantages={"normalization": "none"})
    assert has_signal(group, algorithm)
    assert advantages_of(group, algorithm) == [0.5, -0.5, 0.5, -0.5, 0.5, -0.5, -1.5, 1.5]


def test_a_seat_that_always_wins_learns_nothing_from_winning():
    group = group_of((("a", 1.0), ("b", -1.0)), (("a", 1.0), ("b", -1.0)))
    algorithm = algorithm_of()
    assert not has_signal(group, algorithm), "a is compared with a, and not with b"
    assert advantages_of(group, algorithm) == [0.0] * 4


def test_one_seat_with_a_signal_is_enough():
    group = group_of((("a", 1.0), ("b", 0.0)), (("a", 0.0), ("b", 0.0)))
    assert has_signal(group, algorithm_of())


def test_trajectories_on_one_task_are_compared_within_their_episode():
    """Solvers of an easy problem are not better than those of a hard one."""
    easy, hard = [("solver", 1.0), ("solver", 1.0)], [("solver", 1.0), ("solver", 0.0)]
    group = group_of(easy, hard, baseline="episode")
    assert advantages_of(group, algorithm_of(advantages={"normalization": "none"})) == [0.0, 0.0, 0.5, -0.5]


def test_a_failed_episode_is_in_no_baseline():
    games = [(("a", 1.0), ("b", -1.0)), (("a", None), ("b", None)), (("a", -1.0), ("b", 1.0))]
    found = advantages_of(group_of(*games), algorithm_of(advantages={"normalization": "none"}))
    assert found == [1.0, -1.0, None, None, -1.0, 1.0]


def test_a_seat_without_a_reward_is_masked_only_where_its_seat_has_rewards():
    group = group_of((("a", 1.0), ("b", 0.0)), (("a", 0.0), ("b", 0.0)))
    group.episodes[2].own_reward = None
    for each in group.episodes[1::2]:
        each.own_reward = None
    assert training_scores(group, algorithm_of().settings) == [1.0, 0.0, None, 0.0]


@pytest.mark.parametrize("normalization", ["group", "none"])
@given(rewards=st.lists(st.lists(st.integers(-4, 4), min_size=2, max_size=5), min_size=1, max_size=3))
def test_advantages_are_those_of_each_seat_alone(normalization, rewards):
    """Whatever the other seats got, and however many seats there are."""
    num_games = min(map(len, rewards))
    algorithm = algorithm_of(advantages={"normalization": normalization})
    seats = [f"seat{number}" for number in range(len(rewards))]
    games = [
        [(seat, float(of_seat[game])) for seat, of_seat in zip(seats, rewards, strict=True)]
        for game in range(num_games)
    ]
    together = advantages_of(group_of(*games), algorithm)
    for number, seat in enumerate(seats):
        alone = group_of(*[[(seat, reward) for name, reward in game if name == seat] for game in games])
        assert together[number :: len(seats)] == advantages_of(alone, algorithm)


def test_without_seats_a_group_is_one_part():
    group = group_of([("", 1.0)], [("", 0.0)])
    assert group.compared() == [[0, 1]]
    assert [len(each) for each in group.by_sample()] == [1, 1]


def test_each_trajectory_is_a_row_of_its_own_and_counts_once():
    groups = [group_of((("a", 1.0), ("b", -1.0)), (("a", -1.0), ("b", 1.0)), index=index) for index in (0, 1)]
    algorithm = algorithm_of()
    advantages = find_advantages(groups, episode_rewards(groups, algorithm.settings), algorithm)
    rows = [row for of_group in build_rows(groups, advantages, algorithm.settings) for row in of_group]
    assert len({row.episode for row in rows}) == len(rows) == 8
    num_tokens = sum(int(np.count_nonzero(row.loss_mask)) for row in rows)
    assert denominator(groups, algorithm.settings) == (num_tokens if algorithm.settings.level == "token" else 8)
