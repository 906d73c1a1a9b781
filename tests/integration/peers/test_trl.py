"""Advantages, losses, gradients and corrections against TRL's GRPOTrainer, on the same tensors.

`pytest -rP` prints the largest relative differences.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import correct, update_loss
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.feed.given_rows import build_given
from tests.integration.peers.batches import (
    EQUAL,
    LENGTH,
    assert_equal,
    build_batch,
    loss_inputs,
    our_advantages,
    our_loss,
    our_update,
)
from tests.support.algorithms import algorithm_spec
from tests.support.chat_templates import build_tokenizer
from tests.support.driver_harness import make_job

pytestmark = pytest.mark.slow

EXACT, ROUNDED = 1e-12, 3e-6
"""Allowed differences: rounding of fp64, and what TRL adds to divisors, or the fp32 of rows."""


@pytest.mark.parametrize("masked", [(), (4, 9)])
@pytest.mark.parametrize("normalization", ["group", "batch", "none"])
def test_advantages(peers, normalization, masked):
    """batch is TRL's scale_rewards=batch, which divides by the deviation of the rewards as they are."""
    batch = build_batch(EQUAL)
    rewards = batch.scores.clone()[:, None]
    rewards[list(masked)] = math.nan
    theirs, _ = trls_scores(peers, batch, rewards, scale=normalization)
    spec = algorithm_spec(advantages={"normalization": normalization}, max_tokens=LENGTH)
    assert_equal(normalization, our_advantages(batch, spec, masked)[:, 0], theirs, ROUNDED)


def test_advantages_of_each_reward_alone(peers):
    batch = build_batch(EQUAL)
    other = 100 * batch.values[:, 0]
    rewards = torch.stack([batch.scores, other], dim=1)
    theirs, _ = trls_scores(peers, batch, rewards, weights=[1.0, 0.5], aggregation="normalize_then_sum")
    spec = algorithm_spec(weights=(1.0, 0.5), advantages={"perReward": True}, max_tokens=LENGTH)
    ours = our_advantages(batch, spec, rewards=rewards)[:, 0]
    assert_equal("per reward", ours, theirs, 2e-4)  # TRL adds 1e-4 to the deviation of the sum, which is about 1


CASES = {
    "grpo, sequence": ({"loss": {"level": "sequence"}}, {"loss_type": "grpo"}),
    "grpo, token": ({}, {"loss_type": "dapo"}),
    "dual clip": ({"loss": {"dualClip": 2.5}}, {"loss_type": "dapo", "delta": 2.5}),
    "drGrpo": ({"type": "drGrpo"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"type": "dapo"}, {"loss_type": "dapo", "clip": (0.2, 0.28), "delta": 10.0}),
    "gspo": ({"type": "gspo"}, {"loss_type": "grpo", "level": "sequence", "clip": (3e-4, 4e-4), "delta": None}),
    "cispo": ({"type": "cispo"}, {"loss_type": "cispo", "clip": (0.2, 5.0)}),
}
"""Settings of the algorithm, and the same for TRL."""


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SAME = [(case, mode) for case in CASES for mode in MODES if case != "gspo" or mode.startswith("sequence")]
"""With gspo and weights of tokens, TRL weighs the whole sequence's gradient by each, and RLJob that of each token."""


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("case", "mode"), SAME)
def test_loss_and_gradient(peers, case, mode, beta):
    """With TRL's own importance weights."""
    batch = build_batch(EQUAL, spread=0.7)
    settings, options = CASES[case]
    level, kind = mode.split("_")
    correction = {"level": level, "type": kind, "cap": 2.0, "floor": 0.5}
    floor = 0.5 if kind == "mask" else None
    _, weights = trls_scores(peers, batch, batch.scores[:, None], mode=mode, cap=2.0, floor=floor)
    spec = algorithm_spec(**settings, correction=correction, kl={"coefficient": beta}, max_tokens=LENGTH)
    advantages = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of_tokens = advantages[:, None].expand_as(batch.mask)
    ours, theirs = our_loss(batch, spec, of_tokens), trls_loss(peers, batch, advantages, weights, beta=beta, **options)
    found = correct(loss_inputs(batch, of_tokens), spec.algorithm)
    sampled = batch.mask.bool()
    assert_equal(f"{mode}, weights", found.weights, weights.expand_as(batch.mask)[sampled], EXACT)
    assert 0 < found.changed.double().mean() < 1, "otherwise the comparison shows little"
    assert_equal(f"{case}, {mode}, loss", ours[0], theirs[0], EXACT)
    assert_equal(f"{case}, {mode}, gradient", ours[1], theirs[1], EXACT)


