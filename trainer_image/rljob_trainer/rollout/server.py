"""A rollout replica: `python -m rljob_trainer.rollout` is vLLM's OpenAI server with RLJob's weights and middleware.

The engine starts with placeholders for the weights; it must load the announced version to be ready. With adapters, it
starts from spec.model. In a job that evaluates, it serves spec.model, and pulls nothing.
"""

import asyncio
import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Lora, UpdateMode
from rljob_api.manifest.schedule import ScheduleType
from rljob_api.read.pod_files import JobFile, load_job_file
from rljob_api.wire import contract
from rljob_api.wire.discovery import listening_port
from rljob_inputs.hub import HubAccess, repository_name
from rljob_inputs.models.architectures import find_architecture
from rljob_inputs.models.files import place_model, read_config
from rljob_inputs.objects.access import is_object
from rljob_trainer.devices import explain_missing_gpu, read_cuda_facts
from rljob_trainer.outages import Dependency, Outages, name_storage, wait_out
from rljob_trainer.rollout.download import SharedDownload
from rljob_trainer.rollout.engine_watch import build_watch, end_if_it_hangs
from rljob_trainer.rollout.middleware import RolloutMiddleware
from rljob_trainer.rollout.naps import Naps
from rljob_trainer.rollout.plugin import BACKEND, SLEEPING_CPU_WORKER, WORKER_EXTENSION
from rljob_trainer.rollout.puller import ReplicaState, WeightPuller, serve_own_weights
from rljob_trainer.rollout.startup import StartupFields, parse_arguments, run_program, set_defaults, startup_errors
from rljob_trainer.rollout.vllm_app import Serving, start_engine
from rljob_trainer.rollout.weight_transfer import (
    EngineLoader,
    WeightClient,
    build_folders,
    build_lora_arguments,
    choose_level,
    find_head_url,
    published_adapter,
)
from rljob_trainer.weights.mapped import open_scratch_folder
from rljob_trainer.written_tokenizer import rewritten

logger = logging.getLogger(__name__)


