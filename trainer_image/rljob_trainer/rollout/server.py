"""A rollout replica: `python -m rljob_trainer.rollout` is vLLM's OpenAI server with RLJob's weights and middleware.

The engine starts with placeholders for the weights; it must load the announced version to be ready. With adapters, it
starts from spec.model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.roles import UpdateMode
from rljob_api.read.pod_files import load_job_file
from rljob_api.wire import contract
from rljob_api.wire.termination import end_program
from rljob_inputs.hub.repository import repository_name
from rljob_inputs.models.files import read_config
from rljob_trainer.failures.configuration import ErrorFacts, summarize
from rljob_trainer.rollout.lora import AdapterFolder, build_lora_arguments, published_adapter
from rljob_trainer.rollout.middleware import RolloutMiddleware
from rljob_trainer.rollout.platform import check_platform
from rljob_trainer.rollout.plugin import BACKEND, WORKER_EXTENSION
from rljob_trainer.rollout.puller import ReplicaState, WeightPuller
from rljob_trainer.rollout.sharing import SharedDownload
from rljob_trainer.rollout.startup import StartupFields, parse_arguments, startup_errors
from rljob_trainer.rollout.weight_transfer import EngineLoader, WeightClient
from rljob_trainer.weights.scratch import open_scratch_folder

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5
"""Time to send the last responses after SIGTERM and the engine's end. Aborted requests are retried elsewhere, and an
open request must not keep the Pod until its grace period ends."""
_GIB_BYTES = 1 << 30


def build_arguments(job: RLJob, environment: Mapping[str, str]) -> list[str]:
    """Return vLLM's command line for this job. extraArgs come last, so they take precedence."""
    rollout = job.spec.rollout
    arguments = [
        *("--model", repository_name(environment[contract.ENV_MODEL])),
        *("--served-model-name", contract.SERVED_MODEL_NAME),
        *("--host", environment.get(contract.ENV_POD_IP, "")),
        *("--port", str(contract.PORT_ROLLOUT)),
        *("--dtype", job.spec.trainer.dtype),
        *("--seed", str(job.spec.schedule.seed)),
        # Log-probs must be of the distribution that was sampled from, including temperature. The model's
        # generation_config.json must not change it.
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *("--worker-extension-cls", WORKER_EXTENSION),
        "--enable-scale-out",  # /inference/v1/generate
        # Responses have token ids. The text and bytes of each token would cost vLLM's server time for nothing.
        "--return-tokens-as-token-ids",
        *("--disable-uvicorn-access-log", "--disable-fastapi-docs"),
    ]
    if job.spec.model.revision:
        arguments += ["--revision", job.spec.model.revision, "--tokenizer-revision", job.spec.model.revision]
    if job.spec.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if rollout.max_model_len is not None:
        arguments += ["--max-model-len", str(rollout.max_model_len)]
    if rollout.gpus_per_replica:
        arguments += ["--tensor-parallel-size", str(rollout.gpus_per_replica)]
        arguments += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization)]
    else:
        arguments += _cpu_arguments(rollout.kv_cache_gib or 1.0)
    if lora := published_adapter(job.spec):
        arguments += build_lora_arguments(lora)
    else:
        # The first pull replaces all weights, so the checkpoint is not read (initial_weights).
        arguments += ["--load-format", "dummy"]
    return [*arguments, *rollout.extra_args]


def _cpu_arguments(kv_cache_gib: float) -> list[str]:
    return [
        "--enforce-eager",  # compiling costs more than a short job gains
        # A seeded prompt that is prefilled in chunks kills the engine: vLLM then rewinds the request's random generator
        # by an offset, which torch's CPU generator does not support.
        "--no-enable-chunked-prefill",
        *("--kv-cache-memory-bytes", str(int(kv_cache_gib * _GIB_BYTES))),
        # On CPUs this is only a check of free memory, which would fail needlessly on a shared machine.
        *("--gpu-memory-utilization", "0.1"),
    ]


