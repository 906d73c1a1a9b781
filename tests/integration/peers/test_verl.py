"""Advantages, losses, gradients and corrections against verl's own functions, on the same tensors.

`pytest -rP` prints the largest relative differences.
"""

from __future__ import annotations

import base64
import dataclasses

import pytest
import torch

from rljob_api.manifest.services.reward import Reward
from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.losses import correct, update_loss
from rljob_trainer.algorithms.ppo import value_loss
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.teachers import teacher_advantages
from rljob_trainer.episodes.types import Episode, ScoredResult, Segment, Turn
from rljob_trainer.policy.selected_logprobs import selected_logprobs
from tests.integration.peers.batches import (
    LENGTH,
    Batch,
    assert_equal,
    build_batch,
    loss_inputs,
    our_advantages,
    our_loss,
    our_update,
    token_weights,
)
from tests.integration.peers.environment import Peers
from tests.support.algorithms import algorithm_spec

pytestmark = pytest.mark.slow

LEVELS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
ESTIMATORS = {
    "grpo": "grpo",
    "drGrpo": "grpo",
    "dapo": "grpo",
    "rloo": "rloo",
    "reinforcePlusPlus": "reinforce_plus_plus",
    "reinforcePlusPlusBaseline": "reinforce_plus_plus_baseline",
    "gspo": "grpo",
    "cispo": "grpo",
}
LOSSES = dict.fromkeys(ESTIMATORS, "vanilla") | {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo"}
EXACT, ROUNDED = 1e-7, 1e-6
"""Allowed differences: verl adds 1e-8 to the length of an episode; rows are in fp32."""


def verls_advantages(peers: Peers, batch: Batch, type_: str, rewards: torch.Tensor | None = None) -> torch.Tensor:
    options = {"norm_adv_by_std_in_grpo": type_ != "drGrpo"} if ESTIMATORS[type_] == "grpo" else {}
    rewards = batch.at_last_token(batch.scores) if rewards is None else rewards
    return peers.call(
        "verl",
        "advantages",
        estimator=ESTIMATORS[type_],
        rewards=rewards,
        mask=batch.mask,
        groups=batch.groups,
        **options,
    )


@pytest.mark.parametrize("type_", ESTIMATORS)
def test_advantages(peers, type_):
    batch = build_batch()
    ours = our_advantages(batch, algorithm_spec(type=type_, truncated={"answers": "train"}, max_tokens=LENGTH))
    assert_equal(type_, ours, verls_advantages(peers, batch, type_), ROUNDED)


def test_kl_penalty_in_the_reward(peers):
    batch, kl = build_batch(), {"coefficient": 9, "estimator": "k1"}
    rewards = batch.at_last_token(batch.scores) - 9 * (batch.rollout - batch.reference) * batch.mask
    ours = our_advantages(batch, algorithm_spec(type="reinforcePlusPlus", kl=kl, max_tokens=LENGTH))
    theirs = verls_advantages(peers, batch, "reinforcePlusPlus", rewards)
    assert_equal("reinforcePlusPlus with k1", ours, theirs, ROUNDED)


@pytest.mark.parametrize("limit", [20.0, 0.5])
@pytest.mark.parametrize("level", LEVELS)
def test_distillation(peers, level, limit):
    """A teacher alone, against verl's k1 with use_policy_gradient. The reference policy stands for the teacher."""
    built = build_batch()
    batch = dataclasses.replace(built, proximal=built.logprobs, rollout=built.logprobs)
    spec = algorithm_spec(loss={"level": level}, max_tokens=LENGTH)
    endpoint = {"url": "http://teacher/v1", "model": "big"}
    reward = Reward.model_validate({"name": "t", "teacher": {"endpoint": endpoint, "clip": limit}})
    advantages = batch.of_tokens([teacher_advantages([reward], each) for each in taught_episodes(batch)])
    ours = our_loss(batch, spec, advantages)
    settings = {"level": LEVELS[level], "max_tokens": LENGTH, "limit": limit}
    theirs = peers.call(
        "verl", "distillation", logprobs=batch.logprobs, teacher=batch.reference, mask=batch.mask, **settings
    )
    for name, *pair in zip(("loss", "gradient"), ours, theirs, strict=True):
        assert_equal(f"distillation, {name}", *pair, ROUNDED)


@pytest.mark.parametrize("limit", [20.0, 2.5])
@pytest.mark.parametrize("level", LEVELS)
def test_distillation_of_the_likeliest_tokens(peers, level, limit):
    """A teacher with topK, against verl's forward_kl_topk. With the identity as the head, hidden states are logits."""
    batch, draw = build_batch(), torch.Generator().manual_seed(0)
    mask = batch.mask.float()
    logits, theirs = torch.randn(2, int(mask.sum()), 30, generator=draw).mul(2)
    likeliest = theirs.log_softmax(-1).topk(7)
    endpoint = {"url": "http://teacher/v1", "model": "big"}
    reward = {"name": "t", "teacher": {"endpoint": endpoint, "clip": limit, "topK": 7}}
    spec = algorithm_spec(loss={"level": level}, max_tokens=LENGTH)
    algorithm = build_algorithm(spec.model_copy(update={"rewards": [Reward.model_validate(reward)]}))

    hidden = logits.clone().requires_grad_()
    targets = torch.cat([torch.zeros(len(hidden), 1, dtype=torch.int64), likeliest.indices], 1)
    logprobs, _ = selected_logprobs(hidden, torch.eye(30), targets, 1.0)
    own = logprobs[:, 0].detach()
    inputs = LossInputs(logprobs[:, 0], own, own, torch.zeros_like(own), batch.rows, len(mask))
    weights, total = token_weights(batch, level)
    top = logprobs[:, None, 1:], likeliest.values[:, None]
    loss = update_loss(algorithm, inputs, weights=weights.float(), top=top).loss / total
    ours = loss.detach(), torch.autograd.grad(loss, hidden)[0]
    settings = {"level": LEVELS[level], "max_tokens": LENGTH, "limit": limit}
    theirs = peers.call(
        "verl", "top_distillation", logits=logits, tokens=likeliest.indices, teacher=likeliest.values, mask=mask,
        **settings,
    )  # fmt: skip
    for name, *pair in zip(("loss", "gradient"), ours, theirs, strict=True):
        assert_equal(f"distillation of 7 tokens, {name}", *pair, ROUNDED)


def taught_episodes(batch: Batch) -> list[Episode]:
    """Return the episodes with the reference policy's log-probs as the result of a teacher `t`."""
    found = []
    for i, length in enumerate(batch.lengths):
        own, theirs = batch.rollout[i, :length].tolist(), batch.reference[i, :length].numpy().astype("<f4")
        segment = Segment([1] * length, [1] * length, own, [0] * length, [0] * length)
        encoded = base64.b64encode(theirs.tobytes()).decode()
        result = ScoredResult(id="x", valid=True, score=0.0, logprobs=[encoded])
        found.append(Episode(0, 0, i, [segment], [Turn("")], results={"t": result}))
    return found


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9)])
def test_generalized_advantages(peers, discount, decay):
    batch = build_batch()
    spec = algorithm_spec(type="ppo", gae={"discount": discount, "lambda": decay}, max_tokens=LENGTH)
    rewards = batch.at_last_token(batch.scores)
    theirs, _ = peers.call(
        "verl", "gae", rewards=rewards, values=batch.values, mask=batch.mask, gamma=discount, lam=decay
    )
    assert_equal(f"gae {discount} {decay}, whitened", our_advantages(batch, spec), theirs, ROUNDED)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("type_", [name for name in LOSSES if name != "rloo"])
