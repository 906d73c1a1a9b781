"""The tokenizer of the job's model, as the head finds it."""

from __future__ import annotations

from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Model
from rljob_inputs.hub.repository import repository_name


def load_tokenizer(location: str, model: Model) -> Any:
    """`location`: where this process finds the model, a folder or hf://org/name. Raise UserError."""
    from transformers import AutoTokenizer  # seconds to import

    name = repository_name(location)
    try:
        return AutoTokenizer.from_pretrained(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and its hub client raise dozens of types
        raise UserError(f"spec.model.source: cannot load the tokenizer of {name}: {error}") from error
