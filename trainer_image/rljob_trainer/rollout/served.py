"""The engine of a served model in a trainer Pod: `python -m rljob_trainer.rollout.served` is vLLM's API server.

Its model and arguments are those of $RLJOB_ENGINE_MODEL in $RLJOB_SERVED_MODELS. It sleeps in the trainer's turn, and
takes no published weights. Invariant: all paths but readiness and metrics need the job's token.
"""

import asyncio
import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_api.read.pod_files import JobFile, load_job_file
from rljob_api.wire import contract
from rljob_api.wire.discovery import listening_port
from rljob_trainer.rollout.engine_watch import build_watch, end_if_it_hangs
from rljob_trainer.rollout.middleware import ModelMiddleware
from rljob_trainer.rollout.naps import ModelNaps
from rljob_trainer.rollout.plugin import SLEEPING_CPU_WORKER, WORKER_EXTENSION
from rljob_trainer.rollout.startup import (
    StartupFields,
    parse_arguments,
    place_argument,
    run_program,
    set_defaults,
    startup_errors,
)
from rljob_trainer.rollout.vllm_app import Serving, start_engine


def build_arguments(environment: Mapping[str, str]) -> list[str]:
    """Return vLLM's command line. The arguments of the model come last, with the user's extraArgs."""
    model: list[str] = json.loads(environment[contract.ENV_SERVED_MODELS])[environment[contract.ENV_ENGINE_MODEL]]
    sleeps = ["--enable-sleep-mode"] if is_on_gpu(model) else ["--worker-cls", SLEEPING_CPU_WORKER]
    return [
        *("--host", environment.get(contract.ENV_POD_IP, "")),
        *("--port", str(listening_port(contract.PORT_ROLLOUT) + int(environment[contract.ENV_ENGINE]))),
        *("--worker-extension-cls", WORKER_EXTENSION),
        "--disable-fastapi-docs",
        *sleeps,
        *model,
    ]


def is_on_gpu(arguments: list[str]) -> bool:
    return "--tensor-parallel-size" in arguments


def name_engine(environment: Mapping[str, str]) -> str:
    """What hangs, in the job's status."""
    port = listening_port(contract.PORT_ROLLOUT) + int(environment[contract.ENV_ENGINE])
    return f"engine of {environment[contract.ENV_ENGINE_MODEL]} at {environment.get(contract.ENV_POD_IP, '')}:{port}"


def main() -> int:
    return run_program("the engine of a served model", _run)


def _run() -> int:
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    arguments = place_argument(build_arguments(os.environ))
    file = JobFile(path := Path(os.environ[contract.ENV_JOB_FILE]), load_job_file(path).spec)
    set_defaults(on_gpu=is_on_gpu(arguments))
    fields = StartupFields.of_served_model(
        on_gpu=is_on_gpu(arguments), path=os.environ[contract.ENV_ENGINE_MODEL], resources="spec.trainer.resources"
    )
    cli_env_setup()
    args, warm = parse_arguments(arguments, fields), asyncio.Event()
    with startup_errors(fields, "the engine", warm.is_set):
        return uvloop.run(_serve(args, file, warm))


async def _serve(args: Namespace, file: JobFile, warm: asyncio.Event) -> int:
    serving = Serving(args)
    engine = start_engine(args)
    try:
        naps, app = ModelNaps(engine), await serving.build(engine)
        token = os.environ[contract.ENV_TOKEN]
        watch = build_watch(lambda: file.read_spec().hang_detection, engine, naps.exclusive.locked)
        app.middleware_stack = ModelMiddleware(app.middleware_stack, token=token, naps=naps, watch=watch)
        watching = asyncio.create_task(end_if_it_hangs(watch, "trainer", name_engine(os.environ)))

        async def warm_up() -> None:
            await _send_first_request(engine)
            naps.is_warm = True
            warm.set()

        await serving.run(app, asyncio.create_task(warm_up()), "the first request")
        watching.cancel()
    finally:
        engine.shutdown()
    await serving.close()
    return contract.ExitCode.SUCCEEDED


async def _send_first_request(engine: Any) -> None:
    """Pay for lazy initialization, so that no sample does."""
    from vllm import PoolingParams, SamplingParams

    prompt, name = {"prompt_token_ids": [1, 2, 3]}, "warm-up"
    if "generate" in await engine.get_supported_tasks():
        answers = engine.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), request_id=name)
    else:
        answers = engine.encode(prompt, PoolingParams(task="classify"), request_id=name)
    async for _ in answers:
        pass


if __name__ == "__main__":
    sys.exit(main())
