"""Token ids for rewards that read them, of prompts and completions that no rollout has produced.

The trainer sends the ids of the rollout. Here the tokenizer of the job's model makes them from the text, so that their
number and kind are the same; special tokens at the end of a completion are missing.
"""

import os

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.protocol import ScoreRequest
from rljob_inputs.check import find_access
from rljob_inputs.models.files import open_model
from rljob_inputs.models.tokenizer import LightTokenizer, load_tokenizer

Groups = list[list[ScoreRequest]]


def are_missing(groups: Groups) -> bool:
    return any(sample.prompt_ids is None or sample.completion_ids is None for group in groups for sample in group)


def add_token_ids(job: RLJob, groups: Groups) -> Groups:
    """Return the samples with the ids that they lack. Raise UserError if the model's tokenizer cannot be read."""
    source = job.spec.model.source
    tokenizer = load_tokenizer(open_model(source, job.spec.model.revision, find_access(job, os.environ)))
    if tokenizer is None:
        raise UserError(
            f"spec.model.source: {source} has no tokenizer.json, and the reward reads token ids; "
            "add the columns prompt_ids and completion_ids to the rows of --file"
        )
    return [[_add(sample, tokenizer) for sample in group] for group in groups]


def _add(sample: ScoreRequest, tokenizer: LightTokenizer) -> ScoreRequest:
    given = {"prompt_ids": sample.prompt_ids, "completion_ids": sample.completion_ids}
    made = {
        "prompt_ids": lambda: _encode_prompt(sample, tokenizer),
        "completion_ids": lambda: tokenizer([sample.completion], add_special_tokens=False)["input_ids"][0],
    }
    return sample.model_copy(update={name: made[name]() if ids is None else ids for name, ids in given.items()})


def _encode_prompt(sample: ScoreRequest, tokenizer: LightTokenizer) -> list[int]:
    if isinstance(sample.prompt, str):
        return tokenizer([sample.prompt])["input_ids"][0]
    text = tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer([text], add_special_tokens=False)["input_ids"][0]
