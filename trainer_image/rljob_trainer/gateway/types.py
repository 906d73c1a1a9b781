"""What the gateway's APIs have in common: a request for an answer, the answer, and the interface of a dialect. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_trainer.episodes.types import Completion

_MAX_MESSAGE_CHARACTERS = 4000
"""A message may quote a value of the request."""


class RequestError(ValueError):
    """A request that the gateway does not answer."""

    def __init__(self, status: int, code: str, message: str, *, may_retry: bool = False) -> None:
        """`status`: of HTTP. `code`: a few words for programs, such as context_length_exceeded. `message`: what is
        wrong, in which field, and what to do. `may_retry`: whether the client's SDK may send the request again."""
        message = message[:_MAX_MESSAGE_CHARACTERS]
        super().__init__(message)
        self.status, self.code, self.message, self.may_retry = status, code, message, may_retry


@dataclass(frozen=True)
class ModelRequest:
    """A request for one answer, in the form of chat completions: exactly one of messages and prompt."""

    model: str
    messages: list[Message] | None = None
    """The whole conversation. Tool calls and tool results as in OpenAI's chat completions."""
    prompt: str | list[int] | None = None
    """Prompt of the completions API: text, or token ids."""
    tools: list[ToolSchema] = field(default_factory=list)
    """Empty if the request forbids calls."""
    forms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What calls of a tool have besides those of a function: a namespace, or the type custom."""
    max_tokens: int | None = None
    """A limit besides the job's."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the answer, besides the job's."""
    stream: bool = False
    with_usage: bool = True
    """Whether a stream ends with token counts."""
    num_logprobs: int | None = None
    """None: not asked for. 0: of the sampled tokens alone."""
    with_reasoning: bool = True
    """Whether the answer shows the reasoning apart from the content."""
    ignored: tuple[str, ...] = ()
    """Fields that were given and have no effect, such as temperature."""


@dataclass(frozen=True)
class ModelAnswer:
    """One answer of the policy."""

    id: str
    """Unique in the job. Rewards of single answers refer to it."""
    created: int
    """Unix time, seconds."""
    message: Message
    """role assistant; content (str or None), reasoning_content and tool_calls (arguments as the JSON text of an
    object) if any."""
    finish_reason: str
    """stop, length or tool_calls."""
    completion: Completion
    num_prompt_tokens: int
    token_texts: list[str] = field(default_factory=list)
    """[sampled] Text of each token, if log-probs were asked for."""
    stop: str = ""
    """The request's stop string that ended it. Empty: none did."""


class Dialect(Protocol):
    """One API. Stateless."""

    path: str
    """Such as /v1/chat/completions."""
    reads: frozenset[str]
    """The fields of a request that it reads."""
    keep_alive: bytes
    """What a stream sends while it waits for the answer."""

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read what meaning.Rules kept of a request. Raise RequestError for what cannot be answered."""
        ...

    def write(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        """Return the body of the response."""
        ...

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Sequence[bytes]:
        """Return the server-sent events of the whole answer, with the one that ends the stream."""
        ...

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def error_event(self, status: int, code: str, message: str) -> bytes:
        """Return the event of an error after the stream has begun."""
        ...
