"""The vLLM sidecar of a reward: `python -m rljob_trainer.rollout.sidecar` is vLLM's API server with its arguments.

It ends with exit code 78 and vLLM's own line if the arguments or the model are wrong, and with 75 if its engine hangs.
Invariant: it needs no setting of RLJob, so that any image with vLLM may replace it.
"""

import sys

from rljob_api.wire.contract import ExitCode
from rljob_api.wire.termination import end_program
from rljob_trainer.failures.configuration import explain_end
from rljob_trainer.rollout.program import place_argument
from rljob_trainer.rollout.startup import StartupFields, parse_arguments, startup_errors

_WATCH = ("--middleware", "rljob_trainer.rollout.sidecar_watch.SidecarWatch")
"""The last one that is added is the outermost."""


def main() -> int:
    arguments = [*sys.argv[1:], *_WATCH]
    fields = StartupFields.of_served_model(on_gpu="--tensor-parallel-size" in arguments)
    try:
        _serve(place_argument(arguments), fields)
    except KeyboardInterrupt:  # vLLM turns a SIGTERM into this while it loads
        return ExitCode.SUCCEEDED
    except Exception as error:
        return end_program(*explain_end(error))
    return ExitCode.SUCCEEDED


def _serve(arguments: list[str], fields: StartupFields) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    parsed = parse_arguments(arguments, fields)
    with startup_errors(fields):
        uvloop.run(run_server(parsed))


if __name__ == "__main__":
    sys.exit(main())
