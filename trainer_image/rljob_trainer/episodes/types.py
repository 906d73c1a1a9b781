"""The nouns of training, shared by agent loops, algorithms, the driver and the trainer. Plain data: no torch, no I/O.

    group     the episodes of one prompt, dispatched together
    episode   one conversation: the policy's turns, with rewards; its tokens are in one or more segments.
              An episode with several seats has several: each conversation that trains is a trajectory
    segment   one sequence of tokens, exactly as the model saw and sampled them
    row       a segment as the trainer gets it, with an advantage for each token

Nothing decodes tokens and tokenizes them again. An episode is the unit of staleness, masks, baselines and the loss's
denominator; a token has a log-probability and a weight version.
"""

import enum
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rljob_api.manifest.roles import Sampling
from rljob_api.wire.base import InvalidReason, Message
from rljob_api.wire.calls import Baseline
from rljob_api.wire.contract import MAX_TRAJECTORIES
from rljob_api.wire.scores import ScoreResult
from rljob_inputs.prompts import Prompt

_DEFAULT_SAMPLING = Sampling()
NOT_SAMPLED = -1
"""Version and turn of a token that the policy did not sample."""
TOP = np.dtype([("token", "<i4"), ("logprob", "<f4")])
"""One of the tokens that a teacher finds likeliest."""


def told_dtype(top_k: int) -> np.dtype[Any]:
    """Return what a teacher tells of each sampled token (ScoreResult.logprobs): its log-prob, or with topK a record."""
    return np.dtype([("logprob", "<f4"), ("top", TOP, (top_k,))] if top_k else "<f4")


class PromptTooLongError(ValueError):
    """The engine's context has no room for an answer to a prompt."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        """`limit`: the longest prompt with its answer, in tokens."""
        super().__init__(f"the prompt has {num_tokens} tokens, and the context of the rollouts has {limit}")
        self.num_tokens, self.limit = num_tokens, limit


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    """[sampled] Includes the end-of-sequence token if the model ended the text."""
    logprobs: list[float]
    """[sampled]"""
    versions: list[int]
    """[sampled] Version of the weights that sampled each token; never descends."""
    text: str
    """Without special tokens."""
    truncated: bool
    """Whether it hit the token limit."""
    generation: str = ""
    """Generation of the weights (`WeightVersion.generation`)."""


class ScoredResult(ScoreResult):
    attempts: int = 1
    """Requests for it (or for its group), including those that found a replica full or unreachable."""
    retries: int = 0
    """Those of the attempts that another one repeated: a sample and then its group are two attempts, and no retry."""
    latency_seconds: float = 0.0
    """From the end of its episode to this result, including waits and retries."""
    failed_as: InvalidReason | None = None
    """Why it failed, if failurePolicy.scores gave it its score. `message` says more."""

    @property
    def cause(self) -> InvalidReason | None:
        """Why it failed, whether it has a score or not."""
        return self.reason or self.failed_as


_DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "turns": np.int32,
}
"""Types of a segment's arrays, together 17 bytes a token."""


