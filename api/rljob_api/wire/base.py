"""The base of all messages, and why a result has no value.

Status codes of a reward server: 200 for every executed request, valid or not; 401 without the token; 422 with a reason
if the request is malformed; 429 with Retry-After if the queue is full; 503 while it drains.
"""

import enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Lane = Literal["train", "eval"]
Message = dict[str, Any]
"""One chat message: role and content."""
Messages = Annotated[list[Message], Field(fail_fast=True)]
"""A conversation. The error of a list of something else names its first entry alone, not millions."""


class Wire(BaseModel):
    # Built at the first use: each program has messages of its own.
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, defer_build=True)


class InvalidReason(enum.StrEnum):
    """Why a result has no score."""

    EXCEPTION = "exception"
    """The function raised."""
    TIMEOUT = "timeout"
    """Execution exceeded timeoutSeconds and was killed."""
    NOT_FINITE = "not_finite"
    """NaN or infinity."""
    BAD_RETURN = "bad_return"
    """The signature does not allow the return value."""
    WORKER_DIED = "worker_died"
    """The worker process ended (crash, os._exit, out of memory) or closed its pipe."""
    BAD_REQUEST = "bad_request"
    """The request's data cannot be used, so a retry would fail, too. Half a surrogate pair, or JSON that is nested too
    deeply. For a tool: the policy called a function that does not exist, or with wrong arguments; the message is
    written for the policy."""
    ABSTAINED = "abstained"
    """The function returned None: it does not score this sample."""
    REFUSED = "refused"
    """The model that judges or plays the user refused to answer."""
    CONTENT_FILTER = "content_filter"
    """A filter of the model's endpoint withheld the answer."""
    EMPTY = "empty"
    """The model's answer has no text, or its reasoning alone."""
    UNREACHABLE = "unreachable"
    """Client side: no replica answered within the sample's deadline. Server side: the endpoint of the model that judges
    or plays the user is away; the driver waits for it."""
    DEADLINE = "deadline"
    """Client side: no result within deadlineSeconds."""
    CANCELLED = "cancelled"
    """The server shut down, or the client disconnected, before execution ended."""
    INTERRUPTED = "interrupted"
    """Another request of the same process ended it (episodesPerProcess). The client sends this one again: it is no
    attempt of the function."""