def build_arguments(
    job: RLJob, environment: Mapping[str, str], config: Mapping[str, Any], tokenizer: str | None = None
) -> list[str]:
    """Return vLLM's command line for this job. extraArgs come last, so they take precedence. `config`: config.json.
    `tokenizer`: a folder; None: that of the model."""
    rollout, architecture = job.spec.rollout, find_architecture(config)
    arguments = [
        *("--model", repository_name(environment[contract.ENV_MODEL])),
        *("--served-model-name", contract.SERVED_MODEL_NAME),
        *("--host", environment.get(contract.ENV_POD_IP, "")),
        *("--port", str(listening_port(contract.PORT_ROLLOUT) + int(environment.get(contract.ENV_ENGINE) or 0))),
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
    if job.spec.trainer.head_dtype != "model":
        arguments += ["--hf-overrides", json.dumps({"head_dtype": job.spec.trainer.head_dtype})]
    if job.spec.model.revision:
        arguments += ["--revision", job.spec.model.revision, "--tokenizer-revision", job.spec.model.revision]
    if tokenizer is not None:
        arguments += ["--tokenizer", tokenizer]
    if job.spec.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if job.spec.model.chat_template is not None:
        arguments += ["--chat-template", job.spec.model.chat_template.inline or ""]
    if job.spec.data.chat_template_arguments:
        arguments += ["--default-chat-template-kwargs", json.dumps(job.spec.data.chat_template_arguments)]
    if rollout.max_model_len is not None:
        arguments += ["--max-model-len", str(rollout.max_model_len)]
    if architecture is not None and architecture.is_multimodal:
        # Texts need no tower for images. The trainer publishes the text model.
        arguments.append("--language-model-only")
    if rollout.gpus_per_replica:
        arguments += ["--tensor-parallel-size", str(rollout.gpus_per_replica)]
        arguments += ["--gpu-memory-utilization", str(job.spec.rollout_gpu_share)]
    else:
        arguments += [
            "--enforce-eager",  # compiling costs more than a short job gains
            # A seeded prompt that is prefilled in chunks kills the engine: vLLM then rewinds the request's random
            # generator by an offset, which torch's CPU generator does not support.
            "--no-enable-chunked-prefill",
            *("--kv-cache-memory-bytes", str(rollout.kv_cache_memory.num_bytes)),
            # On CPUs this is only a check of free memory, which would fail needlessly on a shared machine.
            *("--gpu-memory-utilization", "0.1"),
        ]
        if architecture is not None and architecture.is_hybrid:
            # Where layers have a state, a cache of prefixes needs prefills in chunks.
            arguments.append("--no-enable-prefix-caching")
    if contract.ENV_ENGINE in environment:
        on_gpu = rollout.gpus_per_replica > 0
        arguments += ["--enable-sleep-mode"] if on_gpu else ["--worker-cls", SLEEPING_CPU_WORKER]
    if lora := published_adapter(job.spec, config):
        arguments += build_lora_arguments(lora, job.spec.num_adapter_slots)
    elif job.spec.trains:
        # The first pull replaces all weights, so the checkpoint is not read (initial_weights).
        arguments += ["--load-format", "dummy"]
    return [*arguments, *rollout.extra_args]


def main() -> int:
    return run_program("the rollout replica", _load_and_run)


def _load_and_run() -> int:
    job = load_job_file(os.environ[contract.ENV_JOB_FILE])
    # One request, before vLLM retries for a minute what the Hub refuses. A Hub that is away costs no restart.
    config, model = asyncio.run(_read_model(job))
    set_defaults(on_gpu=job.spec.rollout.gpus_per_replica > 0)
    options = {"revision": job.spec.model.revision, "trust_remote_code": job.spec.model.trust_remote_code}
    with rewritten(repository_name(model), options) as tokenizer:
        arguments = build_arguments(job, {**os.environ, contract.ENV_MODEL: model}, config, tokenizer)
        return _run(job, arguments, published_adapter(job.spec, config))


async def _read_model(job: RLJob) -> tuple[Mapping[str, Any], str]:
    """Return config.json, and what vLLM loads the model by. One in object storage is downloaded, with its weights if
    they are read: the first pull replaces those of others."""
    spec, outages = job.spec, Outages(job.spec.outage_seconds)
    source = await find_model(outages.watch("the head", "find out why it does not run"))

    async def read() -> tuple[Mapping[str, Any], str]:
        config = read_config(source, spec.model.revision)
        weights = not spec.trains or published_adapter(spec, config) is not None
        return config, place_model(source, weights=weights, report=logger.info)

    what, remedy = name_storage([spec.model.source], HubAccess.from_environment(os.environ))
    hub = outages.watch(what, remedy)
    return await wait_out(hub, read, lambda error: str(error) if isinstance(error, TransientError) else "")


def _run(job: RLJob, arguments: list[str], lora: Lora | None) -> int:
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform

    check_platform(job.spec.rollout.gpus_per_replica, current_platform)
    cli_env_setup()
    spec, state = job.spec, ReplicaState()
    fields = StartupFields.of_rollout(on_gpu=spec.rollout.gpus_per_replica > 0, shares_trainer=spec.shares_trainer)
    args = parse_arguments(arguments, fields)
    with startup_errors(fields, "the rollout replica", lambda: state.is_warm):
        return uvloop.run(_serve(job, args, state, lora))


async def _serve(job: RLJob, args: Namespace, state: ReplicaState, lora: Lora | None) -> int:
    """Run vLLM's api_server.run_server with RLJob's middleware outermost and the weight puller as a task."""
    serving = Serving(args)
    engine = start_engine(args)
    try:
        app = await serving.build(engine)
        adapters = build_folders(open_scratch_folder(0), lora, job.spec.num_adapter_slots) if lora is not None else []
        for adapter in adapters:  # requests name the policy, and vLLM looks for adapters of this name first
            request = adapter.build_request()
            app.state.openai_serving_models.lora_requests[request.lora_name] = request
        loader = EngineLoader(engine, find_update_mode(job.spec.schedule.type, job.spec.rollout.update_mode), adapters)
        naps = Naps(state, loader, choose_level(engine.vllm_config)) if contract.ENV_ENGINE in os.environ else None
        token, file = os.environ[contract.ENV_TOKEN], JobFile(Path(os.environ[contract.ENV_JOB_FILE]), job.spec)
        watch = build_watch(lambda: file.read_spec().hang_detection, engine, loader.exclusive.locked)
        app.middleware_stack = RolloutMiddleware(app.middleware_stack, token=token, state=state, watch=watch, naps=naps)
        name = f"{os.environ.get(contract.ENV_POD_IP, '')}:{args.port}"
        watching = asyncio.create_task(end_if_it_hangs(watch, "rollout", name))
        weights = _pull_weights(loader, state, args.port) if job.spec.trains else serve_own_weights(loader, state)
        await serving.run(app, asyncio.create_task(weights), "the weight puller")
        watching.cancel()
    finally:
        engine.shutdown()
    await serving.close()
    return contract.ExitCode.SUCCEEDED


def find_update_mode(schedule: ScheduleType, chosen: UpdateMode) -> UpdateMode:
    """oneStepOff means that the weights change between completions."""
    return "finish" if schedule == "oneStepOff" else chosen


async def _pull_weights(loader: EngineLoader, state: ReplicaState, port: int) -> None:
    address = os.environ.get(contract.ENV_POD_IP, "")
    token = os.environ[contract.ENV_TOKEN]
    # A trainer Pod has a server of weights, or reaches the one that has.
    shared = SharedDownload() if contract.ENV_ENGINE in os.environ else SharedDownload(address, token)
    client = WeightClient(os.environ[contract.ENV_HEAD], token, shared=shared)
    try:
        await WeightPuller(state, client, loader, f"{address}:{port}").run()
    finally:
        await client.close()


_FIELD = "spec.rollout.gpusPerReplica"


def check_platform(num_gpus: int, platform: Any) -> None:
    """Raise UserError if vLLM would compute on another kind of device than the spec says; GpuFaultError if the node's
    GPU does not start. Starts CUDA only if vLLM cannot use it, since vLLM's child processes must be forked before."""
    if num_gpus and platform.is_cpu():
        raise UserError(
            f"{_FIELD} is {num_gpus}, and vLLM of this image is for CPUs only; set spec.rollout.image to one built "
            "with EXTRA=gpu"
        )
    if num_gpus and not platform.is_cuda_alike():
        raise explain_missing_gpu(num_gpus, _FIELD, read_cuda_facts())
    if not num_gpus and not platform.is_cpu():
        raise UserError(
            f"{_FIELD} is 0, and vLLM of this image needs a GPU; set {_FIELD}, or spec.rollout.image to one built with "
            "EXTRA=cpu"
        )


_TIMEOUT = aiohttp.ClientTimeout(total=10)


async def find_model(head: Dependency) -> str:
    """Return what this rollout loads its model by. The head is asked only if it chooses, and waited for."""
    source = os.environ[contract.ENV_MODEL]
    if not is_object(source) and not os.environ.get(contract.ENV_MODEL_STEP):
        return source
    return await wait_out(head, _ask, lambda error: str(error) if isinstance(error, TransientError) else "")


async def _ask() -> str:
    token = os.environ.get(contract.ENV_TOKEN, "")
    url = await find_head_url(os.environ[contract.ENV_HEAD], contract.UrlPath.MODEL)
    try:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=_TIMEOUT) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise TransientError(f"{url}: HTTP {response.status}: {text.strip()}")
            return text
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransientError(f"{url}: {type(error).__name__}: {error}") from error
