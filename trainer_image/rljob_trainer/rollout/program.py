"""What the programs around vLLM share: their log, their signals, the variables of vLLM, and how they end."""

import logging
import os
import signal
from collections.abc import Callable, Sequence

from rljob_api.errors import UserError
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import build_formatter
from rljob_api.wire.termination import end_program
from rljob_inputs.models.files import place_model
from rljob_inputs.objects.access import is_object
from rljob_trainer.failures.configuration import explain_end

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
