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
from rljob_trainer.algorithms.teachers import find_top, score_by_teacher, teacher_advantages
from rljob_trainer.episodes.types import Episode, Group, ScoredResult, Segment, Turn, told_dtype

ENDPOINT = {"url": "http://t/v1", "model": "big"}


def teacher(name="t", weight=1.0, **fields):
    return {"name": name, "weight": weight, "teacher": {"endpoint": ENDPOINT, **fields}}


FUNCTION = {"name": "f", "function": {"inline": "x"}}


def algorithm_of(*rewards, **algorithm):
    spec = {"model": {"source": "m"}, "data": {"train": {"source": "d"}}, "rewards": list(rewards)}
    spec["rollout"] = {"sampling": {"maxTokens": 10}}
    return build_algorithm(RLJobSpec.model_validate({**spec, "algorithm": algorithm}))


def encode(*segments, dtype="<f4"):
    return [base64.b64encode(np.array(each, dtype).tobytes()).decode() for each in segments]


def told(*segments, dtype="<f4", **fields):
    given = {"id": "1", "valid": True, "score": -9.0, "logprobs": encode(*segments, dtype=dtype), **fields}
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


def told_top(*segments):
    """A result with topK. `segments`: for each token its log-prob and the likeliest tokens with theirs."""
    top_k = len(segments[0][0][1])
    return told(*(np.array(each, told_dtype(top_k)) for each in segments), dtype=told_dtype(top_k))


def test_with_top_k_the_likeliest_tokens_go_to_the_rows_and_no_advantage_does():
    algorithm = algorithm_of(teacher(topK=2), teacher("other", topK=1), teacher("third"))
    settings = algorithm.settings
    ended, untaught = episode([-1.0, -2.0]), episode([-1.0], 1)
    result = told_top([(-1.5, [(7, -0.5), (8, -1.5)]), (-1.0, [(9, -0.25), (8, -2.0)])])
    ended.results = {"t": score_by_teacher(settings.rewards[0].teacher, result, ended)}
    assert ended.results["t"].score == pytest.approx(-(0.5 - 1.0) / 2), "as without topK"
    group = group_of(ended, rewards=settings.rewards)
    assert has_signal(group, algorithm)
    given = find_advantages([group], episode_rewards([group], settings), algorithm)
    assert not given[0][0].advantages.any()
    [[row]] = build_rows([group], given, settings)
    nothing = [(0, -1e4), (0, -1e4)]
    assert row.top.tolist() == [[[(7, -0.5), (8, -1.5)], nothing], [[(9, -0.25), (8, -2.0)], nothing]]
    assert find_top(settings.top_teachers, untaught).tolist() == [[nothing, nothing]]
    assert not has_signal(group_of(untaught, rewards=settings.rewards), algorithm)


def test_each_segment_has_its_likeliest_tokens():
    first, second = (Segment([0, 1, 1], [0, *mask], [0.0] * 3, [-1, *mask], [-1, *mask]) for mask in ([1, 1], [0, 1]))
    settings = algorithm_of(teacher(topK=1)).settings
    ended = Episode(0, 0, 0, [first, second], [Turn(""), Turn("")], "g")
    ended.results = {"t": told_top([(-1.0, [(3, -0.5)]), (-1.0, [(4, -0.5)])], [(-1.0, [(5, -0.5)])])}
    group = group_of(ended, rewards=settings.rewards)
    [rows] = build_rows([group], [[None]], settings)
    assert [row.top["token"].ravel().tolist() for row in rows] == [[3, 4], [5]]


def test_top_k_needs_that_many_tokens():
    limits = Reward.model_validate(teacher(topK=2)).teacher
    for result in (told([-1.0]), told_top([(-1.0, [(3, -0.5)])])):
        assert score_by_teacher(limits, result, episode([-1.0])).reason is InvalidReason.BAD_RETURN


def test_the_loss_of_the_likeliest_tokens_is_the_clipped_divergence_of_each_teacher():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 30, generator=generator, requires_grad=True)
    nu = torch.randn(2, 12, 30, generator=generator).mul(2).log_softmax(-1)
    [first, second] = (each.topk(5) for each in nu)
    second.values[:6] = -1e4  # of rows that it does not teach
    logprobs = logits.log_softmax(-1)
    weights = torch.linspace(0, 1, 12)

    def divergence(own, likeliest):
        theirs = own.gather(1, likeliest.indices)
        return (likeliest.values.exp() * (likeliest.values - theirs)).sum(1)

    own = logprobs.detach()[:, 0]
    assert 0 < (divergence(logprobs, first) > 0.7).sum() < 12
    expected = 0.5 * divergence(logprobs, first).clamp(max=0.7) + 2.0 * divergence(logprobs, second).clamp(max=1.5)
    expected = torch.autograd.grad((weights * expected).sum(), logits, retain_graph=True)[0]
    algorithm = algorithm_of(teacher(topK=5, weight=0.5, clip=0.7), teacher("u", topK=5, weight=2.0, clip=1.5))
    tokens = torch.stack([first.indices, second.indices], 1)
    top = logprobs[:, None].expand(-1, 2, -1).gather(2, tokens), torch.stack([first.values, second.values], 1)
    inputs = LossInputs(logprobs[:, 0], own, own, torch.zeros(12), torch.arange(12), 12)
    loss = update_loss(algorithm, inputs, weights=weights, top=top).loss
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)


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
