"""A rollout replica: `python -m rljob_trainer.rollout` is vLLM's OpenAI server with our weights and our door.

Owns how a job becomes vLLM's arguments and environment, and the wiring of engine, middleware and weight puller; leaves
serving to vLLM and weights to the puller. The engine starts from spec.model and pulls the announced version before it
is ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.read.load import load_job
from rljob_api.wire import contract
from rljob_trainer.rollout.middleware import RolloutMiddleware
from rljob_trainer.rollout.plugin import BACKEND, WORKER_EXTENSION
from rljob_trainer.rollout.puller import ReplicaState, WeightPuller
from rljob_trainer.rollout.weight_transfer import EngineLoader, WeightClient
from rljob_trainer.weights.scratch import open_scratch_folder

logger = logging.getLogger(__name__)

_UNIPROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_ANSWER_SECONDS = 5
"""After SIGTERM and the engine's end: for the last answers to leave. What the engine aborted is sampled elsewhere, and
a request that nobody answers any more must not hold the Pod until its grace is over."""
_GIB_BYTES = 1 << 30
_HUGGING_FACE_SCHEME = "hf://"


def build_arguments(job: RLJob, environment: Mapping[str, str]) -> list[str]:
    """vLLM's command line for this job. extraArgs come last, so they win."""
    rollout = job.spec.rollout
    arguments = [
        *_model_arguments(job, environment),
        *("--served-model-name", contract.SERVED_MODEL_NAME),
        *("--host", environment.get(contract.ENV_POD_IP, "")),
        *("--port", str(contract.PORT_ROLLOUT)),
        *("--dtype", job.spec.trainer.dtype),
        *("--seed", str(job.spec.schedule.seed)),
        # What the loss is told must be the distribution that was sampled from, temperature included; and the model's
        # own generation_config.json must not change it.
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--disable-uvicorn-access-log", "--disable-fastapi-docs"),
    ]
    if job.spec.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if rollout.max_model_len is not None:
        arguments += ["--max-model-len", str(rollout.max_model_len)]
    if rollout.gpus_per_replica:
        arguments += ["--tensor-parallel-size", str(rollout.gpus_per_replica)]
        arguments += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization)]
    else:
        arguments += _cpu_arguments(rollout.kv_cache_gib or 1.0)
    return [*arguments, *rollout.extra_args]


def _model_arguments(job: RLJob, environment: Mapping[str, str]) -> list[str]:
    model = job.spec.model
    if resolved := environment.get(contract.ENV_MODEL):
        return ["--model", resolved]
    if model.source.startswith(_HUGGING_FACE_SCHEME):
        revision = ["--revision", model.revision, "--tokenizer-revision", model.revision] if model.revision else []
        return ["--model", model.source.removeprefix(_HUGGING_FACE_SCHEME), *revision]
    if "://" in model.source:
        raise UserError(
            f"RLJob {job.metadata.namespace}/{job.metadata.name}: spec.model.source {model.source} is not a path in "
            f"this Pod; mount or fetch it and set {contract.ENV_MODEL} to its folder"
        )
    return ["--model", model.source]


def _cpu_arguments(kv_cache_gib: float) -> list[str]:
    # Compiling costs more than a short job gains. One process for scheduler and worker saves an import of vLLM,
    # a third of the start; vLLM's reason for two is thread binding, which we do not use (build_environment).
    return [
        *("--enforce-eager", "--distributed-executor-backend", _UNIPROCESS_EXECUTOR),
        # A seeded prompt that is prefilled in parts kills the engine: vLLM then rewinds the request's random generator
        # by an offset, which torch's CPU generator does not have.
        "--no-enable-chunked-prefill",
        *("--kv-cache-memory-bytes", str(int(kv_cache_gib * _GIB_BYTES))),
        # Not a share to take but a check of free memory, which on a shared machine fails without need.
        *("--gpu-memory-utilization", "0.1"),
    ]


