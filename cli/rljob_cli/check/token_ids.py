"""Token ids, and texts with special tokens, for rewards that read them: of samples that no rollout has produced.

The trainer sends the ids of the rollout. Here the tokenizer of the job's model makes them from the text, so that their
number and kind are the same.
"""

import os
from collections.abc import Mapping
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.base import Message
from rljob_api.wire.scores import ScoreRequest
from rljob_inputs.check import find_access
from rljob_inputs.models.files import open_model
from rljob_inputs.models.tokenizer import LightTokenizer, load_tokenizer
from rljob_inputs.score_requests import render

Groups = list[list[ScoreRequest]]


def are_missing(groups: Groups) -> bool:
    return any(None in (each.prompt_ids, each.completion_ids, each.rendered) for group in groups for each in group)


def read_tokenizer(job: RLJob) -> LightTokenizer | None:
    """Return the tokenizer of the job's model with the job's template; None without tokenizer.json. Raise UserError if
    the model cannot be read."""
    model = job.spec.model
    files = open_model(model.source, model.revision, find_access(job, os.environ))
    return load_tokenizer(files, model.chat_template.inline if model.chat_template else None)


def add_token_ids(job: RLJob, groups: Groups) -> Groups:
    """Return the samples with the ids that they lack. Raise UserError if the model's tokenizer cannot be read."""
    tokenizer = read_tokenizer(job)
    if tokenizer is None:
        raise UserError(
            f"spec.model.source: {job.spec.model.source} has no tokenizer.json, and the reward reads token ids; "
            "add the columns prompt_ids and completion_ids to the rows of --file"
        )
    arguments = job.spec.data.chat_template_arguments
    return [[_add(sample, tokenizer, arguments) for sample in group] for group in groups]


def _add(sample: ScoreRequest, tokenizer: LightTokenizer, arguments: dict[str, Any]) -> ScoreRequest:
    given = {"prompt_ids": sample.prompt_ids, "completion_ids": sample.completion_ids}
    made = {
        "prompt_ids": lambda: _encode_prompt(sample, tokenizer, arguments),
        "completion_ids": lambda: encode_answer(sample.prompt, sample.completion, tokenizer, arguments),
    }
    found = {name: made[name]() if ids is None else ids for name, ids in given.items()}
    whole = sample.whole and sample.whole.model_copy(update=found)
    completed = sample.model_copy(update={**found, "whole": whole})
    return completed.model_copy(update={"rendered": render(completed, tokenizer)})


def encode_answer(
    prompt: str | list[Message], completion: str, tokenizer: LightTokenizer, arguments: Mapping[str, Any]
) -> list[int]:
    return tokenizer.encode_answer(completion, arguments, is_chat=not isinstance(prompt, str))


def _encode_prompt(sample: ScoreRequest, tokenizer: LightTokenizer, arguments: dict[str, Any]) -> list[int]:
    if isinstance(sample.prompt, str):
        return tokenizer([sample.prompt])["input_ids"][0]
    text = tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True, tokenize=False, **arguments)
    return tokenizer([text], add_special_tokens=False)["input_ids"][0]
