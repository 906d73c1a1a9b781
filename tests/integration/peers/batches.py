"""The tensors that both sides get, and what RLJob computes from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.base import EpisodeRewards, LossInputs
from rljob_trainer.algorithms.losses import update_loss
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import build_rows, denominator, episode_rewards
from rljob_trainer.episodes.types import Episode, Group, ScoredResult, Segment, Turn

LENGTH = 9
"""rollout.sampling.maxTokens, and the number of columns."""
RAGGED, EQUAL = (4, 2, 5, 3), (4, 4, 4)
"""Sizes of the groups. TRL's are equal."""


@dataclass
class Batch:
    """Groups with answers of different lengths. Tensors are [episodes, tokens] in fp64."""

    sizes: Sequence[int]
    mask: Tensor
    """1.0 where a token was sampled."""
    scores: Tensor
    """[episodes]"""
    logprobs: Tensor
    proximal: Tensor
    rollout: Tensor
    reference: Tensor
    values: Tensor

    @property
    def groups(self) -> Tensor:  # [episodes]
        return torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in self.mask.sum(1)]

    @property
    def rows(self) -> Tensor:  # [sampled]
        return torch.arange(len(self.mask)).repeat_interleave(torch.tensor(self.lengths))

    def of_tokens(self, values: Sequence[np.ndarray]) -> Tensor:
        """Return the values of each episode's tokens as [episodes, tokens].  values  # [episodes][sampled]"""
        found = torch.zeros_like(self.mask)
        for row, of_episode in zip(found, values, strict=True):
            row[: len(of_episode)] = torch.from_numpy(of_episode)
        return found

    def at_last_token(self, values: Tensor) -> Tensor:  # [episodes] -> [episodes, tokens]
        last = torch.tensor(self.lengths)[:, None] - 1
        return torch.zeros_like(self.mask).scatter_(1, last, values[:, None])

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """[episodes] -> [groups][episodes]"""
        remaining = iter(values)
        return [[next(remaining) for _ in range(size)] for size in self.sizes]


def build_batch(sizes: Sequence[int] = RAGGED, seed: int = 0, spread: float = 0.6) -> Batch:
    """`spread`: of the differences between the policies' log-probs. In the first group all scores are equal. Scores are
    in the hundreds, so that what peers add to divisors (1e-4, 1e-6) does not count."""
    draw = torch.Generator().manual_seed(seed)
    num_episodes = sum(sizes)
    lengths = torch.randint(1, LENGTH + 1, (num_episodes,), generator=draw)
    mask = (torch.arange(LENGTH) < lengths[:, None]).double()
    scores = torch.randint(0, 5, (num_episodes,), generator=draw).double() * 100
    scores[: sizes[0]] = 200
    logprobs = -3 * torch.rand(num_episodes, LENGTH, generator=draw, dtype=torch.float64)

    def near() -> Tensor:
        return (logprobs + spread * torch.randn(logprobs.shape, generator=draw, dtype=torch.float64)) * mask

    values = torch.randn(logprobs.shape, generator=draw, dtype=torch.float64) * mask
    return Batch(sizes, mask, scores, logprobs * mask, near(), near(), near(), values)


def our_advantages(batch: Batch, spec: RLJobSpec, masked: Sequence[int] = (), rewards: Tensor | None = None) -> Tensor:
    """Return the advantage of each token.  [episodes, tokens]    `rewards`: of each kind  # [episodes, rewards]"""
    algorithm = build_algorithm(spec)
    kl = (batch.rollout - batch.reference).numpy()
    episodes = [
        None
        if i in masked
        else EpisodeRewards(
            score=float(batch.scores[i]),
            turn_rewards=[0.0],
            turn_of_token=np.zeros(length, np.int32),
            reference_kl=kl[i, :length],
            values=batch.values[i, :length].numpy(),
            components=[] if rewards is None else [*rewards[i].tolist(), 0.0],
        )
        for i, length in enumerate(batch.lengths)
    ]
    found = [each for group in algorithm.advantages(batch.split(episodes)) for each in group]
    return batch.of_tokens([np.zeros(0) if each is None else each.advantages for each in found])