def build_environment(job: RLJob) -> dict[str, str]:
    """Return defaults for unset variables. Set them before vLLM is imported."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    if not job.spec.rollout.gpus_per_replica:
        # auto binds each replica to the same first cores. With nobind, only OMP_NUM_THREADS sets the threads.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Even with --enforce-eager, the sampler compiles small C++ kernels at the first request, for 20 s.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    return defaults


def main() -> int:
    # Only this package's logger: vLLM's imports set the root logger's level to ERROR.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("rljob_trainer")
    ours.setLevel(logging.INFO)
    ours.handlers = [handler]
    # The first process of a container ignores SIGTERM by default, and vLLM installs its handler only after a minute of
    # loading.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = load_job_file(os.environ[contract.ENV_JOB_FILE])
        # One request, before vLLM retries for a minute what the Hub refuses.
        read_config(os.environ[contract.ENV_MODEL], job.spec.model.revision)
        arguments = build_arguments(job, os.environ)
        for name, value in build_environment(job).items():
            os.environ.setdefault(name, value)
        return _run(job, arguments)
    except KeyboardInterrupt:  # vLLM also turns a SIGTERM into this while it loads
        logger.info("stopped by a signal before serving")
        return contract.ExitCode.SUCCEEDED
    except UserError as error:
        return end_program(str(error), contract.ExitCode.USER)
    except Exception as error:
        logger.exception("the rollout replica failed")
        return end_program(summarize(ErrorFacts.of(error)), contract.ExitCode.INFRASTRUCTURE)


def _run(job: RLJob, arguments: list[str]) -> int:
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform

    check_platform(job.spec.rollout.gpus_per_replica, current_platform)
    cli_env_setup()
    return uvloop.run(_serve_and_explain(job, parse_arguments(arguments, StartupFields.of_rollout(job.spec))))


async def _serve_and_explain(job: RLJob, args: Namespace) -> int:
    """Serve. Until the engine has answered its first request, an error may be one of the configuration."""
    state = ReplicaState()
    with startup_errors(StartupFields.of_rollout(job.spec)):
        try:
            return await _serve(job, args, state)
        except Exception as error:
            if state.is_warm and not isinstance(error, RLJobError):
                raise TransientError(f"the rollout replica failed: {summarize(ErrorFacts.of(error))}") from error
            raise


async def _serve(job: RLJob, args: Namespace, state: ReplicaState) -> int:
    """Run vLLM's api_server.run_server with RLJob's middleware outermost and the weight puller as a task."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server

    _, socket = setup_server(args, reuse_port=False)
    engine = _start_engine(args)
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        # vLLM has built its middleware stack by now; wrap the whole stack.
        stack = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = RolloutMiddleware(stack, token=os.environ[contract.ENV_TOKEN], state=state)
        adapter = _open_adapter(job)
        if adapter is not None:  # requests name the policy, and vLLM looks for adapters of this name first
            request = adapter.build_request()
            app.state.openai_serving_models.lora_requests[request.lora_name] = request
        puller = asyncio.create_task(_pull_weights(job, engine, state, adapter))
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
        failure = puller.exception() if puller.done() else None
        puller.cancel()
        await asyncio.gather(puller, return_exceptions=True)
    finally:
        engine.shutdown()
    await shutdown
    socket.close()
    if failure is not None:
        raise failure
    return contract.ExitCode.SUCCEEDED


def _start_engine(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        args.distributed_executor_backend = choose_cpu_executor(args)
        _import_model_class(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if current_platform.is_cpu():
        # vLLM spawns on CPUs for thread binding. A forked engine inherits all imports.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(vllm_config=config, usage_context=UsageContext.OPENAI_API_SERVER)


def choose_cpu_executor(args: Namespace) -> str | None:
    """Return vLLM's executor; None leaves the choice to vLLM. One process for scheduler and worker saves an import of
    vLLM, a third of the startup time. vLLM would use two for thread binding, which is off here (build_environment)."""
    chosen: str | None = args.distributed_executor_backend
    if chosen is None and args.tensor_parallel_size * args.pipeline_parallel_size == 1:
        return "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return chosen


def _import_model_class(args: Namespace) -> None:
    """Import the model's class here. vLLM would inspect it in a subprocess to keep the GPU untouched: 20 s with a cold
    cache. On CPUs the forked engine needs the import anyway."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    config = AutoConfig.from_pretrained(args.model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    for architecture in config.architectures or ():
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def find_update_mode(spec: RLJobSpec) -> UpdateMode:
    """oneStepOff means that the weights change between completions."""
    return "finish" if spec.schedule.type == "oneStepOff" else spec.rollout.update_mode


def _open_adapter(job: RLJob) -> AdapterFolder | None:
    lora = published_adapter(job.spec)
    return AdapterFolder(open_scratch_folder(0), lora) if lora is not None else None


async def _pull_weights(job: RLJob, engine: Any, state: ReplicaState, adapter: AdapterFolder | None) -> None:
    address = os.environ.get(contract.ENV_POD_IP, "")
    token = os.environ[contract.ENV_TOKEN]
    client = WeightClient(os.environ[contract.ENV_HEAD], token, shared=SharedDownload(address, token))
    try:
        loader = EngineLoader(engine, find_update_mode(job.spec), adapter)
        await WeightPuller(state, client, loader, address).run()
    finally:
        await client.close()


def _stop_server(puller: asyncio.Task[None]) -> None:
    """Stop the server: a replica that cannot follow the weights must not serve."""
    if not puller.cancelled():
        logger.error("the weight puller ended; stopping", exc_info=puller.exception())
        os.kill(os.getpid(), signal.SIGTERM)
