"""Each algorithm, from scored groups to the gradient, against a plain torch computation by its paper's formula.

The plain computation uses nothing of the project: it loops over episodes and takes means, where the project sums over
tokens with weights and divides at the end.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import loglinear_proximal, update_loss
from rljob_trainer.algorithms.registry import ALGORITHMS, build_algorithm
from rljob_trainer.algorithms.rows import build_rows, denominator, episode_rewards
from rljob_trainer.episodes.types import Episode, Group, ScoredResult, Segment, Turn
from rljob_trainer.policy.layout import proximal_shares
from tests.support.algorithms import algorithm_spec, rewards_of

VOCABULARY, MAX_TOKENS = 5, 12
PROXIMAL, CURRENT, END = 3.0, 3.5, 4.0
"""Versions of the weights: the second of two mini-batches in step 3."""
GROUP_BASED = [name for name in ALGORITHMS if name != "ppo"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors of a few numbers: threads cost more than they save."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Toy:
    """A policy with its own softmax for each token, and groups of episodes that an older policy sampled."""

    def __init__(self, seed, num_groups=4, group_size=4, scores=None):
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.groups, self.chosen, self.rollout = [], {}, {}
        self.logits, self.reference = {}, {}
        for g in range(num_groups):
            group = Group(g, Prompt(g, "p", [1]))
            for i in range(group_size):
                length = int(random.integers(1, 8))
                logits = torch.randn(length, VOCABULARY)
                chosen = torch.randint(VOCABULARY, (length,))
                score = float(random.integers(0, 5)) / 4 if scores is None else scores[g][i]
                versions = sorted(int(v) for v in random.integers(1, 4, length))
                self.chosen[g, i], self.logits[g, i] = chosen, logits.requires_grad_()
                self.rollout[g, i] = pick(logits.detach() + 0.3 * torch.randn_like(logits), chosen)
                self.reference[g, i] = pick(logits.detach() + 0.3 * torch.randn_like(logits), chosen)
                segment = Segment(
                    [1, *chosen.tolist()], [0, *[1] * length], [0.0, *self.rollout[g, i].tolist()],
                    [-1, *versions], [-1, *[0] * length],
                )  # fmt: skip
                group.episodes.append(Episode(g, g, i, [segment], [Turn("")], score=score))
            self.groups.append(group)

    def logprobs(self, episode):
        key = episode.group, episode.sample
        return pick(self.logits[key], self.chosen[key])

    def gradient(self):
        return torch.cat([logits.grad.flatten() for logits in self.logits.values()])


def pick(logits, chosen):
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def scored_results(groups):
    """Give each episode a result with its score, as the rewards do."""
    for group in groups:
        for episode in group.episodes:
            if episode.score is not None:
                episode.results = {"r0": ScoredResult(id="x", valid=True, score=episode.score)}
    return groups


def project(toy, spec, num_parts=1):
    """Return the loss of the project's code, with gradients accumulated over so many parts."""
    algorithm, groups = build_algorithm(spec), scored_results(toy.groups)
    settings = algorithm.settings
    rows = build_rows(groups, algorithm.advantages(episode_rewards(groups, settings)), settings)
    loss = 0.0
    for part in np.array_split(np.arange(len(groups)), num_parts):
        pairs = [pair for g in part for pair in zip(groups[g].episodes, rows[g], strict=True)]
        pairs = [(episode, row) for episode, row in pairs if row.loss_mask.any()]
        logprobs = torch.cat([toy.logprobs(episode) for episode, _ in pairs])

        def tokens(name, pairs=pairs):
            return torch.from_numpy(np.concatenate([getattr(row, name)[row.loss_mask] for _, row in pairs]))

        counts = torch.tensor([int(row.loss_mask.sum()) for _, row in pairs])
        rollout = tokens("rollout_logprobs")
        shares = torch.from_numpy(proximal_shares(tokens("versions").numpy(), PROXIMAL, CURRENT, END))
        inputs = LossInputs(
            logprobs, loglinear_proximal(logprobs, rollout, shares), rollout, tokens("advantages"),
            torch.arange(len(pairs)).repeat_interleave(counts), len(pairs),
        )  # fmt: skip
        terms = update_loss(
            algorithm,
            inputs,
            weights=torch.tensor([row.weight for _, row in pairs]).repeat_interleave(counts),
            reference_logprobs=torch.cat([toy.reference[e.group, e.sample] for e, _ in pairs]),
        )
        (terms.loss / denominator(groups, settings)).backward()
        loss += terms.loss.item() / denominator(groups, settings)
    return loss, toy.gradient()