def loss_inputs(batch: Batch, advantages: Tensor, logprobs: Tensor | None = None) -> LossInputs:
    sampled = batch.mask.bool()
    logprobs = batch.logprobs if logprobs is None else logprobs
    tensors = (logprobs, batch.proximal, batch.rollout, advantages)
    return LossInputs(*[each[sampled] for each in tensors], rows=batch.rows, num_rows=len(batch.mask))


def our_loss(batch: Batch, spec: RLJobSpec, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient by the log-probs.  advantages  # [episodes, tokens]"""
    algorithm, sampled = build_algorithm(spec), batch.mask.bool()
    weights, total = token_weights(batch, algorithm.settings.level)
    logprobs = batch.logprobs.clone().requires_grad_()
    terms = update_loss(
        algorithm,
        loss_inputs(batch, advantages, logprobs),
        weights=weights,
        reference_logprobs=batch.reference[sampled],
    )
    loss = terms.loss / total
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def token_weights(batch: Batch, level: str) -> tuple[Tensor, Tensor | int]:  # [sampled], and the denominator
    lengths = batch.mask.sum(1)
    of_level = {
        "token": (torch.ones_like(lengths), lengths.sum()),
        "sequence": (1 / lengths, len(lengths)),
        "constant": (torch.full_like(lengths, 1 / LENGTH), len(lengths)),
    }
    weights, total = of_level[level]
    return weights[batch.rows], total


def our_update(batch: Batch, spec: RLJobSpec) -> Tensor:
    """Return the gradient by the log-probs of a whole update: from scored episodes, over rows, to the loss. An invalid
    episode among them must change nothing."""
    groups = _build_groups(batch)
    algorithm = build_algorithm(spec)
    settings = algorithm.settings
    rows = [
        row
        for of_group in build_rows(groups, algorithm.advantages(episode_rewards(groups, settings)), settings)
        for row in of_group
        if row.loss_mask.any()
    ]
    sampled = batch.mask.bool()
    logprobs = batch.logprobs.clone().requires_grad_()

    def tokens(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name)[row.loss_mask] for row in rows]))

    counts = torch.tensor([int(row.loss_mask.sum()) for row in rows])
    assert counts.tolist() == batch.lengths, "what is masked has no row"
    inputs = LossInputs(
        logprobs[sampled],
        batch.proximal[sampled],
        tokens("rollout_logprobs"),
        tokens("advantages"),
        batch.rows,
        len(rows),
    )
    terms = update_loss(
        algorithm, inputs, weights=torch.tensor([row.weight for row in rows])[batch.rows], reference_logprobs=None
    )
    return torch.autograd.grad(terms.loss / denominator(groups, settings), logprobs)[0]


def _build_groups(batch: Batch) -> list[Group]:
    groups = []
    for number, of_group in enumerate(batch.split(range(len(batch.mask)))):
        group = Group(number, Prompt(number, "p", [1]))
        for i in of_group:
            length, score = batch.lengths[i], float(batch.scores[i])
            segment = Segment(
                [1] * (length + 1), [0, *[1] * length], [0.0, *batch.rollout[i, :length].tolist()],
                [-1, *[0] * length], [-1, *[0] * length],
            )  # fmt: skip
            results = {"r0": ScoredResult(id="x", valid=True, score=score)}
            group.episodes.append(Episode(number, number, i, [segment], [Turn("")], score=score, results=results))
        groups.append(group)
    invalid = Segment([1, 1], [0, 1], [0.0, -1.0], [-1, 0], [-1, 0])
    groups[1].episodes.append(Episode(1, 1, 99, [invalid], [Turn("")], score=None))
    return groups


def assert_equal(name: str, ours: Tensor, theirs: Tensor, at_most: float) -> None:
    """Print the largest difference relative to the largest number of the peer, and limit it."""
    assert ours.shape == theirs.shape
    found = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"{name}: {found:.1e}")
    assert found <= at_most, f"{name}: the difference is {found:.1e} of the largest number"