def test_loss_and_gradient(peers, type_, level):
    """With the weights of verl's own token-level correction."""
    batch = build_batch(spread=1.0)
    advantages = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spec = algorithm_spec(type=type_, loss={"level": level}, max_tokens=LENGTH)
    settings = build_algorithm(spec).settings
    clip = (1.0 if settings.clip_low is None else settings.clip_low, settings.clip_high, settings.dual_clip or 3.0)
    weights, _ = verls_correction(peers, batch, rollout_is="token", rollout_is_threshold=2.0)
    theirs = verls_loss(peers, batch, LOSSES[type_], advantages, level=level, clip=clip, weights=weights)
    ours = our_loss(batch, spec, advantages)
    for name, mine, other in zip(("loss", "gradient"), ours, theirs, strict=True):
        assert_equal(f"{type_} {level} {name}", mine, other, EXACT)
    if type_ != "cispo":
        assert (ours[1][batch.mask.bool()] == 0).any(), "something is clipped"


def test_dual_clip(peers):
    batch = build_batch(spread=1.5)
    advantages = -torch.ones_like(batch.mask)
    bounded = our_loss(batch, algorithm_spec(loss={"dualClip": 2.5}, max_tokens=LENGTH), advantages)
    weights, _ = verls_correction(peers, batch, rollout_is="token", rollout_is_threshold=2.0)
    theirs = verls_loss(peers, batch, "vanilla", advantages, level="token", clip=(0.2, 0.2, 2.5), weights=weights)
    unbounded = our_loss(batch, algorithm_spec(loss={"dualClip": 1e9}, max_tokens=LENGTH), advantages)
    assert_equal("dual clip, loss", bounded[0], theirs[0], EXACT)
    assert_equal("dual clip, gradient", bounded[1], theirs[1], EXACT)
    assert unbounded[0] > bounded[0], "the bound must be reached"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(peers, estimator):
    """verl also limits k3 to 10; none is that large here."""
    batch = build_batch()
    theirs = peers.call("verl", "kl", logprobs=batch.logprobs, reference=batch.reference, estimator=estimator)
    logprobs = batch.logprobs.clone().requires_grad_()
    ours = kl_estimate(logprobs, batch.reference, estimator)
    (gradient,) = torch.autograd.grad(ours.sum(), logprobs)
    assert_equal(estimator, ours.detach(), theirs[0], EXACT)
    assert_equal(f"{estimator} gradient", gradient, theirs[1], EXACT)


