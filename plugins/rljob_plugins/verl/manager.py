"""A reward manager of verl 0.9: a class with run_single(data), where data is a DataProto with the tokens of one sample.

Creates it as verl does, with a config whose `reward` is function.factoryArgs. Its tokenizer returns the completion: the
trainer has decoded it already. Invariant: its executor uses the loop of the worker, so it is created by the first call.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rljob_api.functions.forms import FormError
from rljob_api.functions.values import Sample, as_whole, read_completion_ids, read_prompt_ids
from rljob_plugins.verl.signature import count_turns, read_tool_fields
from rljob_service.worker.forms.binding import Binding
from rljob_service.worker.forms.outcome import Outcome
from rljob_service.worker.forms.results import fields_of, read_value

COMPUTE_SCORE = "compute_score"
"""The key of function.factoryArgs with the function that the manager calls: NAME of the source, or MODULE:NAME."""


class CompletionTokenizer:
    """Decodes the tokens of the current sample. A worker has one at a time."""

    def __init__(self) -> None:
        self.completion = ""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return self.completion


def bind(cls: Any, name: str, options: Mapping[str, Any], scope: str) -> Binding:
    """Return the binding of a manager class. Raise FormError if factoryArgs.compute_score is not a function."""
    compute_score = _find_function(cls, name, options.get(COMPUTE_SCORE))
    settings = {key: value for key, value in options.items() if key != COMPUTE_SCORE}
    tokenizer, made = CompletionTokenizer(), list[Any]()

    async def score(samples: list[Sample]) -> Any:
        sample = as_whole(samples[0])
        tokenizer.completion = sample["completion"]
        if not made:
            made.append(cls(_make_config(settings), tokenizer, compute_score))
        return await made[0].run_single(_make_data(sample))

    return Binding(score, lambda value, samples: [_read(value)], frozenset(("tokens", "whole")))


def _find_function(cls: Any, name: str, path: str | None) -> Callable[..., Any] | None:
    """Return the function; None for the manager's default."""
    if path is None:
        return None
    module, _, attribute = path.rpartition(":")
    source = importlib.import_module(module) if module else sys.modules[cls.__module__]
    function = getattr(source, attribute, None)
    if not callable(function):
        raise FormError(f"{name}: function.factoryArgs.{COMPUTE_SCORE} is {path}, which is not a function")
    return function


def _make_config(settings: Mapping[str, Any]) -> Any:
    config = {"reward": dict(settings), "trainer": {"experiment_name": "rljob"}}
    return importlib.import_module("omegaconf").OmegaConf.create(config)


def _make_data(sample: Sample) -> Any:
    """Return a DataProto with one sample.  [1, prompt], [1, completion], [1, prompt + completion]"""
    torch, numpy = importlib.import_module("torch"), importlib.import_module("numpy")
    prompt, response = read_prompt_ids(sample), read_completion_ids(sample)
    tensors = {
        "prompts": torch.tensor([prompt], dtype=torch.long),
        "responses": torch.tensor([response], dtype=torch.long),
        "attention_mask": torch.ones((1, len(prompt) + len(response)), dtype=torch.long),
    }
    values = {
        "data_source": sample.get("data_source", ""),
        "reward_model": {"ground_truth": sample.get("ground_truth")},
        "extra_info": dict(sample.get("extra_info", {})),
        "__num_turns__": count_turns(sample),
        "tool_extra_fields": read_tool_fields(sample),
    }
    columns = {key: numpy.empty(1, dtype=object) for key in values}
    for key, value in values.items():
        columns[key][0] = value
    return importlib.import_module("verl").DataProto.from_dict(tensors=tensors, non_tensors=columns)


def _read(value: Any) -> Outcome:
    """Read the score, and the numbers among reward_extra_info, whose `score` is the function's own."""
    fields = dict(fields_of(value) or {})
    extra = fields.pop("reward_extra_info", None)
    return read_value({**(extra if isinstance(extra, Mapping) else {}), **fields}, "reward_score")
