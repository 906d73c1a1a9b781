"""What a reward gets of a finished sample: the one place where its request is built, for training and for every check.

Leaves to its callers what the sample is: an episode of the driver, or a completion that a user passes. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rljob_api.manifest.agent import CompletionChoice
from rljob_api.wire.base import Lane, Message
from rljob_api.wire.scores import Rendered, ScoreRequest, WholeCompletion
from rljob_inputs.prompts import Prompt


class Decoder(Protocol):
    """A tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Answer:
    """The last answer of the policy. Without a tokenizer, tokens are unknown."""

    text: str
    """Without special tokens."""
    truncated: bool = False
    """Whether an answer of the episode hit the token limit."""
    num_tokens: int | None = None
    """Sampled tokens of all answers."""
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None


@dataclass(frozen=True)
class Conversation:
    """What the episode of an agent was, besides its last answer."""

    messages: list[Message]
    """With the prompt."""
    turns: list[dict[str, Any]]
    """See describe_turn."""
    state: dict[str, Any]
    end: str
    whole: WholeCompletion | None
    """None without an answer, and if rewards get the last one alone."""


def describe_turn(text: str, reward: float | None = None, tool_calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return an entry of extra_info["turns"]. `tool_calls`: dicts with name, arguments, error."""
    return {"text": text, "reward": reward, "tool_calls": list(tool_calls)}


def build_request(
    request_id: str,
    lane: Lane,
    prompt: Prompt,
    answer: Answer,
    conversation: Conversation | None = None,
    choice: CompletionChoice = "auto",
) -> ScoreRequest:
    """Return the request. `choice`: agent.completion, which decides for all rewards what each decides by its form."""
    facts: dict[str, Any] = {"truncated": answer.truncated}
    if answer.num_tokens is not None:
        facts["num_tokens"] = answer.num_tokens
    whole = None
    if conversation is not None:
        facts |= {name: getattr(conversation, name) for name in ("messages", "turns", "state", "end")}
        whole = None if choice == "last" else conversation.whole
    is_all = choice == "all"
    return ScoreRequest(
        id=request_id,
        lane=lane,
        prompt=prompt.prompt,
        completion=whole.text if whole is not None and is_all else answer.text,
        ground_truth=prompt.ground_truth,
        answer_column=prompt.answer_column,
        data_source=prompt.data_source,
        extra_info={**prompt.extra_info, **facts},
        whole=whole,
        prompt_ids=whole.prompt_ids if whole is not None and is_all else answer.prompt_ids,
        completion_ids=whole.completion_ids if whole is not None and is_all else answer.completion_ids,
    )


def list_columns(row: Prompt | ScoreRequest) -> dict[str, Any]:
    """Return the columns of the row: those of extra_info, and the answer's."""
    return {**row.extra_info, **({row.answer_column: row.ground_truth} if row.answer_column else {})}


def render(request: ScoreRequest, decoder: Decoder) -> Rendered | None:
    """Return the texts with special tokens; None without token ids."""
    ids = request if request.whole is None else request.whole
    if ids.prompt_ids is None or ids.completion_ids is None:
        return None
    prompt, query = (
        decoder.decode(token_ids, skip_special_tokens=False)
        for token_ids in (ids.prompt_ids, [*ids.prompt_ids, *ids.completion_ids])
    )
    return Rendered(prompt=prompt, query=query)
