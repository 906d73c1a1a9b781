"""What a slot returns for one execution: a reply for each sample, or one failure of all samples.

Shared by both kinds of slots (worker processes, calls of a model server) and by the server. Invariant: a reply has a
finite score or a reason, never both.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_api.wire.protocol import InvalidReason

MAX_MESSAGE_CHARACTERS = 2000


class SampleReply(BaseModel):
    """The score of one sample, or why there is none. Strict: user code of the worker's process could write anything."""

    model_config = ConfigDict(extra="forbid", strict=True)

    score: FiniteFloat | None
    components: dict[str, FiniteFloat] = Field(max_length=MAX_COMPONENTS)
    reason: InvalidReason | None = Field(strict=False)
    message: str = Field(max_length=MAX_MESSAGE_CHARACTERS)

    @model_validator(mode="after")
    def _score_xor_reason(self) -> SampleReply:
        if (self.score is None) == (self.reason is None):
            raise ValueError("a reply must have either a score or a reason")
        return self


ExecutionResult = list[SampleReply]
"""One reply per sample; or a single one with a reason, which applies to all samples."""


def failure(reason: InvalidReason, message: str) -> ExecutionResult:
    return [SampleReply(score=None, components={}, reason=reason, message=message[:MAX_MESSAGE_CHARACTERS])]


class StartupReport(BaseModel):
    """What the first slot reports when it has started: what it serves, or why it cannot."""

    model_config = ConfigDict(extra="forbid")

    entrypoint: str = ""
    signature: str = ""
    reads_tokens: bool = False
    """Whether requests must have prompt_ids and completion_ids."""
    missing: list[str] = []
    """Isolation mechanisms that this machine does not offer."""
    error: str = ""
