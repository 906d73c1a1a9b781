"""The nouns of a step, shared by agent loops, batches, losses and the trainer. Plain data: no torch, no I/O.

A trajectory is tokens, not text: `token_ids` are exactly what the model saw and sampled, in order, over all turns;
`loss_mask` marks the sampled ones. Nothing decodes and tokenizes them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.wire.protocol import ScoreResult


class ScoredResult(ScoreResult):
    """A result as the client got it."""

    attempts: int = 1
    """Requests made for it (or for its group), those included that found a replica full or gone."""
    latency_seconds: float = 0.0
    """From its trajectory's end to this result, waits and retries included."""


@dataclass(frozen=True)
class Completion:
    """What the policy sampled after some tokens."""

    token_ids: list[int]
    """[sampled] The end-of-sequence token included, when the model ended by itself."""
    logprobs: list[float]
    """[sampled]"""
    text: str
    """Special tokens left out."""
    truncated: bool
    """Whether it hit the token limit."""
    weight_key: str


@dataclass
class Trajectory:
    """One finished conversation."""

    prompt_index: int
    """Row of the prompt in its data set."""
    group: int
    """Position of its group within the step (or evaluation)."""
    sample: int
    """Position within the group."""
    token_ids: list[int]
    """[tokens] Prompt and everything after it."""
    loss_mask: list[int]
    """[tokens] 1 where the policy sampled the token."""
    logprobs: list[float]
    """[tokens] The rollout's log-probability of each sampled token; 0.0 where loss_mask is 0."""
    text: str
    """The last completion, special tokens left out."""
    truncated: bool
    """Whether it ended at the token limit instead of by itself."""
    weight_key: str
    """GENERATION:VERSION that generated it."""
    results: dict[str, ScoreResult] = field(default_factory=dict)
    """By reward name."""
    score: float | None = None
    """Weighted sum of the rewards; None when any of them is invalid."""
    ended_at: float = 0.0
    """When it ended, by the monotonic clock."""
    advantage: float | None = None
    """What the update used; None where none did: evaluation, a masked sample."""

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class TrainSample:
    """What the loss needs of one trajectory."""

    token_ids: list[int]
    """[tokens]"""
    loss_mask: list[int]
    """[tokens] All zeros for a masked (invalid) sample, which then adds nothing to loss, count or gradient."""
    rollout_logprobs: list[float]
    """[tokens]"""
    advantage: float
    old_logprobs: list[float] | None = None
    """[tokens] The trainer's own log-probs before the step's first update; None: this update's forward (ratio 1)."""


@dataclass(frozen=True)
class UpdateMetrics:
    """What one optimizer update says of itself, reduced over all ranks."""

    loss: float
    policy_loss: float
    kl: float
    """Mean of the chosen estimator to the reference; 0 without one."""
    entropy: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    clip_fraction: float
    """Share of tokens whose ratio was clipped."""
    logprob_difference: float
    """Mean |trainer - rollout| log-prob over the sampled tokens, before the update."""
    num_tokens: int
    """Sampled tokens that the loss saw."""
    num_micro_batches: int
    """On the busiest rank."""
    seconds: float
