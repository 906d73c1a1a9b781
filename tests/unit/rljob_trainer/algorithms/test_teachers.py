"""On-policy distillation: a teacher's log-probs to a score and to advantages."""

import base64

import numpy as np
import pytest
import torch

from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import update_loss
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import (
    build_rows,
    episode_rewards,
    find_advantages,
    has_signal,
    score_group,
    should_replace,
)
from rljob_trainer.algorithms.teachers import score_by_teacher, teacher_advantages
from rljob_trainer.episodes.types import Episode, Group, ScoredResult, Segment, Turn

ENDPOINT = {"url": "http://t/v1", "model": "big"}


def teacher(name="t", weight=1.0, **fields):
    return {"name": name, "weight": weight, "teacher": {"endpoint": ENDPOINT, **fields}}


FUNCTION = {"name": "f", "function": {"inline": "x"}}


def algorithm_of(*rewards, **algorithm):
    spec = {"model": {"source": "m"}, "data": {"train": {"source": "d"}}, "rewards": list(rewards)}
    spec["rollout"] = {"sampling": {"maxTokens": 10}}
    return build_algorithm(RLJobSpec.model_validate({**spec, "algorithm": algorithm}))


def encode(*segments):
    return [base64.b64encode(np.array(each, "<f4").tobytes()).decode() for each in segments]


def told(*segments, **fields):
    given = {"id": "1", "valid": True, "score": -9.0, "logprobs": encode(*segments), **fields}
    return ScoredResult.model_validate(given)


def episode(logprobs, sample=0, results=None):
    """An episode of one segment, whose first token is the prompt."""
    count = len(logprobs)
    segment = Segment(range(count + 1), [0] + [1] * count, [0.0, *logprobs], [-1] + [0] * count, [-1] + [0] * count)
    return Episode(0, 0, sample, [segment], [Turn("")], "g", results=results or {})


def taught(logprobs, teachers, sample=0, score=None):
    """An episode that a teacher `t` has scored, and perhaps a function `f`."""
    found = episode(logprobs, sample)
    [reward] = algorithm_of(teacher()).settings.rewards
    found.results = {"t": score_by_teacher(reward.teacher, told(teachers), found)}
    if score is not None:
        found.results["f"] = ScoredResult(id="1", valid=True, score=score)
    return found


def group_of(*episodes, rewards):
    group = Group(0, Prompt(0, "p", [0]), list(episodes))
    score_group(group, rewards)
    return group


def test_the_score_is_minus_the_mean_difference():
    ended = episode([-1.0, -2.0, -0.5])
    limits = Reward.model_validate(teacher(clip=3.0)).teacher
    result = score_by_teacher(limits, told([-2.0, -1.0, -9.0]), ended)
    assert result.score == pytest.approx(-(1.0 - 1.0 + 3.0) / 3), "8.5 is clipped to 3"


@pytest.mark.parametrize("logprobs", [[[-1.0]], [[-1.0, -1.0], []], []])
def test_a_result_needs_a_log_prob_of_each_sampled_token(logprobs):
    limits = Reward.model_validate(teacher()).teacher
    result = score_by_teacher(limits, told(*logprobs), episode([-1.0, -2.0]))
    assert (result.valid, result.score, result.reason) == (False, None, InvalidReason.BAD_RETURN)


def test_an_invalid_result_and_one_with_a_given_score_stay():
    limits = Reward.model_validate(teacher()).teacher
    late = ScoredResult(id="1", valid=False, reason=InvalidReason.TIMEOUT)
    given = ScoredResult(id="1", valid=True, score=-3.0, failed_as=InvalidReason.TIMEOUT)
    for result in (late, given):
        ended = episode([-1.0], results={"t": result})
        assert score_by_teacher(limits, result, ended) is result
        assert teacher_advantages([Reward.model_validate(teacher())], ended) is None


