"""Read the files that the operator writes for Pods, also those of a newer operator.

After an upgrade of the operator, a running role keeps its image, and a restarted container reads the file again.
Fields that its version does not know were validated by the operator, so they are left out with a warning. A job that an
earlier version accepted runs on with a warning, too (`Rule.is_ratcheted`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.read.documents import read_documents
from rljob_api.read.load import InvalidManifestError, load_job
from rljob_api.read.unknown_fields import drop_unknown_fields
from rljob_api.wire.redaction import redact_job

log = logging.getLogger(__name__)


def describe_job_file(path: str | Path) -> str:
    """Return the file of a Pod without its secrets, for the records of the run."""
    return yaml.safe_dump(redact_job(yaml.safe_load(Path(path).read_bytes())), sort_keys=False, allow_unicode=True)


def load_job_file(path: str | Path) -> RLJob:
    """Return the RLJob in the file of a Pod. Raises UserError."""
    try:
        return load_job(path)
    except InvalidManifestError as error:
        documents, problems = read_documents(Path(path).read_text(encoding="utf-8"))
        if problems or len(documents) != 1:
            raise
        try:
            job = RLJob.model_validate(drop_unknown_fields(RLJob, documents[0].data, str(path)))
        except ValidationError:
            raise error from None
        log.warning("the job is used as it is stored, although a new one would be refused:\n%s", error)
        return job


@dataclass
class JobFile:
    """A file that may change. A cluster swaps the symbolic link of a ConfigMap's volume; `rljob run` renames a new file
    over it."""

    path: Path
    _spec: RLJobSpec
    """The spec of the newest readable file."""
    resolve: Callable[[RLJobSpec], RLJobSpec] = lambda spec: spec
    _read: bytes = b""

    def read_spec(self) -> RLJobSpec:
        try:
            if (found := self.path.read_bytes()) != self._read:
                self._read = found
                self._spec = self.resolve(load_job_file(self.path).spec)
        except (OSError, UserError) as error:
            log.warning("the job's file is unusable, so the spec is unchanged: %s", error)
        return self._spec
