"""The file of spec.model.chatTemplate, read where the job file is: the programs of a job get its text.

Invariant: after `inline_template`, a job's chat template is inline, or the job has none and a problem says why.
"""

import copy
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from rljob_api.read.documents import Document, Problem, parse_path
from rljob_inputs.data.files import suggest_path

FIELD = "spec.model.chatTemplate.file"


def inline_template(job: RLJob, document: Document, folder: Path) -> tuple[RLJob, list[Problem]]:
    """Return the job with the text of its template's file, whose path starts at `folder`, and why it is unusable."""
    given = job.spec.model.chat_template
    if given is None or given.file is None:
        return job, []
    job, problems = job.model_copy(deep=True), []
    try:
        job.spec.model.chat_template = ChatTemplate(inline=_read(folder / given.file))
    except UserError as error:
        job.spec.model.chat_template = None
        problems.append(Problem(FIELD, document.line_of(parse_path(FIELD)), str(error)))
    return job, problems


def place_template(manifest: dict[str, Any], job: RLJob) -> dict[str, Any]:
    """Return the manifest of a job with the text that `inline_template` has read in place of the file's path."""
    template = job.spec.model.chat_template
    if template is None:
        return manifest
    manifest = copy.deepcopy(manifest)
    manifest["spec"]["model"]["chatTemplate"] = {"inline": template.inline}
    return manifest


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"file {path} not found{suggest_path(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"file {path} cannot be read: {error}; name a UTF-8 text file") from error
    if not 0 < len(text) <= MAX_TEMPLATE_CHARACTERS:
        raise UserError(f"file {path} must have 1 to {MAX_TEMPLATE_CHARACTERS} characters, got {len(text)}")
    return text