def plain(toy, type_, clip, kl=0.0, cap=2.0):
    """Return the loss by the paper's formula."""
    losses, counts = [], []
    every_score = of_tokens(toy, lambda group, episode: episode.score)
    every_centered = of_tokens(toy, lambda group, episode: episode.score - mean_score(group))
    for group in toy.groups:
        scores = torch.tensor([episode.score for episode in group.episodes])
        for i, episode in enumerate(group.episodes):
            key = episode.group, episode.sample
            pi, mu, ref = toy.logprobs(episode), toy.rollout[key], toy.reference[key]
            versions = torch.tensor(episode.segments[0].versions[1:])
            end = torch.where(versions < PROXIMAL, END, CURRENT)
            share = ((PROXIMAL - versions) / (end - versions)).clip(0, 1)
            prox = mu + share * (pi.detach() - mu)
            r = torch.exp(pi - prox)
            others = torch.cat([scores[:i], scores[i + 1 :]])
            advantage = {
                "rloo": scores[i] - others.mean(),
                "drGrpo": scores[i] - scores.mean(),
                "reinforcePlusPlus": (scores[i] - every_score.mean()) / every_score.std(),
                "reinforcePlusPlusBaseline": (scores[i] - scores.mean() - every_centered.mean()) / every_centered.std(),
            }.get(type_, (scores[i] - scores.mean()) / scores.std() if scores.std() > 0 else torch.tensor(0.0))
            if type_ == "rloo":
                token = -r * advantage
            elif type_ == "cispo":
                token = -r.detach().clip(max=5.0) * advantage * pi
            else:
                if type_ == "gspo":
                    r = torch.exp((pi - prox).mean()).expand(len(pi))
                token = -torch.min(r * advantage, r.clip(1 - clip[0], 1 + clip[1]) * advantage)
            if type_ != "gspo":
                token = token * torch.exp(prox - mu).clip(max=cap)
            losses.append(token + kl * (torch.exp(ref - pi) - (ref - pi) - 1))
            counts.append(len(pi))
    if type_ == "gspo":
        return torch.stack([token.mean() for token in losses]).mean()
    if type_ in ("drGrpo", "rloo"):
        return torch.cat(losses).sum() / (len(losses) * MAX_TOKENS)
    return torch.cat(losses).mean()


def of_tokens(toy, value):
    """Return the value of each episode once for each of its tokens.  [tokens of the step]"""
    every = [(group, episode) for group in toy.groups for episode in group.episodes]
    return torch.cat([torch.full((len(toy.logits[e.group, e.sample]),), value(group, e)) for group, e in every])


def mean_score(group):
    return sum(episode.score for episode in group.episodes) / len(group.episodes)


CLIPS = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "drGrpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("type_", GROUP_BASED)
def test_loss_and_gradient_are_those_of_the_paper(type_, kl, num_parts):
    """gspo is compared without correction: the plain ratio of a sequence has no weight for each token."""
    correction = {"type": "none" if type_ == "gspo" else "truncate"}
    spec = algorithm_spec(
        type=type_, kl={"coefficient": kl}, correction=correction, truncated={"answers": "train"}, max_tokens=MAX_TOKENS
    )
    mine, expected = Toy(seed=1), Toy(seed=1)
    loss, gradient = project(mine, spec, num_parts)
    plain_loss = plain(expected, type_, CLIPS.get(type_, (0.2, 0.2)), kl)
    plain_loss.backward()
    assert loss == pytest.approx(plain_loss.item(), abs=1e-5)
    assert torch.allclose(gradient, expected.gradient(), rtol=1e-5, atol=1e-6)
    assert gradient.abs().max() > 1e-3


