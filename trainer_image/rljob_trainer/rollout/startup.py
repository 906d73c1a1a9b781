"""Why vLLM cannot start: errors of this process and of vLLM's child processes, with the field of the job to change.

vLLM reports a failed child as "Engine core initialization failed. See root cause above." The child logs the cause, and
`install_recorder` writes it to a file. Invariant: the first cause counts, since others follow it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_trainer.failures.configuration import ErrorFacts, is_configuration_error, summarize

if TYPE_CHECKING:  # every process of vLLM imports this module
    from rljob_api.manifest.job import RLJobSpec

ENV_ERROR_FILE = "RLJOB_VLLM_ERROR_FILE"
"""Where a child process of vLLM writes why it failed to start."""
_CHILD_FAILED = "failed to start"
"""Part of what EngineCoreProc and WorkerProc log with their exception."""
_FIELDS = (
    (r"kv cache|cache blocks", "spec.rollout.kvCacheGiB", "spec.rollout.gpuMemoryUtilization"),
    (r"max_model_len|max_num_batched_tokens|max seq len|context length", "spec.rollout.maxModelLen", ""),
    (r"dtype|b?float16", "spec.trainer.dtype", ""),
    (r"attention heads|tensor.parallel", "spec.rollout.gpusPerReplica", ""),
    (r"OutOfMemory|out of memory", "spec.rollout.resources", "spec.rollout.gpuMemoryUtilization"),
    (r"safetensor|weights|architecture|config\.json|tokenizer|model_type|trust_remote_code", "spec.model.source", ""),
)
"""Pattern of the error, and the field to change: of a CPU replica, and of a GPU replica if it differs."""


class _Recorder:
    """A factory of log records. vLLM removes all handlers when a process configures its log; this stays."""

    def __init__(self) -> None:
        self._create = logging.getLogRecordFactory()

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._create(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and _CHILD_FAILED in str(record.msg):
            record_error(error)
        return record


def record_error(error: BaseException) -> None:
    """Write an error to $RLJOB_VLLM_ERROR_FILE, unless it holds an earlier one."""
    path = os.environ.get(ENV_ERROR_FILE)
    if path:
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(ErrorFacts.of(error).to_json())


def install_recorder() -> None:
    """Record why this process fails to start. May be called more than once; a forked process inherits it."""
    if not isinstance(logging.getLogRecordFactory(), _Recorder):
        logging.setLogRecordFactory(_Recorder())


@contextlib.contextmanager
def startup_errors(spec: RLJobSpec) -> Iterator[None]:
    """Raise UserError or TransientError with vLLM's own line if vLLM fails within the context."""
    with tempfile.TemporaryDirectory(prefix="rljob-vllm-") as folder:
        path = Path(folder, "error.json")
        os.environ[ENV_ERROR_FILE] = str(path)
        install_recorder()
        try:
            yield
        except RLJobError:
            raise
        except Exception as error:
            facts = ErrorFacts.from_json(path.read_text()) if path.exists() else ErrorFacts.of(error)
            raise explain(facts, spec) from error
        finally:
            del os.environ[ENV_ERROR_FILE]


def explain(error: ErrorFacts, spec: RLJobSpec) -> RLJobError:
    if not is_configuration_error(error):
        return TransientError(f"vLLM did not start: {summarize(error)}")
    return UserError(f"{find_field(error, spec)}: vLLM does not start: {summarize(error)}")


def find_field(error: ErrorFacts, spec: RLJobSpec) -> str:
    text = f"{error.types[0]} {error.message}"
    for pattern, on_cpu, on_gpu in _FIELDS:
        if re.search(pattern, text, re.IGNORECASE):
            return on_gpu if spec.rollout.gpus_per_replica and on_gpu else on_cpu
    return "spec.rollout.extraArgs" if spec.rollout.extra_args else "spec.model.source"
