"""TRL's reward functions: lists of prompts and completions, with the columns of the data."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value


def _read_completion(sample: Sample) -> str | list[dict[str, Any]]:
    """Return the completion with the keys of GRPOTrainer, which has no ids of calls."""
    messages = values.read_completion_messages(sample)
    return messages if isinstance(messages, str) else [_without_ids(message) for message in messages]


def _without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key != "tool_call_id"}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [{key: value for key, value in call.items() if key != "id"} for call in calls]
    return kept


def _read_environment(sample: Sample) -> SimpleNamespace:
    """Return the public attributes that the environment of the episode had at its end."""
    return SimpleNamespace(**values.read_extra_info(sample).get("state", {}))


def _entry(form: str, marker: str, rank: int) -> Convention:
    return Convention(
        "trl",
        form,
        (marker,),
        {
            "prompts": values.PROMPT,
            "completions": Value("trl_completion", _read_completion, is_completion=True),
            "answer": values.GROUND_TRUTH,
            "ground_truth": values.GROUND_TRUTH,
            "solution": values.GROUND_TRUTH,
            "data_source": values.DATA_SOURCE,
            "prompt_ids": values.PROMPT_IDS,
            "completion_ids": values.COMPLETION_IDS,
            "trainer_state": values.TRAINER_STATE,
            "environments": Value("environments", _read_environment),
        },
        rank=rank,
        lists=True,
        returns="numbers",
        whole=True,
        has_columns=True,
        # log_extra fills TRL's table of completions, which the run's trajectories already contain.
        callbacks={"log_metric": "component", "log_extra": "ignored"},
    )


SIGNATURE: Final = SignaturePlugin(
    conventions=(
        _entry("reward(prompts, completions, **columns)", "completions", rank=300),
        _entry("reward(environments, **columns)", "environments", rank=310),
        _entry("reward(completion_ids, **columns)", "completion_ids", rank=700),
    )
)