def test_gradients_equal_those_of_the_sampled_reverse_kl():
    """On-policy, the gradient is that of verl's k1 as reward, and of TRL's with beta 1 on the sampled tokens:

        loss = mean over tokens of  sg(log pi - log nu) x log pi        d loss = mean of (log pi - log nu) d log pi

    verl: kl_penalty(logprob, ref_logprob, "k1") = logprob - ref_logprob in verl/trainer/ppo/core_algos.py, whose
    negative is the token's advantage in compute_policy_loss with ratio 1.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 30, generator=generator, dtype=torch.float64, requires_grad=True)
    nu = torch.randn(12, 30, generator=generator, dtype=torch.float64).log_softmax(-1)
    sampled = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    logprobs, theirs = logits.log_softmax(-1).gather(-1, sampled)[:, 0], nu.gather(-1, sampled)[:, 0]
    (expected,) = torch.autograd.grad(((logprobs - theirs).detach() * logprobs).mean(), logits, retain_graph=True)

    algorithm = algorithm_of(teacher())
    settings = algorithm.settings
    own = logprobs.detach().tolist()
    groups = [
        group_of(*(taught(own[i : i + 3], theirs[i : i + 3].tolist(), i) for i in (j, j + 3)), rewards=settings.rewards)
        for j in (0, 6)
    ]
    advantages = find_advantages(groups, episode_rewards(groups, settings), algorithm)
    rows = [row for each in build_rows(groups, advantages, settings) for row in each]
    given = torch.cat([torch.from_numpy(row.advantages[row.loss_mask]) for row in rows])
    inputs = LossInputs(
        logprobs.float(), logprobs.detach().float(), logprobs.detach().float(), given, torch.arange(12) // 3, 4
    )
    (found,) = torch.autograd.grad(update_loss(algorithm, inputs, weights=torch.full((12,), 1 / 12)).loss, logits)
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_a_teacher_adds_to_the_normalized_advantages_of_other_rewards():
    algorithm = algorithm_of(FUNCTION, teacher(weight=0.5, clip=2.0))
    settings = algorithm.settings
    group = group_of(
        taught([-1.0, -2.0], [-2.0, -2.0], 0, score=1.0),
        taught([-1.0], [-9.0], 1, score=0.0),
        rewards=settings.rewards,
    )
    assert [each.score for each in group.episodes] == [1.0, 0.0], "it is no term of the sum"
    [[first, second]] = find_advantages([group], episode_rewards([group], settings), algorithm)
    half = 0.5 / np.std([0.0, 1.0], ddof=1)
    assert first.advantages == pytest.approx([half - 0.5 * 1.0, half])
    assert second.advantages == pytest.approx([-half - 0.5 * 2.0]), "the difference of 8 is clipped to 2"
    assert len(settings.reward_weights) == 1


def test_advantages_follow_the_order_of_the_turns():
    # A program continued its first segment after it began the second one.
    first = Segment([0, 1, 2], [0, 1, 1], [0.0, -1.0, -3.0], [-1, 0, 0], [-1, 0, 2])
    second = Segment([0, 3], [0, 1], [0.0, -2.0], [-1, 0], [-1, 1])
    ended = Episode(0, 0, 0, [first, second], [Turn(""), Turn(""), Turn("")], "g")
    algorithm = algorithm_of(teacher())
    settings = algorithm.settings
    ended.results = {"t": score_by_teacher(settings.rewards[0].teacher, told([-1.5, -4.0], [-2.25]), ended)}
    group = group_of(ended, rewards=settings.rewards)
    given = episode_rewards([group], settings)
    assert given[0][0].teachers == pytest.approx([-0.5, -0.25, -1.0])
    [rows] = build_rows([group], find_advantages([group], given, algorithm), settings)
    assert [row.advantages.tolist() for row in rows] == [[0.0, -0.5, -1.0], [0.0, -0.25]]


def test_alone_it_is_the_score_that_is_shown_and_no_group_compares_it():
    algorithm = algorithm_of(teacher(weight=2.0), dynamicSampling={"enabled": "always"})
    settings = algorithm.settings
    group = group_of(taught([-1.0], [-1.5], 0), taught([-1.0], [-1.25], 1), rewards=settings.rewards)
    assert [each.score for each in group.episodes] == pytest.approx([-1.0, -0.5])
    [[first, second]] = find_advantages([group], episode_rewards([group], settings), algorithm)
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([-1.0], [-0.5])


def test_one_taught_episode_is_a_signal_and_equal_models_are_none():
    algorithm = algorithm_of(FUNCTION, teacher(), dynamicSampling={"enabled": "always"})
    rewards = algorithm.settings.rewards
    equal = group_of(*(taught([-1.0], [-1.0], i, score=1.0) for i in (0, 1)), rewards=rewards)
    apart = group_of(*(taught([-1.0], [-1.5], i, score=1.0) for i in (0, 1)), rewards=rewards)
    assert [has_signal(each, algorithm) for each in (equal, apart)] == [False, True]
    assert [should_replace(each, algorithm) for each in (equal, apart)] == [True, False]


def test_an_episode_that_a_teacher_failed_to_score_is_masked():
    rewards = algorithm_of(FUNCTION, teacher()).settings.rewards
    failed = taught([-1.0], [-1.5], 0, score=1.0)
    failed.results["t"] = ScoredResult(id="1", valid=False, reason=InvalidReason.TIMEOUT)
    other_row = episode([-1.0], 1, {"f": ScoredResult(id="1", valid=True, score=1.0)})
    assert [each.score for each in group_of(failed, other_row, rewards=rewards).episodes] == [None, 1.0]


def test_a_row_of_no_teacher_and_no_reward_does_not_train():
    rewards = algorithm_of(teacher()).settings.rewards
    assert group_of(episode([-1.0]), rewards=rewards).episodes[0].score is None


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({}, True),
        ({"data_source": ["math", "code"]}, True),
        ({"data_source": ["code"]}, False),
        ({"level": ["3"], "data_source": ["math"]}, True),
        ({"level": ["4"], "data_source": ["math"]}, False),
        ({"missing": ["x"]}, False),
    ],
)
def test_rows_have_their_teachers_by_column(when, expected):
    taught = Reward.model_validate(teacher(when=when))
    assert taught.scores_row({"level": 3}, "math") is expected
    assert Reward.model_validate(FUNCTION).scores_row({}, ""), "other rewards score all"
