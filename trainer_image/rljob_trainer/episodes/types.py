"""The nouns of a step, shared by agent loops, algorithms and the trainer. Plain data: no torch, no I/O.

A trajectory is tokens, not text: `token_ids` are exactly what the model saw and sampled, in order, over all turns;
`loss_mask` marks the sampled ones. Nothing decodes and tokenizes them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.wire.protocol import ScoreResult
from rljob_inputs.prompts import Prompt


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    """[sampled] Includes the end-of-sequence token if the model ended the text."""
    logprobs: list[float]
    """[sampled]"""
    text: str
    """Without special tokens."""
    truncated: bool
    """Whether it hit the token limit."""
    weight_key: str


class ScoredResult(ScoreResult):
    attempts: int = 1
    """Requests for it (or for its group), including those that found a replica full or unreachable."""
    latency_seconds: float = 0.0
    """From the end of its trajectory to this result, including waits and retries."""


@dataclass
class Trajectory:
    prompt_index: int
    """Row of the prompt in its dataset."""
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
    """The last completion, without special tokens."""
    truncated: bool
    """Whether it hit the token limit."""
    weight_key: str
    """GENERATION:VERSION that generated it."""
    results: dict[str, ScoreResult] = field(default_factory=dict)
    """By reward name."""
    score: float | None = None
    """Weighted sum of the rewards; None if any of them is invalid."""
    ended_at: float = 0.0
    """When it ended, on the monotonic clock."""
    advantage: float | None = None
    """What the update used; None for evaluation and for a masked sample."""

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)


@dataclass
class Group:
    """The trajectories of one prompt, in the order of `Trajectory.sample`."""

    index: int
    """Position within the step."""
    prompt: Prompt
    trajectories: list[Trajectory] = field(default_factory=list)


@dataclass(frozen=True)
class TrainSample:
    token_ids: list[int]
    """[tokens]"""
    loss_mask: list[int]
    """[tokens] All zeros for a masked (invalid) sample, which adds nothing to loss, count or gradient."""
    rollout_logprobs: list[float]
    """[tokens]"""
    advantage: float
    old_logprobs: list[float] | None = None
    """[tokens] The trainer's own log-probs before the step's first update; None: this update's forward (ratio 1)."""


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one optimizer update, reduced over all ranks."""

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