def bandit(type_, steps=60):
    """Train a softmax over 4 answers of one token, whose rewards are 0, 0.2, 0.5 and 1. Return the expected rewards."""
    rewards, logits = torch.tensor([0.0, 0.2, 0.5, 1.0]), torch.zeros(4, requires_grad=True)
    spec = algorithm_spec(type=type_, truncated={"answers": "train"}, groupSize=8, max_tokens=1)
    algorithm = build_algorithm(spec)
    torch.manual_seed(0)
    expected = []
    for _ in range(steps):
        policy = logits.detach().softmax(-1)
        expected.append(float(policy @ rewards))
        toy_groups, sampled = [], []
        for g in range(2):
            chosen = policy.multinomial(8, replacement=True)
            group = Group(g, Prompt(0, "p", [1]))
            for i, action in enumerate(chosen.tolist()):
                segment = Segment([1, action], [0, 1], [0.0, float(policy[action].log())], [-1, 0], [-1, 0])
                group.episodes.append(Episode(0, g, i, [segment], [Turn("")], score=float(rewards[action])))
            toy_groups.append(group)
            sampled.append(chosen)
        groups = scored_results(toy_groups)
        settings = algorithm.settings
        rows = build_rows(groups, algorithm.advantages(episode_rewards(groups, settings)), settings)
        flat = [row for of_group in rows for row in of_group]
        logprobs = logits.log_softmax(-1)[torch.cat(sampled)]
        rollout = torch.tensor([float(row.rollout_logprobs[1]) for row in flat])
        advantages = torch.tensor([float(row.advantages[1]) for row in flat])
        inputs = LossInputs(logprobs, logprobs.detach(), rollout, advantages, torch.arange(16), 16)
        terms = update_loss(algorithm, inputs, weights=torch.tensor([row.weight for row in flat]))
        (gradient,) = torch.autograd.grad(terms.loss / denominator(groups, settings), logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
    return expected


@pytest.mark.parametrize("type_", GROUP_BASED)
def test_algorithm_raises_the_expected_reward_of_a_bandit(type_):
    expected = bandit(type_)
    assert expected[0] == pytest.approx(0.425)
    assert expected[-1] > 0.8, expected[::10]


SCORES = st.lists(
    st.lists(st.one_of(st.none(), st.integers(-4, 4).map(lambda n: n / 4)), min_size=2, max_size=4),
    min_size=1,
    max_size=4,
)


def advantages_of(scores, type_, **settings):
    """Return the first token's advantage of each episode; None for a masked one.  [groups][episodes]"""
    algorithm = build_algorithm(algorithm_spec(type=type_, **settings))
    rewards = [[None if score is None else rewards_of(score) for score in group] for group in scores]
    return [[e and float(e.advantages[0]) for e in group] for group in algorithm.advantages(rewards)]


@given(scores=SCORES)
@pytest.mark.parametrize("type_", GROUP_BASED)
def test_masked_episodes_change_nothing(type_, scores):
    found = advantages_of(scores, type_)
    valid = advantages_of([[score for score in group if score is not None] for group in scores], type_)
    assert [[a for a in group if a is not None] for group in found] == valid
    assert [[a is None for a in group] for group in found] == [[s is None for s in group] for group in scores]


@given(scores=SCORES, seed=st.integers(0, 99))
@pytest.mark.parametrize("type_", GROUP_BASED)
def test_order_of_groups_and_of_their_episodes_does_not_matter(type_, scores, seed):
    random = np.random.default_rng(seed)
    groups = random.permutation(len(scores)).tolist()
    members = [random.permutation(len(scores[g])).tolist() for g in groups]
    found = advantages_of([[scores[g][i] for i in order] for g, order in zip(groups, members, strict=True)], type_)
    expected = advantages_of(scores, type_)
    for g, order, group in zip(groups, members, found, strict=True):
        assert group == pytest.approx([expected[g][i] for i in order])


@given(scores=SCORES, scale=st.sampled_from([1e-3, 0.1, 1.0, 8.0]))
@pytest.mark.parametrize("type_", GROUP_BASED)
def test_scale_of_rewards_matters_only_without_normalization(type_, scores, scale):
    """Scores are 0, or at least 0.25 apart, so neither scale hides a difference."""
    scaled = [[None if score is None else scale * score for score in group] for group in scores]
    factor = scale if type_ in ("drGrpo", "rloo") else 1.0
    for found, expected in zip(advantages_of(scaled, type_), advantages_of(scores, type_), strict=True):
        assert found == [None if a is None else pytest.approx(factor * a) for a in expected]


@given(scores=SCORES, shift=st.sampled_from([-3.0, 0.5, 20.0]))
@pytest.mark.parametrize("type_", GROUP_BASED)
def test_offset_of_rewards_does_not_matter(type_, scores, shift):
    shifted = [[None if score is None else score + shift for score in group] for group in scores]
    for found, expected in zip(advantages_of(shifted, type_), advantages_of(scores, type_), strict=True):
        assert found == [None if a is None else pytest.approx(a, abs=1e-9) for a in expected]


@pytest.mark.parametrize("type_", GROUP_BASED)
def test_segments_of_an_episode_weigh_as_much_as_one(type_):
    """gspo has one ratio for each segment, which are equal here."""
    spec = algorithm_spec(type=type_, truncated={"answers": "train"}, max_tokens=MAX_TOKENS)
    algorithm, gradients = build_algorithm(spec), []
    settings = algorithm.settings
    for is_split in (False, True):
        groups = [Group(0, Prompt(0, "p", [1]))]
        for i, lengths in enumerate([(2, 3), (4, 1)]):
            parts = lengths if is_split else (sum(lengths),)
            segments = [
                Segment([1] * (n + 1), [0, *[1] * n], [-0.5] * (n + 1), [-1, *[3] * n], [-1, *[0] * n]) for n in parts
            ]
            groups[0].episodes.append(Episode(0, 0, i, segments, [Turn("")], score=float(i)))
        scored_results(groups)
        [rows] = build_rows(groups, algorithm.advantages(episode_rewards(groups, settings)), settings)
        logprobs = torch.full((10,), -0.4, requires_grad=True)
        masks = [torch.from_numpy(row.loss_mask) for row in rows]
        counts = torch.tensor([int(mask.sum()) for mask in masks])
        inputs = LossInputs(
            logprobs, logprobs.detach(), torch.full((10,), -0.5),
            torch.cat([torch.from_numpy(row.advantages)[mask] for row, mask in zip(rows, masks, strict=True)]),
            torch.arange(len(rows)).repeat_interleave(counts), len(rows),
        )  # fmt: skip
        weights = torch.tensor([row.weight for row in rows]).repeat_interleave(counts)
        terms = update_loss(algorithm, inputs, weights=weights)
        (terms.loss / denominator(groups, settings)).backward()
        gradients.append(logprobs.grad)
    assert torch.allclose(*gradients)
    assert gradients[0].abs().min() > 0
