"""The size of Ray's object stores, through which the driver sends rows to the ranks. Pure; jobs are resolved."""

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.limits import OBJECT_STORE_BYTES
from rljob_inputs.memory.plan import Question, bytes_per_row_token, max_row_tokens

_SHARE_IN_USE = 0.5
"""What one call's rows may fill: objects of the previous call may still be there, and memory fragments."""


def head_store_bytes(job: RLJob, context_length: int | None) -> int:
    """Return the size with which the rows of a whole step do not spill to disk. Only memory that is used counts.
    `context_length`: of the rollouts, in tokens; None: unknown."""
    question = Question(job, {})
    row_tokens = max_row_tokens(question)
    tokens = question.num_rows * (row_tokens if context_length is None else min(row_tokens, context_length))
    return max(OBJECT_STORE_BYTES, int(tokens * bytes_per_row_token(question) / _SHARE_IN_USE))


def trainer_store_bytes(job: RLJob, context_length: int | None) -> int:
    """Return the size of the store of one trainer Pod, to which the rows of its ranks are copied."""
    return max(OBJECT_STORE_BYTES, -(-head_store_bytes(job, context_length) // job.spec.trainer.replicas))
