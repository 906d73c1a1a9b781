"""What a function gets for each name of the conventions' table: from a sample to a value. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

Sample = dict[str, Any]
"""A ScoreRequest from JSON; fields with defaults may be missing. `result` is its ScoreResult from the first step of
scope: sampleThenGroup."""

_EXTRA = "extra_info."


class MissingTokensError(Exception):
    """The request has no token ids, which the function reads."""


def reader_of(name: str) -> Callable[[Sample], Any]:
    """Return how to read a value of the table, or `extra_info.KEY`: a KeyError if the sample has no such key."""
    if name.startswith(_EXTRA):
        return lambda sample: _find_path(sample.get("extra_info", {}), name.removeprefix(_EXTRA))
    return VALUES[name]


def _find_path(mapping: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, where a key may have dots itself."""
    if path in mapping:
        return mapping[path]
    first, _, rest = path.partition(".")
    if not rest or not isinstance(mapping.get(first), Mapping):
        raise KeyError(f"{_EXTRA}{path}: the row has only {', '.join(map(str, mapping)) or 'no other columns'}")
    return _find_path(mapping[first], rest)


def prompt_text(sample: Sample) -> str:
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


def completion_messages(sample: Sample) -> str | list[dict[str, str]]:
    completion: str = sample["completion"]
    return completion if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": completion}]


def openrlhf_prompt(sample: Sample) -> str:
    """Return the prompt's text. OpenRLHF applies the trainer's chat template; here a chat is its contents as lines."""
    return sample["prompt"] if isinstance(sample["prompt"], str) else f"{prompt_text(sample)}\n"


def _extra_info(sample: Sample) -> dict[str, Any]:
    return sample.get("extra_info", {})


def _token_ids(field: str) -> Callable[[Sample], list[int]]:
    def read(sample: Sample) -> list[int]:
        ids: list[int] | None = sample.get(field)
        if ids is None:
            raise MissingTokensError(
                f"the request has no {field}, which the function reads; the trainer sends them, and a test or a client "
                f"of /v1/score must add them"
            )
        return ids

    return read


prompt_ids = _token_ids("prompt_ids")
completion_ids = _token_ids("completion_ids")


def _row(sample: Sample) -> dict[str, Any]:
    return {"question": prompt_text(sample), "answer": sample.get("ground_truth")} | _extra_info(sample)


def _entry(sample: Sample) -> dict[str, Any]:
    """Return an entry of reasoning_gym. Its datasets have the columns question, answer and metadata."""
    return {"metadata": {}} | _row(sample) | {"answer": sample.get("ground_truth")}


def _task_info(sample: Sample) -> dict[str, Any]:
    return _row(sample) | {"ground_truth": sample.get("ground_truth"), "data_source": sample.get("data_source", "")}


def _reward_input(sample: Sample) -> dict[str, Any]:
    extra = _extra_info(sample)
    length = extra.get("num_tokens", len(sample.get("completion_ids") or ()))
    own = {"response": sample["completion"], "response_length": length, "ground_truth": sample.get("ground_truth")}
    return extra | own


def _slime_sample(sample: Sample) -> SimpleNamespace:
    """Return the fields of slime's Sample that exist when a reward is called."""
    extra = _extra_info(sample)
    given, sampled = prompt_ids(sample), completion_ids(sample)
    status = SimpleNamespace(value="truncated" if extra.get("truncated") else "completed")
    status.name = status.value.upper()
    return SimpleNamespace(
        index=extra.get("index"),
        group_index=None,
        prompt=sample["prompt"],
        tokens=[*given, *sampled],
        response=sample["completion"],
        response_length=len(sampled),
        label=sample.get("ground_truth"),
        reward=None,
        loss_mask=None,
        status=status,
        metadata=extra,
        custom_rm_path=None,
        reward_spec=None,
        multimodal_inputs=None,
    )


def _state(sample: Sample) -> dict[str, Any]:
    """Return the state of verifiers' rollout: what a reward may read without an environment."""
    fields = {name: VALUES[name](sample) for name in ("prompt", "task", "info")}
    completion = completion_messages(sample)
    answer = sample.get("ground_truth")
    row = _extra_info(sample)
    own = {"completion": completion, "answer": answer, "input": {**row, **fields, "answer": answer}, "trajectory": []}
    return {**row, **fields, **own}


VALUES: Final[Mapping[str, Callable[[Sample], Any]]] = {
    "prompt": lambda sample: sample["prompt"],
    "prompt_text": prompt_text,
    "openrlhf_prompt": openrlhf_prompt,
    "completion": lambda sample: sample["completion"],
    "completion_messages": completion_messages,
    "query": lambda sample: openrlhf_prompt(sample) + sample["completion"],
    "ground_truth": lambda sample: sample.get("ground_truth"),
    "data_source": lambda sample: sample.get("data_source", ""),
    "extra_info": _extra_info,
    "info": lambda sample: _extra_info(sample).get("info", _extra_info(sample)),
    "task": lambda sample: _extra_info(sample).get("task", sample.get("data_source", "")),
    "state": _state,
    "row": _row,
    "entry": _entry,
    "task_info": _task_info,
    "reward_input": _reward_input,
    "sample": _slime_sample,
    "output_text": lambda sample: {"output_text": sample["completion"]},
    "prompt_ids": prompt_ids,
    "completion_ids": completion_ids,
}