@dataclass(eq=False)
class Segment:
    """One sequence of tokens. A conversation whose context is rewritten, for example because earlier reasoning is
    dropped, continues in a new segment. All arrays are [tokens]; other sequences become arrays. An array never changes:
    to append makes a new one, so copies and rows may share it."""

    token_ids: NDArray[np.int32]
    """What the model saw and sampled, in order, over all turns of the segment."""
    loss_mask: NDArray[np.bool_]
    """True where the policy sampled the token."""
    logprobs: NDArray[np.float32]
    """The rollout's log-probability of each sampled token, which engines compute in fp32; 0.0 elsewhere."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled the token; NOT_SAMPLED elsewhere."""
    turns: NDArray[np.int32]
    """Index of the turn to which a sampled token belongs, which never descends; NOT_SAMPLED elsewhere."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype))

    def append_context(self, token_ids: ArrayLike) -> None:
        """Append tokens that the policy did not sample."""
        ids = np.asarray(token_ids, np.int32)
        self._append(len(ids), ids, False, 0.0, NOT_SAMPLED, NOT_SAMPLED)

    def append_sampled(self, completion: Completion, turn: int) -> None:
        count = len(completion.token_ids)
        self._append(count, completion.token_ids, True, completion.logprobs, completion.versions, turn)

    def _append(self, count: int, *values: ArrayLike) -> None:
        """`values`: for each array, those of `count` tokens, or one for all."""
        for name, value in zip(_DTYPES, values, strict=True):
            before = getattr(self, name)
            joined = np.empty(len(before) + count, before.dtype)
            joined[: len(before)], joined[len(before) :] = before, value
            setattr(self, name, joined)


def empty_segment() -> Segment:
    return Segment(*(np.zeros(0, dtype) for dtype in _DTYPES.values()))


def prompt_segment(prompt: Prompt) -> Segment:
    """Return the segment of an episode without an answer: one row, on which nothing trains."""
    segment = empty_segment()
    segment.append_context(prompt.token_ids)
    return segment


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    id: str
    """Unique within the episode."""
    name: str
    """Name of the function."""
    arguments: dict[str, Any] | None
    """None: what the policy wrote is not a JSON object."""
    error: str = ""
    """Why it failed; empty if it has a result."""
    seconds: float = 0.0
    """From its start to its result, with waits and retries."""
    tool: str = ""
    """Name of the tool in the job. Empty: no tool has a function of this name, or the call was not made."""


@dataclass
class Turn:
    """One answer of the policy."""

    text: str
    """Without special tokens."""
    truncated: bool = False
    """Whether it hit the token limit."""
    reward: float | None = None
    """What the environment or the simulated user gave for this turn; None: nothing."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    user_seconds: float | None = None
    """How long the simulated user's reply took, with waits and retries; None: it was not asked."""
    user_info: dict[str, Any] = field(default_factory=dict)
    """What the simulated user returned for the log."""
    advantage: float | None = None
    """Mean of what the update used for the turn's tokens; None for evaluation and for a masked episode."""


@dataclass(frozen=True)
class ContextBreak:
    """Why a conversation continues in a new segment."""

    cause: str
    """A few words, the same for all breaks of a kind."""
    difference: str = ""
    """The first text that differs between what the model saw and what the template renders now."""