def test_value_loss(peers):
    batch, sampled = build_batch(), build_batch().mask.bool()
    returns, clip = batch.rollout, 0.5
    values = (batch.values + batch.reference).requires_grad_()
    theirs = peers.call(
        "verl", "value_loss", values=values.detach(), before=batch.values, returns=returns, mask=batch.mask, clip=clip
    )
    losses, clipped = value_loss(values[sampled], batch.values[sampled], returns[sampled], clip)
    assert clipped.any()
    loss = losses.mean()
    (gradient,) = torch.autograd.grad(loss, values)
    assert_equal("value loss", loss.detach(), theirs[0], EXACT)
    assert_equal("value loss gradient", gradient, theirs[1], EXACT)


MASK = {"type": "mask", "cap": 2.0, "floor": 0.5}
TRUNCATE = {"type": "truncate", "cap": 2.0}
CORRECTIONS = {
    "decoupled_token_is": ({}, TRUNCATE),
    "decoupled_seq_is": ({}, TRUNCATE | {"level": "sequence"}),
    "decoupled_token_icepop": ({}, MASK | {"cap": 5.0}),
    "decoupled_seq_is_rs": ({}, TRUNCATE | {"level": "sequence", "rejection": {"level": "sequence", "cap": 2.0}}),
    "decoupled_geo_rs": ({"rs_threshold": "0.75_1.3"}, {"type": "none", "rejection": {"cap": 1.3, "floor": 0.75}}),
    "decoupled_geo_rs_seq_tis": (
        {"rs_threshold": "1.3"},
        TRUNCATE | {"level": "sequence", "rejection": {"cap": 1.3}},
    ),
    "decoupled_geo_rs_token_tis": ({"rs_threshold": "1.3"}, TRUNCATE | {"rejection": {"cap": 1.3}}),
    "": (
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": "0.5_2.0",
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": 3,
        },
        MASK | {"level": "sequence", "rejection": {"level": "token", "cap": 3.0}},
    ),
}
"""By verl's preset: its options, and the same for algorithm.correction."""


