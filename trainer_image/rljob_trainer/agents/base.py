"""The interface of an agent loop: one conversation from a prompt to a finished episode.

It calls `generate` for completions and keeps token ids throughout. It knows neither replicas nor rewards: scoring
starts when `run` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from rljob_api.wire.base import Lane, Message
from rljob_api.wire.calls import CallRequest, CallResult, ModelAccess, ToolSchema
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import (
    Completion,
    ContextBreak,
    Episode,
    EpisodeFailure,
    PromptTooLongError,
    Segment,
    Turn,
    Whole,
)

AGENT: Final = "agent"
"""The service of an episode's failure for which none of the job's services is the cause."""
REASON_CONTEXT: Final = "context"


class Generate(Protocol):
    """Tokens so far to a completion. Sampling parameters and seed are already bound."""

    async def __call__(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """`max_tokens`: a limit besides that of the sampling parameters. `stop`: strings that end it, besides
        theirs. Raise PromptTooLongError if the engine has no room for an answer."""
        ...


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to run."""

    id: str
    """Unique in the job; a repeated episode after a restart has a new one."""
    lane: Lane
    prompt: Prompt
    group: int
    sample: int
    generate: Generate
    seed: int = 0
    """For what is random besides the policy. The same after a restart."""
    needs_reward: bool = False
    """Whether no reward scores it: without one from its program or environment it is invalid, and not a zero."""


class AgentLoop(Protocol):
    """Stateless: one instance runs all conversations at once."""

    async def run(self, task: EpisodeTask) -> list[Episode]:
        """Return the trajectories of the episode, at least one. Only an episode with several seats has more."""
        ...


def describe_length(error: PromptTooLongError) -> EpisodeFailure:
    """Return why an episode is invalid whose first prompt is too long."""
    message = f"{error}, tools included; raise rollout.maxModelLen, or set data.maxPromptTokens"
    return EpisodeFailure(AGENT, "spec.rollout.maxModelLen", REASON_CONTEXT, message)


@dataclass(frozen=True)
class ToolSet:
    """The functions that the policy may call."""

    schemas: list[ToolSchema] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    """Name of a function -> name of its tool in the job."""


class Services(Protocol):
    """What an agent calls besides the policy."""

    async def tools(self) -> ToolSet: ...

    async def call(self, service: str, request: CallRequest) -> tuple[CallResult, float]:
        """Call the simulated user or a tool. Return the result, after all retries, and the seconds until it."""
        ...

    def end_episode(self, tool: str, episode: str, lane: Lane) -> None:
        """Let a tool free what it holds for an episode. Does not wait for it."""
        ...


class EpisodeMessage(Protocol):
    """The request for an episode. Each time that it is sent is another attempt."""

    @property
    def id(self) -> str: ...
    @property
    def lane(self) -> Lane: ...

    def next_attempt(self) -> CallRequest:
        """Begin an attempt, which supersedes the earlier ones, and return what to send."""
        ...

    def end_attempt(self) -> None:
        """The runner has ended the attempt, or is lost."""
        ...


class EpisodeRunner(Protocol):
    """The Pods that run the episodes of environments and programs."""

    async def run(self, message: EpisodeMessage) -> tuple[CallResult, float]:
        """Let a runner run an episode. Return the result, after all retries, and the seconds until it."""
        ...


@dataclass
class Recording:
    """What the gateway recorded of one attempt: the policy's part of an episode."""

    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """In the order in which the policy answered."""
    completion_ids: list[str] = field(default_factory=list)
    """[turns] The `id` of each answer in the API's response."""
    breaks: list[ContextBreak] = field(default_factory=list)
    """[segments - 1]"""
    messages: list[Message] = field(default_factory=list)
    """The conversation that ends with the last answer."""
    whole: Whole | None = None
    """The same as one sequence of tokens; None without an answer."""
    generation: str = ""
    """Generation of the weights that sampled the last answer."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Posted for single answers, by completion id or number of the turn."""
    reward: float | None = None
    """Posted for the episode."""
    refusal: str = ""
    """Why the gateway last refused to answer, such as the turn limit. Empty: it did not."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the program's requests that had no effect."""
    waits_for: str = ""
    """What the episode does now: `waited for a completion`, or `computes since its turn 2`."""
    seat: str = ""
    """Whose trajectory it is. Empty: of requests without a seat."""
    session: str = ""
    """Which of the seat's trajectories."""
    seats: list[Recording] = field(default_factory=list)
    """The trajectories of seats, in the order of their first requests. Empty without seats."""


class OpenEpisode(Protocol):
    """An episode that a program plays through the gateway."""

    def start_attempt(self) -> tuple[int, ModelAccess]:
        """Begin an attempt with its own key. Earlier keys are refused, and what they recorded is dropped."""
        ...

    def end_attempt(self) -> None:
        """Refuse the current key. What is recorded stays until the next attempt, which may be long in coming."""
        ...

    def read(self) -> Recording:
        """Return what the current attempt has recorded. It may still change until `close`."""
        ...

    def close(self) -> None:
        """End the episode: its keys are refused, and requests in flight are cancelled. May be called twice."""
        ...


class Gateway(Protocol):
    """Serves the policy to programs over HTTP, and records exact tokens."""

    def open(self, task: EpisodeTask) -> OpenEpisode: ...