def build_environment(job: RLJob) -> dict[str, str]:
    """Defaults for what the environment leaves open; must be set before vLLM is imported."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not job.spec.rollout.gpus_per_replica:
        # auto binds each replica to the same first cores. OMP_NUM_THREADS alone then says how many threads.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The sampler compiles small kernels with a C++ compiler at the first request, 20 s of it, whatever
        # --enforce-eager says.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    return defaults


def main() -> int:
    _log_to_stderr()
    # The first process of a container has no default action for SIGTERM: until vLLM takes it, after a minute of
    # loading, it would be lost.
    signal.signal(signal.SIGTERM, _raise_on_signal)
    try:
        job = _load_job(os.environ)
        arguments = build_arguments(job, os.environ)
        for name, value in build_environment(job).items():
            os.environ.setdefault(name, value)
        return _run(job, arguments)
    except UserError as error:
        logger.error("%s", error)
        return contract.ExitCode.USER
    except (TransientError, OSError):
        logger.exception("the rollout replica failed")
        return contract.ExitCode.INFRASTRUCTURE
    except KeyboardInterrupt:  # vLLM, too, makes this of a SIGTERM while it loads
        logger.info("stopped by a signal before it served")
        return contract.ExitCode.SUCCEEDED


def _raise_on_signal(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _log_to_stderr() -> None:
    """On our own logger: what vLLM imports sets the root's level to errors alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("rljob_trainer")
    ours.setLevel(logging.INFO)
    ours.handlers = [handler]


def _load_job(environment: Mapping[str, str]) -> RLJob:
    needed = (contract.ENV_JOB_FILE, contract.ENV_TOKEN, contract.ENV_POD_IP, contract.ENV_HEAD)
    if missing := [name for name in needed if not environment.get(name)]:
        raise UserError(f"a rollout needs {', '.join(missing)} in its environment; the operator sets them")
    return load_job(environment[contract.ENV_JOB_FILE])


def _run(job: RLJob, arguments: list[str]) -> int:
    import uvloop
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    return uvloop.run(_serve(job, args))


async def _serve(job: RLJob, args: Namespace) -> int:
    """vLLM's own api_server.run_server, with our middleware outermost and the puller beside it."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server

    _, socket = setup_server(args, reuse_port=False)
    engine = _start_engine(args)
    state = ReplicaState(job.spec.schedule.max_staleness)
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        # vLLM has built its stack of middlewares by now; ours goes around all of them.
        stack = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = RolloutMiddleware(stack, token=os.environ[contract.ENV_TOKEN], state=state)
        puller = asyncio.create_task(_pull_weights(job, engine, state))
        puller.add_done_callback(_stop_server)
        shutdown = await serve_http(
            app,
            sock=socket,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_graceful_shutdown=_ANSWER_SECONDS,
        )
        failed = puller.done()
        puller.cancel()
        await asyncio.gather(puller, return_exceptions=True)
    finally:
        engine.shutdown()
    await shutdown
    socket.close()
    return contract.ExitCode.INFRASTRUCTURE if failed else contract.ExitCode.SUCCEEDED


def _start_engine(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        _import_model_class(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if current_platform.is_cpu():
        # vLLM spawns on CPUs because of thread binding. A forked engine has everything imported already.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(vllm_config=config, usage_context=UsageContext.OPENAI_API_SERVER)


def _import_model_class(args: Namespace) -> None:
    """vLLM looks at a model's class in a process of its own, 20 s when its cache is cold; here there is no GPU to
    keep untouched, and the forked engine needs the import anyway."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    config = AutoConfig.from_pretrained(args.model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    for architecture in config.architectures or ():
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


async def _pull_weights(job: RLJob, engine: Any, state: ReplicaState) -> None:
    client = WeightClient(os.environ[contract.ENV_HEAD], os.environ[contract.ENV_TOKEN], open_scratch_folder())
    puller = WeightPuller(
        state,
        wait_until_warm=lambda: _generate_once(engine),
        fetch_manifest=client.fetch_manifest,
        fetch_file=client.fetch_file,
        apply=EngineLoader(engine, job.spec.rollout.update_mode).load,
    )
    try:
        await puller.run()
    finally:
        await client.close()


async def _generate_once(engine: Any) -> None:
    """The first request pays for what is set up lazily; it shall not be a trajectory."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True)
    async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, parameters, request_id="warm-up"):
        pass


def _stop_server(puller: asyncio.Task[None]) -> None:
    """A replica that can no longer follow the weights must not go on serving."""
    if not puller.cancelled():
        logger.error("the weight puller ended; stopping", exc_info=puller.exception())
        os.kill(os.getpid(), signal.SIGTERM)
