"""The vLLM sidecar of a reward: `python -m rljob_trainer.rollout.sidecar` is vLLM's API server with its arguments.

It ends with exit code 78 and vLLM's own line if the arguments or the model are wrong, and with 75 if its engine hangs.
/health fails once the engine owes an answer for half of its limit, so the reward server, which polls it, is not ready.
Invariant: it needs no setting of RLJob, so that any image with vLLM may replace it.
"""

import asyncio
import os
import sys
from typing import NoReturn

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rljob_api.manifest.job_sections import HangDetection
from rljob_api.wire.contract import ENV_HANG_DETECTION, ExitCode
from rljob_api.wire.termination import end_program
from rljob_trainer.failures.configuration import explain_end
from rljob_trainer.rollout.engine_watch import EngineWatch, build_watch, end_if_it_hangs
from rljob_trainer.rollout.startup import StartupFields, parse_arguments, place_argument, startup_errors

_WATCH = ("--middleware", "rljob_trainer.rollout.sidecar.SidecarWatch")
"""The last one that is added is the outermost."""


class SidecarWatch:
    """The watch of the engine, as a middleware of vLLM's own server: its program stays vLLM's.

    Create it without arguments but the app: vLLM does, for its option --middleware. A server without an engine is left
    alone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[NoReturn] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the first scope of a server, whose app has its engine by then
            if (engine := getattr(scope["app"].state, "engine_client", None)) is not None:
                # Those of the job: a RewardModel has none.
                bounds = HangDetection.model_validate_json(os.environ.get(ENV_HANG_DETECTION) or "{}")
                self._watch = build_watch(lambda: bounds, engine)
                self._watching = asyncio.create_task(end_if_it_hangs(self._watch))
        elif scope.get("path") == "/health" and self._watch is not None and (reason := self._watch.reason_silent()):
            await PlainTextResponse(reason, 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)


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
