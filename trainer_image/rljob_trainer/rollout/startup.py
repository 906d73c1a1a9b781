"""Why vLLM cannot start: errors of this process and of vLLM's child processes, with the field of the job to change.

vLLM reports a failed child as "Engine core initialization failed. See root cause above." The child logs the cause, and
`install_recorder` writes it to a file. Invariant: the first cause counts, since others follow it.

Also what the programs around vLLM share: their log, their signals, the variables of vLLM, and how they end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import build_formatter
from rljob_api.wire.termination import end_program
from rljob_inputs.models.files import place_model
from rljob_inputs.objects.access import is_object
from rljob_trainer.failures.configuration import ErrorFacts, explain_end, is_configuration_error, summarize
from rljob_trainer.failures.devices import GpuFaultError, Remedy, find_line, find_remedy
from rljob_trainer.temporary import TemporaryFolder

logger = logging.getLogger(__name__)


def set_defaults(*, on_gpu: bool) -> None:
    """Set variables that are unset. Call it before vLLM is imported."""
    for name, value in build_defaults(on_gpu=on_gpu).items():
        os.environ.setdefault(name, value)


def build_defaults(*, on_gpu: bool) -> dict[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    if not on_gpu:
        # auto binds each replica to the same first cores. With nobind, only OMP_NUM_THREADS sets the threads.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Even with --enforce-eager, the sampler compiles small C++ kernels at the first request, for 20 s.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    return defaults


def place_argument(arguments: Sequence[str]) -> list[str]:
    """Return vLLM's arguments with the local copy of a model that is in object storage. Raise UserError if it cannot be
    read, and TransientError if the storage does not answer."""
    placed = list(arguments)
    at = placed.index("--model") + 1
    if is_object(placed[at]):
        placed[at] = place_model(placed[at], report=logger.info)
    return placed


def run_program(what: str, run: Callable[[], int]) -> int:
    """Run it, and return its exit code, or that of its error. `what`: the program, in the log."""
    # Only this package's logger: vLLM's imports set the root logger's level to ERROR.
    handler = logging.StreamHandler()
    handler.setFormatter(build_formatter())
    ours = logging.getLogger("rljob_trainer")
    ours.setLevel(logging.INFO)
    ours.handlers = [handler]
    # The first process of a container ignores SIGTERM by default, and vLLM installs its handler only after a minute of
    # loading.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:  # vLLM also turns a SIGTERM into this while it loads
        logger.info("stopped by a signal before serving")
        return ExitCode.SUCCEEDED
    except Exception as error:
        if not isinstance(error, UserError):
            logger.exception("%s failed", what)
        return end_program(*explain_end(error))


ENV_ERROR_FILE = "RLJOB_VLLM_ERROR_FILE"
"""Where a child process of vLLM writes why it failed to start."""
_CHILD_FAILED = ("failed to start", "encountered a fatal error")
"""Parts of what EngineCoreProc and WorkerProc log with their exception: while they start, and at the first request."""
_PATTERNS = {
    "cache": r"kv cache|cache blocks",
    "context": r"max_model_len|max_num_batched_tokens|max seq len|context length",
    "dtype": r"dtype|b?float16|not implemented for '\w+'|could not create a primitive",
    "gpus": r"attention heads|tensor.parallel",
    "memory": r"OutOfMemory|out of memory",
    "model": r"safetensor|weights|architecture|config\.json|tokenizer|model_type|trust_remote_code",
}
"""Patterns of errors, by the field of `StartupFields` to change. The first that matches counts."""


class StartupFields(NamedTuple):
    """Paths of the manifest's fields from which vLLM's arguments come."""

    model: str
    context: str
    dtype: str
    gpus: str
    cache: str
    memory: str
    arguments: str

    @classmethod
    def of_rollout(cls, *, on_gpu: bool, shares_trainer: bool) -> StartupFields:
        memory = "spec.rollout.gpuMemoryUtilization"
        return cls(
            model="spec.model.source",
            context="spec.rollout.maxModelLen",
            dtype="spec.trainer.dtype",
            gpus="spec.rollout.gpusPerReplica",
            cache=memory if on_gpu else "spec.rollout.kvCacheMemory",
            memory=memory if on_gpu else f"spec.{'trainer' if shares_trainer else 'rollout'}.resources",
            arguments="spec.rollout.extraArgs",
        )

    @classmethod
    def of_served_model(cls, *, on_gpu: bool, path: str = "model", resources: str = "model.resources") -> StartupFields:
        """Fields of the model of a reward, at `path`. For a sidecar, the operator adds which reward it is. `resources`:
        those of the container."""
        share = f"{path}.gpuMemoryUtilization"
        return cls(
            model=f"{path}.source",
            context=f"{path}.maxModelLen",
            dtype=f"{path}.dtype",
            gpus=f"{path}.gpusPerReplica",
            cache=share if on_gpu else f"{path}.kvCacheMemory",
            memory=share if on_gpu else resources,
            arguments=f"{path}.extraArgs",
        )


class _Recorder:
    """A factory of log records. vLLM removes all handlers when a process configures its log; this stays."""

    def __init__(self) -> None:
        self._create = logging.getLogRecordFactory()

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._create(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and any(text in str(record.msg) for text in _CHILD_FAILED):
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
def startup_errors(
    fields: StartupFields, what: str = "vLLM", is_warm: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Raise UserError or TransientError with vLLM's own line if vLLM fails within the context; GpuFaultError also if
    the engine dies later: vLLM's server then ends without an error. Until the engine has answered its first request
    (`is_warm`), an error of `what` may be one of the configuration."""
    with TemporaryFolder("vllm") as folder:
        path = Path(folder, "error.json")
        os.environ[ENV_ERROR_FILE] = str(path)
        install_recorder()
        try:
            yield
        except Exception as error:
            facts = _read_record(path) or ErrorFacts.of(error)
            _check_gpu(facts)
            if isinstance(error, RLJobError):
                raise
            if is_warm():
                raise TransientError(f"{what} failed: {summarize(ErrorFacts.of(error))}") from error
            raise explain(facts, fields) from error
        else:
            if (recorded := _read_record(path)) is not None:
                _check_gpu(recorded)
        finally:
            del os.environ[ENV_ERROR_FILE]


def _read_record(path: Path) -> ErrorFacts | None:
    """Return what a child process of vLLM recorded."""
    return ErrorFacts.from_json(path.read_text()) if path.exists() else None


def _check_gpu(error: ErrorFacts) -> None:
    if find_remedy(error.message) is Remedy.ELSEWHERE:
        raise GpuFaultError(f"vLLM: {find_line(error.message)}")


def explain(error: ErrorFacts, fields: StartupFields) -> RLJobError:
    if not is_configuration_error(error):
        return TransientError(f"vLLM did not start: {summarize(error)}")
    text = f"{error.types[0]} {error.message}"
    found = (field for field, pattern in _PATTERNS.items() if re.search(pattern, text, re.IGNORECASE))
    path = getattr(fields, next(found, "model"))
    return UserError(f"{path}: vLLM does not start: {summarize(error)}")


def parse_arguments(arguments: Sequence[str], fields: StartupFields) -> Namespace:
    """Parse and check the command line of vLLM's API server. Raise UserError if vLLM does not accept it."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{fields.arguments}: vLLM does not accept them: {message}")

    with startup_errors(fields):
        parsed: Namespace = make_arg_parser(Parser()).parse_args(list(arguments))
        validate_parsed_serve_args(parsed)
    return parsed
