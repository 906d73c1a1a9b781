"""The tokenizer of the job's model, as the head finds it."""

from __future__ import annotations

from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.hub.repository import repository_name
from rljob_trainer.head.environment import Environment


def load_tokenizer(environment: Environment) -> Any:
    from transformers import AutoTokenizer  # seconds to import

    model = environment.job.spec.model
    name = repository_name(environment.model)
    try:
        return AutoTokenizer.from_pretrained(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and its hub client raise dozens of types
        raise UserError(f"spec.model.source: cannot load the tokenizer of {name}: {error}") from error
