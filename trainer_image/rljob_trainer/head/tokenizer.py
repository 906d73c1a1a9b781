"""The tokenizer of the job's model, as the head finds it."""

from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Model
from rljob_inputs.models.files import place_model
from rljob_inputs.objects.errors import StorageAwayError
from rljob_trainer.failures.configuration import ErrorFacts, SourceAwayError, is_infrastructure_error, summarize
from rljob_trainer.written_tokenizer import load_written_tokenizer


def load_tokenizer(location: str, model: Model) -> Any:
    """Return transformers' tokenizer, with the chat template of the job if it has one. `location`: where this process
    finds the model, a folder, hf://org/name or s3://bucket/path. Raise UserError, and SourceAwayError if its storage
    cannot be reached."""
    try:
        name = place_model(location, weights=False)
    except StorageAwayError as error:
        raise SourceAwayError(str(error)) from error
    try:
        tokenizer = load_written_tokenizer(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except UserError as error:
        raise UserError(f"spec.model.source: {error}") from error
    except Exception as error:  # transformers and its hub client raise dozens of types
        if is_infrastructure_error(facts := ErrorFacts.of(error)):
            raise SourceAwayError(f"cannot load the tokenizer of {name}: {summarize(facts)}") from error
        raise UserError(f"spec.model.source: cannot load the tokenizer of {name}: {error}") from error
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template.inline
    return tokenizer
