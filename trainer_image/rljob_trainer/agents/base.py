"""The interface of an agent loop: one conversation from a prompt to a finished episode.

It calls `generate` for completions and keeps token ids throughout. It knows neither replicas nor rewards: scoring
starts when `run` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rljob_api.wire.protocol import CallRequest, CallResult, Lane, ToolSchema
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Completion, Episode


class Generate(Protocol):
    """Tokens so far to a completion. Sampling parameters and seed are already bound."""

    async def __call__(self, token_ids: list[int], max_tokens: int | None = None) -> Completion:
        """`max_tokens`: a limit besides that of the sampling parameters."""
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


class AgentLoop(Protocol):
    """Stateless: one instance runs all conversations at once."""

    async def run(self, task: EpisodeTask) -> Episode: ...


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