@pytest.mark.parametrize("case", CASES)
def test_whole_update(peers, case):
    """From scores to the gradient. Rows have the rollouts' log-probs and the advantages in fp32."""
    batch = build_batch(EQUAL)
    settings, options = CASES[case]
    scale = "none" if case == "drGrpo" else "group"
    mode = "sequence_mask" if case == "gspo" else "token_truncate"
    advantages, weights = trls_scores(peers, batch, batch.scores[:, None], scale=scale, mode=mode, cap=3.0)
    correction = {"cap": 3.0} | ({"level": "sequence", "type": "mask", "floor": 0} if case == "gspo" else {})
    spec = algorithm_spec(**settings, correction=correction, truncated={"answers": "train"}, max_tokens=LENGTH)
    _, theirs = trls_loss(peers, batch, advantages, weights, **options)
    assert_equal(f"{case} update", our_update(batch, spec), theirs, ROUNDED)


def test_cross_entropy(peers):
    """The loss of a warm start, under settings that change another one."""
    batch = build_batch(EQUAL)
    spec = algorithm_spec(entropyCoefficient=0.1, correction={"type": "mask", "rejection": {"cap": 1.1}})
    sampled, logprobs = batch.mask.bool(), batch.logprobs.clone().requires_grad_()
    now = logprobs[sampled]
    inputs = LossInputs(now, now.detach(), now.detach(), torch.ones_like(now), batch.rows, len(batch.mask))
    terms = update_loss(
        build_algorithm(spec), inputs, weights=torch.ones_like(now), entropy=now.exp() * now, is_given=True
    )
    ours = terms.loss / sampled.sum()
    theirs = peers.call("trl", "sft_loss", logprobs=batch.logprobs, mask=batch.mask.long())
    assert_equal("cross-entropy", ours.detach(), theirs[0], EXACT)
    assert_equal("cross-entropy, gradient", torch.autograd.grad(ours, logprobs)[0], theirs[1], EXACT)


ANSWERED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "The sum is 4."},
    {"role": "user", "content": "and 2 + 3?"},
    {"role": "assistant", "content": "5"},
]


@pytest.mark.parametrize(("template", "beside"), [("llama3", ""), ("qwen2_5", "\n"), ("qwen3", "\n")])
def test_rows_of_conversations(peers, tmp_path, template, beside):
    """The tokens and the mask of assistant_only_loss. The marks of two templates have a line break, before the answer
    or after its end, which the policy is not asked for: TRL trains on it, and RLJob does not."""
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.save_pretrained(tmp_path)
    theirs, mask, own = peers.call("trl", "sft_row", folder=str(tmp_path), template=template, messages=ANSWERED)
    tokenizer.chat_template = own
    spec = make_job(
        data={"warmStart": {"source": "/w.jsonl"}}, schedule={"warmStart": {"steps": 1}, "promptsPerStep": 1}
    ).spec
    prompt = Prompt(0, ANSWERED[:-1], [1], ANSWERED[-1:])
    [(_, [row])] = build_given(spec, PromptSet(1, {0: prompt}), tokenizer, None).conversations
    length = len(row.token_ids)
    assert row.token_ids.tolist() == theirs[:length]
    assert tokenizer.decode(theirs[length:]) == beside, "the row ends with the answer's end"
    differing = [theirs[i] for i in range(length) if row.loss_mask[i] != bool(mask[i])]
    assert {tokenizer.decode([token_id]) for token_id in differing} <= {beside}
    assert row.loss_mask.sum() > 4


def trls_loss(peers, batch, advantages, weights, **options):
    return peers.call(
        "trl", "loss", logprobs=batch.logprobs, proximal=batch.proximal, reference=batch.reference, mask=batch.mask,
        advantages=advantages, weights=weights, **{"level": "token", "clip": (0.2, 0.2), "delta": 3.0} | options,
    )  # fmt: skip


def trls_scores(peers, batch, rewards, **options):
    return peers.call(
        "trl", "score", rewards=rewards, group_size=EQUAL[0], lengths=batch.lengths, proximal=batch.proximal,
        rollout=batch.rollout, **{"weights": [1.0]} | options,
    )  # fmt: skip