@dataclass(frozen=True)
class EpisodeFailure:
    """Why an episode is invalid."""

    service: str
    """What failed: the name of a service (user, runner, or a tool's), or agent."""
    path: str
    """Its field in the job: spec.agent.user."""
    reason: str
    """An InvalidReason; context: the prompt leaves no room for an answer; no_turns: the program got no answer."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}: {self.message}"


class EpisodeEnd(enum.StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """An answer without tool calls, and no simulated user."""
    USER = "user"
    """The simulated user ended the conversation."""
    MAX_TURNS = "max_turns"
    """maxAssistantTurns or maxUserTurns."""
    TRUNCATED = "truncated"
    """An answer hit the token limit."""
    CONTEXT = "context"
    """The next prompt would leave no room for an answer."""
    RETURNED = "returned"
    """The program or the environment returned."""
    FAILED = "failed"
    """The episode is invalid: see Episode.failure."""


@dataclass(frozen=True)
class Whole:
    """The conversation that ends with the last answer, as one sequence: what projects pass to rewards. It has each
    answer as it was sampled, also where the chat template rewrites the history and a segment begins."""

    prompt_ids: NDArray[np.int32]
    """Up to the first sampled token."""
    completion_ids: NDArray[np.int32]
    """From there to the end of the last answer."""
    messages: list[Message]
    """After the prompt, as OpenAI's API has them: with tools, an answer's reasoning is apart from its content."""


@dataclass
class Episode:
    prompt_index: int
    """Row of the prompt in its dataset."""
    group: int
    """Number of its group: of the order of dispatch in training; of the order of the sets and their data in
    evaluation."""
    sample: int
    """Position within the group."""
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    generation: str = ""
    """Generation of the weights that sampled it."""
    results: dict[str, ScoredResult] = field(default_factory=dict)
    """By reward name."""
    own_reward: float | None = None
    """What the environment or the program gave the whole episode, unweighted. None: nothing."""
    score: float | None = None
    """Weighted sum of the rewards and of the episode's own; None if any of them is invalid."""
    ended_at: float = 0.0
    """When it ended, on the monotonic clock."""
    advantage: float | None = None
    """Mean of what the update used for its tokens; None for evaluation and for a masked episode."""
    messages: list[Message] = field(default_factory=list)
    """The whole conversation, with the prompt. Empty for a prompt without a chat template."""
    whole: Whole | None = None
    """None without an answer, and for singleTurn."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the simulated user returned last, or the environment or the program at the end."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment or the program returned for the log."""
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    failure: EpisodeFailure | None = None
    """Why it is invalid: no reward scores it, and it does not train. None for a valid episode."""
    sandbox_failures: list[EpisodeFailure] = field(default_factory=list)
    """Calls that a sandbox itself failed, and that the policy got as messages. Code that fails is a result."""
    breaks: list[ContextBreak] = field(default_factory=list)
    """[segments - 1] Why each segment after the first one was needed."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the program's requests that had no effect."""
    seat: str = ""
    """Who played it, in an episode with several seats. Empty: the episode has one player."""
    trajectory: int = 0
    """Position among the trajectories of its episode, below MAX_TRAJECTORIES. They have the same `sample`."""
    baseline: Baseline = "group"
    """With what its rewards are compared: the trajectories of its seat in the group, or in its episode."""
    traceparent: str = ""
    """The traceparent of its episode's span. Empty: it is not traced."""
    sampling: Sampling = field(default_factory=lambda: _DEFAULT_SAMPLING)
    """Those of its plan: the job's may change while it runs."""

    @property
    def position(self) -> int:
        """A number that no other trajectory of its group has; with one player, that of the sample is enough."""
        return self.sample * MAX_TRAJECTORIES + self.trajectory

    @property
    def peers(self) -> tuple[str, int | None]:
        """What it has in common with the trajectories with which it is compared: the seat, and perhaps the episode."""
        return self.seat, self.sample if self.baseline == "episode" else None

    @property
    def text(self) -> str:
        """The last answer, without special tokens."""
        return self.turns[-1].text if self.turns else ""

    @property
    def total_reward(self) -> float | None:
        """The score and the rewards of all turns: what training raises. None without a score, or if it overflows."""
        if self.score is None:
            return None
        total = self.score + sum(turn.reward or 0.0 for turn in self.turns)
        return total if math.isfinite(total) else None

    @property
    def truncated(self) -> bool:
        """Whether an answer hit the token limit."""
        return any(turn.truncated for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(int(np.count_nonzero(segment.loss_mask)) for segment in self.segments)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version that sampled one of its tokens; (NOT_SAMPLED, NOT_SAMPLED) without tokens."""
        versions = [segment.versions[segment.versions != NOT_SAMPLED] for segment in self.segments]
        sampled = versions[0] if len(versions) == 1 else np.concatenate([np.zeros(0, np.int32), *versions])
        return (int(sampled.min()), int(sampled.max())) if len(sampled) else (NOT_SAMPLED, NOT_SAMPLED)


def has_own_reward(episode: Episode) -> bool:
    """Return whether its environment, program or simulated user rewarded the episode or one of its answers."""
    return episode.own_reward is not None or any(turn.reward is not None for turn in episode.turns)


def single_turn(prompt: Prompt, group: int, sample: int, completion: Completion) -> Episode:
    """Return the episode of one prompt and one answer."""
    segment = prompt_segment(prompt)
    segment.append_sampled(completion, turn=0)
    turn = Turn(completion.text, completion.truncated)
    end = EpisodeEnd.TRUNCATED if completion.truncated else EpisodeEnd.ANSWERED
    return Episode(prompt.index, group, sample, [segment], [turn], completion.generation, end=end)


@dataclass(frozen=True)
class TrainedAs:
    """Where a step trained a group. To repeat the step bit by bit, gradients must be summed in the same order."""

    update: int
    """Number of the mini-batch."""
    part: int
    """Number of the trainer's call in the mini-batch."""
    position: int
    """Place in the step."""


@dataclass
class Group:
    """The episodes of one prompt, in the order of `Episode.sample` and `Episode.trajectory`."""

    index: int
    """See `Episode.group`."""
    prompt: Prompt
    episodes: list[Episode] = field(default_factory=list)
    trained_as: TrainedAs | None = None
    """None: not trained."""
    held_out: str = ""
    """Name of its evaluation set. Empty: training."""

    @property
    def place(self) -> TrainedAs:
        """Where a recorded group trained."""
        assert self.trained_as is not None, "a group of the log has trained"
        return self.trained_as

    def by_sample(self) -> list[list[Episode]]:
        """Return the trajectories of each episode.  [samples][trajectories]"""
        return [list(each) for _, each in itertools.groupby(self.episodes, key=lambda episode: episode.sample)]

    def compared(self) -> list[list[int]]:
        """Return which trajectories are compared with each other, as positions in `episodes`: each with those of its
        seat, in all episodes or in its own. Without seats, all episodes."""
        found: dict[tuple[str, int | None], list[int]] = {}
        for position, episode in enumerate(self.episodes):
            found.setdefault(episode.peers, []).append(position)
        return [*found.values()]


@dataclass(frozen=True)
class TrainRow:
    """One segment as the trainer gets it. All arrays are [tokens]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """All false for a segment that must not be trained on: it adds nothing to loss, count or gradient."""
    rollout_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    """0 where the token was not sampled."""
    versions: NDArray[np.int32]
    weight: float = 1.0
    """Weight of each sampled token in the loss, before the division by the update's denominator."""
    temperature: float = 1.0
    """At which it was sampled."""
    episode: int = 0
    """Rows of one episode have the same number within a call."""
    reference_logprobs: NDArray[np.float32] | None = None
    """Log-probs of the reference model; None: not needed, or the trainer computes them."""
    returns: NDArray[np.float32] | None = None
    """Targets of the critic; None without one."""
    values: NDArray[np.float32] | None = None
    """The critic's values before the update; None without one."""
    top: NDArray[np.void] | None = None
    """[sampled, teachers, k] The likeliest tokens of each teacher with topK, as TOP; None without any."""


@dataclass(frozen=True)
class TokenFacts:
    """What the trainer knows about the tokens of one row before an update. All arrays are [tokens], 0 where the token
    was not sampled; None: the algorithm does not need it."""

    reference_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    logprobs: NDArray[np.float32] | None = None
    """Those of the policy at temperature 1, which `Trainer.score` finds out."""


@dataclass(frozen=True)
class UpdateVersions:
    """Weight versions as the update sees them: a step counts 1, and each of its m mini-batches 1/m.

    The proximal policy, to which PPO's clipping refers, is the one at the start of the step. Its log-probs need no
    forward pass: they are interpolated between the rollout's and the current ones by these versions (AReaL's loglinear
    approximation, arXiv:2505.24298).
    """

    proximal: float
    """At the start of the step."""
    current: float
    """Version of the parameters now: `proximal`, plus the share of the step's updates that were applied."""
    end: float
    """Version of the policy that prox is behind, for tokens of older weights: `proximal` + 1, the end of the step;
    `current` if clipping must not see them."""


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one optimizer update, reduced over all ranks. Means are over the trained tokens (`trained_share`)."""

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
    """Sampled tokens of the update's rows."""
    num_micro_batches: int
    """On the busiest rank."""
    seconds: float
    """Seconds of the calls that make up the update."""
    mismatch_kl: float = 0.0
    """Mean k3 estimate of KL(rollout || trainer) over the sampled tokens."""
    mismatch_max: float = 0.0
    """Largest |trainer - rollout| log-prob of a token."""
    corrected_share: float = 0.0
    """Share of tokens whose importance weight, or that of their sequence, was truncated or masked."""
    rejected_share: float = 0.0
    """Share of tokens that algorithm.correction.rejection left out."""
    effective_sample_share: float = 1.0
    """(sum of weights)^2 / (n x sum of squared weights), of each token's importance weight before truncation, whatever
    correction.level is: 1 is on-policy."""
    trained_share: float = 1.0
    """Share of the sampled tokens that were trained. The others are in rows whose advantages are all 0: without a KL
    penalty, an entropy bonus or a critic they have no gradient, so the trainer leaves them out."""
    is_skipped: bool = False
    """Whether the parameters stayed as they were, because the gradient was not finite."""
    critic_loss: float | None = None
    """Mean over the sampled tokens; None without a critic."""