@pytest.mark.parametrize("preset", CORRECTIONS)
def test_corrections(peers, preset):
    """In the first update of a step, where the policy is the proximal one: verl computes its ratios there."""
    batch = build_batch(spread=0.4)
    batch.logprobs = batch.proximal
    options, correction = CORRECTIONS[preset]
    weights, left = verls_correction(peers, batch, preset, **options)
    advantages = torch.ones_like(batch.mask)
    spec = algorithm_spec(correction=correction, max_tokens=LENGTH)
    found, sampled = correct(loss_inputs(batch, advantages), spec.algorithm), batch.mask.bool()
    name = preset or "mask of sequences and tokens"
    assert_equal(f"{name}, weights", found.weights, (weights * left)[sampled], EXACT)
    assert torch.equal(found.rejected, ~left[sampled].bool())
    theirs = verls_loss(peers, batch, "vanilla", advantages, level="token", weights=weights, trained=left)
    assert_equal(f"{name}, gradient", our_loss(batch, spec, advantages)[1], theirs[1], EXACT)
    assert 0 < (found.changed | found.rejected).double().mean() < 1, "otherwise the comparison shows little"


@pytest.mark.parametrize("type_", ESTIMATORS)
def test_whole_update(peers, type_):
    """From scores to the gradient, with ragged groups, an invalid episode, and truncated weights. Rows have the
    rollouts' log-probs and the advantages in fp32. rloo is compared where REINFORCE is defined: in the first update."""
    batch = build_batch(spread=0.6)
    if type_ == "rloo":
        batch.proximal = batch.logprobs
    spec = algorithm_spec(type=type_, truncated={"answers": "train"}, max_tokens=LENGTH)
    settings = build_algorithm(spec).settings
    advantages = verls_advantages(peers, batch, type_)
    weights, _ = verls_correction(peers, batch, "decoupled_token_is")
    assert (weights == 2).any(), "some weights are truncated"
    level = {"level": settings.level}
    if type_ == "rloo":
        theirs = peers.call(
            "verl", "reinforce_gradient", rollout=batch.rollout, logprobs=batch.logprobs, advantages=advantages,
            mask=batch.mask, level=LEVELS[settings.level], max_tokens=LENGTH, weights=weights,
        )  # fmt: skip
    else:
        clip = (settings.clip_low or 1.0, settings.clip_high, settings.dual_clip or 3.0)
        theirs = verls_loss(peers, batch, LOSSES[type_], advantages, clip=clip, weights=weights, **level)[1]
    assert_equal(f"{type_} update", our_update(batch, spec), theirs, ROUNDED)


def test_logprobs_and_entropy(peers):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 16, generator=draw), torch.randn(300, 16, generator=draw)
    targets = torch.randint(300, (40,), generator=draw)
    theirs = peers.call("verl", "logprobs_and_entropy", logits=hidden @ weight.T / 0.7, targets=targets)
    ours = selected_logprobs(hidden, weight, targets, 0.7)
    assert_equal("log-probs", ours[0], theirs[0], 1e-6)
    assert_equal("entropy", ours[1], theirs[1], 1e-5)


def verls_correction(peers, batch, preset="", **options):
    return peers.call(
        "verl", "correction", preset=preset, proximal=batch.proximal, rollout=batch.rollout, mask=batch.mask, **options
    )


def verls_loss(peers, batch, mode, advantages, *, level, clip=(0.2, 0.2, 3.0), **options):
    return peers.call(
        "verl", "policy_loss", mode=mode, logprobs=batch.logprobs, proximal=batch.proximal, advantages=advantages,
        mask=batch.mask, level=LEVELS[level], max_tokens=LENGTH, clip=clip, **options,
    )  # fmt: skip
