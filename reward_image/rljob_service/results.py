"""What a slot returns for one execution: a reply for each sample, or for a call; or one failure of the execution.

Shared by both kinds of slots (worker processes, calls of a model server) and by the server. Invariant: a reply has a
finite score (or a value) or a reason, never both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import EpisodeReply, RowsReply, ToolSchema, UserReply
from rljob_api.wire.contract import MAX_COMPONENTS, MAX_TOOL_RESULT_CHARACTERS
from rljob_api.wire.scores import Part

MAX_MESSAGE_CHARACTERS = 2000


class Reply(BaseModel):
    """Why there is no result. Strict: user code of the worker's process could write anything."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: InvalidReason | None = Field(strict=False)
    message: str = Field(max_length=MAX_MESSAGE_CHARACTERS)


class SampleReply(Reply):
    """The score of one sample, or why there is none."""

    score: FiniteFloat | None
    components: dict[str, FiniteFloat] = Field(max_length=MAX_COMPONENTS)
    pred: str | None = Field(default=None, max_length=1000)
    abstained: list[str] = []
    logprobs: list[str] | None = None

    @model_validator(mode="after")
    def _score_xor_reason(self) -> SampleReply:
        if (self.score is None) == (self.reason is None):
            raise ValueError("a reply must have either a score or a reason")
        return self


class CallReply(Reply):
    """The value of one call, or why there is none."""

    value: Any

    @model_validator(mode="after")
    def _value_xor_reason(self) -> CallReply:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a reply must have either a value or a reason")
        return self


class UserCallReply(CallReply):
    value: UserReply | None


class ToolCallReply(CallReply):
    value: str | None = Field(max_length=MAX_TOOL_RESULT_CHARACTERS)


class RunnerCallReply(CallReply):
    value: EpisodeReply | RowsReply | None


ExecutionResult = Sequence[Reply]
"""One reply per sample, or one of a call; or a single one with a reason, which applies to all samples."""


def failure(reason: InvalidReason, message: str) -> ExecutionResult:
    return [Reply(reason=reason, message=message[:MAX_MESSAGE_CHARACTERS])]


class StartupReport(BaseModel):
    """What the first slot reports when it has started: what it serves, or why it cannot."""

    model_config = ConfigDict(extra="forbid")

    entrypoint: str = ""
    signature: str = ""
    reads: list[Part] = []
    """What requests must have besides the rest."""
    takes_groups: bool = False
    """Whether one call can score several samples, whatever the reward's scope."""
    tools: list[ToolSchema] = []
    """Functions that it serves."""
    missing: list[str] = []
    """Isolation mechanisms that this machine does not offer."""
    error: str = ""
