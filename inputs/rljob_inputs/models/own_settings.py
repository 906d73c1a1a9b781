"""Reads what a model's files say about its use, for defaults.py, which decides.

Invariants: every program of a job reads the same files, so head, trainers and rehearsals find the settings that `rljob
validate` shows; they are small, so a program knows its settings before it loads a tokenizer or weights.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import ChatTemplate
from rljob_inputs.findings import InputError
from rljob_inputs.hub import HubAccess, at_source
from rljob_inputs.models.chat_template import TemplateSource
from rljob_inputs.models.config import find_context_length, overrides_length
from rljob_inputs.models.defaults import FromModel, OwnSettings, resolve
from rljob_inputs.models.files import ModelFiles, open_trained_model
from rljob_inputs.models.tokenizer import read_special_ids, read_special_tokens, read_template

TEMPLATE_FIELD = "spec.model.chatTemplate"


@dataclass(frozen=True)
class ModelSettings:
    """A job as the programs of the trainer image use it."""

    job: RLJob
    """Resolved."""
    from_model: list[FromModel] = field(default_factory=list)
    model_length: int | None = None
    """The model's context in tokens, if vLLM uses it. None: unknown."""
    own: OwnSettings = field(default_factory=lambda: OwnSettings({}))

    @property
    def context_length(self) -> int | None:
        """Context of the rollouts: the longest prompt with its answer, in tokens. None: not known."""
        return self.job.spec.rollout.max_model_len or self.model_length


def load_model_settings(job: RLJob, location: str, environment: Mapping[str, str] = os.environ) -> ModelSettings:
    """Resolve the job with spec.model, which this program finds at `location`. Raise InputError if a file is broken,
    and TransientError if the Hub cannot be reached."""
    spec = job.spec
    with at_source("spec.model"):
        files = open_trained_model(location, spec.model.revision, HubAccess.from_environment(environment))
        own = read_own_settings(files, spec.model.chat_template)
    resolved = resolve(spec, own)
    overridden = overrides_length(spec.rollout.extra_args, spec.rollout.env)
    return ModelSettings(
        job=job.model_copy(update={"spec": resolved.spec}),
        from_model=resolved.from_model,
        model_length=None if overridden else find_context_length(own.config),
        own=own,
    )


def read_own_settings(files: ModelFiles, given: ChatTemplate | None = None) -> OwnSettings:
    """`given`: the job's template, in place of the model's. Raise UserError if a file or a template is broken."""
    special = read_special_tokens(files)
    text, place = read_template(files)
    if given is not None and given.inline is not None:
        text, place = given.inline, TEMPLATE_FIELD
    return OwnSettings(
        config=files.read_json("config.json"),
        generation=files.read_json("generation_config.json"),
        template=_compile(text, place, files.place, special) if text else None,
        template_place=place.removeprefix("spec."),
        eos_token=special.get("eos_token"),
        special_tokens=read_special_ids(files),
    )


def _compile(text: str, place: str, model: str, special: Mapping[str, str]) -> TemplateSource:
    try:
        return TemplateSource(text, special, f"the chat template of {model} in {place}")
    except UserError as error:
        if place == TEMPLATE_FIELD:
            raise InputError(TEMPLATE_FIELD, str(error)) from error
        raise UserError(f"{model}: the chat template in {place} {error}") from error
