"""What functions get: from a sample to a value. Pure, standard library only.

Of an agent's episode a sample has the last answer and, in `whole`, all that followed the prompt. `as_whole` makes one
from the other, so that each value has one definition. Plugins define further values of their projects.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

Sample = dict[str, Any]
"""A ScoreRequest from JSON; fields with defaults may be missing. `result` is its ScoreResult from the first step of
scope: sampleThenGroup, `messages` the completion of an agent's episode as messages."""


class Value(NamedTuple):
    """What a parameter gets."""

    name: str
    read: Callable[[Sample], Any]
    """May raise MissingPartError, and KeyError for a column that the row lacks."""
    part: str = ""
    """The parts of a request that it needs, with spaces between, which the driver sends only to rewards that read them:
    tokens (ids), rendered (texts with special tokens), steps (of the job)."""
    is_completion: bool = False
    read_all: Callable[[Sequence[Sample]], Any] | None = None
    """Reads one value for a whole call of a function of lists, in place of a list."""


class MissingPartError(Exception):
    """The request has no token ids, or no text with special tokens, which the function reads."""

    def __init__(self, field: str) -> None:
        super().__init__(
            f"the request has no {field}, which the function reads; the trainer sends it, and a test or a client of "
            "/v1/score must add it"
        )


def as_whole(sample: Sample) -> Sample:
    """Return the sample whose completion is all that followed the prompt; unchanged if that is one answer."""
    whole = sample.get("whole")
    if whole is None:
        return sample
    ids = {name: whole.get(name) for name in ("prompt_ids", "completion_ids")}
    return {**sample, "completion": whole["text"], "messages": whole["messages"], **ids}


def read_prompt_text(sample: Sample) -> str:
    """Return the prompt as text; of a chat, the contents of its messages as lines."""
    prompt = sample["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content_text(message.get("content")) for message in prompt)


def content_text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content or ""


def read_completion_messages(sample: Sample) -> str | list[dict[str, Any]]:
    """Return a string for a string prompt, else a list of messages: one answer, or a conversation."""
    completion: str = sample["completion"]
    if isinstance(sample["prompt"], str):
        return completion
    return sample.get("messages") or [{"role": "assistant", "content": completion}]


def read_ground_truth(sample: Sample) -> Any:
    return sample.get("ground_truth")


def read_data_source(sample: Sample) -> str:
    return sample.get("data_source", "")


def read_extra_info(sample: Sample) -> dict[str, Any]:
    return sample.get("extra_info", {})


def read_step(sample: Sample) -> int:
    return sample.get("finished_steps") or 0


def read_trainer_state(samples: Sequence[Sample]) -> SimpleNamespace:
    """Return what transformers' TrainerState says about steps."""
    return SimpleNamespace(global_step=read_step(samples[0]), max_steps=samples[0].get("total_steps") or 0)


def _token_ids(field: str) -> Callable[[Sample], list[int]]:
    def read(sample: Sample) -> list[int]:
        ids: list[int] | None = sample.get(field)
        if ids is None:
            raise MissingPartError(field)
        return ids

    return read


def _rendered(field: str) -> Callable[[Sample], str]:
    def read(sample: Sample) -> str:
        rendered = sample.get("rendered")
        if rendered is None:
            raise MissingPartError("rendered")
        text: str = rendered[field]
        return text

    return read


read_prompt_ids: Final = _token_ids("prompt_ids")
read_completion_ids: Final = _token_ids("completion_ids")

PROMPT: Final = Value("prompt", lambda sample: sample["prompt"])
"""As in the data: a string, or chat messages."""
PROMPT_TEXT: Final = Value("prompt_text", read_prompt_text)
COMPLETION: Final = Value("completion", lambda sample: sample["completion"], is_completion=True)
"""A string."""
COMPLETION_MESSAGES: Final = Value("completion_messages", read_completion_messages, is_completion=True)
GROUND_TRUTH: Final = Value("ground_truth", read_ground_truth)
DATA_SOURCE: Final = Value("data_source", read_data_source)
EXTRA_INFO: Final = Value("extra_info", read_extra_info)
PROMPT_IDS: Final = Value("prompt_ids", read_prompt_ids, "tokens")
COMPLETION_IDS: Final = Value("completion_ids", read_completion_ids, "tokens")
RENDERED_PROMPT: Final = Value("rendered_prompt", _rendered("prompt"), "rendered")
"""The prompt as the chat template wrote it."""
CONVERSATION: Final = Value("conversation", _rendered("query"), "rendered", is_completion=True)
"""Prompt and completion as one text, with special tokens."""
STEP: Final = Value("step", read_step, "steps")
"""Steps that have ended."""
TOTAL_STEPS: Final = Value("total_steps", lambda sample: sample.get("total_steps") or 0, "steps")
TRAINER_STATE: Final = Value(
    "trainer_state", lambda sample: read_trainer_state([sample]), "steps", read_all=read_trainer_state
)

COLUMNS: Final[Mapping[str, Value]] = {
    value.name: value
    for value in (
        *(PROMPT, PROMPT_TEXT, RENDERED_PROMPT, COMPLETION, COMPLETION_MESSAGES, CONVERSATION),
        *(GROUND_TRUTH, DATA_SOURCE, EXTRA_INFO, PROMPT_IDS, COMPLETION_IDS, STEP, TOTAL_STEPS),
    )
}
"""What function.columns may name, besides extra_info.KEY."""

_EXTRA: Final = "extra_info."


def find_column(name: str) -> Value:
    """Return what function.columns names: one of COLUMNS, or `extra_info.KEY`."""
    if not name.startswith(_EXTRA):
        return COLUMNS[name]
    return Value(name, lambda sample: _find_path(read_extra_info(sample), name.removeprefix(_EXTRA)))


def _find_path(mapping: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, where a key may have dots itself."""
    if path in mapping:
        return mapping[path]
    first, _, rest = path.partition(".")
    if not rest or not isinstance(mapping.get(first), Mapping):
        raise KeyError(f"{_EXTRA}{path}: the row has only {', '.join(map(str, mapping)) or 'no other columns'}")
    return _find_path(mapping[first], rest)
