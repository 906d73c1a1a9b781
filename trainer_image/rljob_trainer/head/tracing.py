"""Whether this job's episodes are traced, and what all of its spans have in common."""

import os
from contextlib import AbstractContextManager, nullcontext

from rljob_api.manifest.job import RLJob
from rljob_api.tracing.exporting import exporting, is_configured


def tracing_episodes(job: RLJob) -> AbstractContextManager[None]:
    """Return the context in which spans are recorded and sent. The field turns it on, and not a variable alone: others
    may set it in all Pods of a cluster."""
    if job.spec.tracing is None or not is_configured(os.environ):
        return nullcontext()
    attributes = {"service.namespace": job.metadata.namespace or "", "rljob.job": job.metadata.name}
    return exporting("rljob-head", attributes, ratio=job.spec.tracing.sampling_ratio)
