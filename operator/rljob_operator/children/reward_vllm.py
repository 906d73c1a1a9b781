"""The vLLM sidecar of a reward server, for a served model, judge or simulated user.

It listens on a Unix socket in a volume of the Pod, so that only the server reaches it. A native sidecar starts before
the server, ends after it (the last requests still get responses), and restarts automatically. The server probes it and
is ready only if it is. Invariant: its environment has no key of RLJob or of an endpoint.
"""

from rljob_api.manifest.reward import Reward
from rljob_api.manifest.scorers import ServedModel
from rljob_api.manifest.sources import Hub, parse_source
from rljob_api.wire.contract import ENV_VLLM_SOCKET, FILE_VLLM_SOCKET, PATH_VLLM
from rljob_operator.backend import Manifest
from rljob_operator.children import pods
from rljob_operator.defaults import Defaults

CONTAINER = pods.VLLM_CONTAINER
STARTUP_SECONDS = 1800
"""A large model takes minutes to load."""
_SOCKET = f"{PATH_VLLM}/{FILE_VLLM_SOCKET}"
# A restarted container finds the socket of its predecessor, and vLLM does not replace it.
_START = 'rm -f "$0" && exec "$@"'
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_CPU_ENVIRONMENT = {
    # auto binds every replica to the same first cores. Without it only OMP_NUM_THREADS sets the number of threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Even without graphs, the sampler would compile kernels for 20 s at the first request.
    "TORCH_COMPILE_DISABLE": "1",
}
_UNIPROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# If whitespace between the parts of its JSON is allowed, a model may generate nothing else.
_STRUCTURED_OUTPUTS = '{"backend":"xgrammar","disable_any_whitespace":true}'
SOCKET_VOLUME = pods.Volume("vllm", {"emptyDir": {"medium": "Memory"}}, PATH_VLLM)
SERVER_ENV = {ENV_VLLM_SOCKET: _SOCKET}
"""With SOCKET_VOLUME, how the reward server reaches the sidecar."""


def build_sidecar(reward: Reward, defaults: Defaults, hub: Hub) -> pods.Sidecar | None:
    """The container and its volumes; None for a reward without a served model."""
    model = reward.served_model
    if model is None:
        return None
    # No /tmp volume: the root file system is writable, because vLLM compiles and caches in many places.
    volumes = [SOCKET_VOLUME, pods.build_shm_volume(), *pods.build_claim_volumes([model.source])]
    environment = pods.build_env(_ENVIRONMENT | ({} if model.gpus else _CPU_ENVIRONMENT)) + pods.build_hub_env(hub)
    container: Manifest = {
        "name": CONTAINER,
        "image": model.image or defaults.trainer_image,
        **pods.pull_policy(defaults),
        "restartPolicy": "Always",
        "command": ["sh", "-c", _START, _SOCKET, *_build_command(reward, model)],
        "env": pods.override_env(environment, reward.env),
        "resources": pods.build_resources(model, reward.node_pool, model.gpus),
        "securityContext": pods.UNPRIVILEGED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.build_mount() for volume in volumes],
    }
    return pods.Sidecar(container, volumes)


def _build_command(reward: Reward, model: ServedModel) -> list[str]:
    command = [
        # RLJob's program ends as a user error if the model or an argument is wrong; a user's image has only vLLM's.
        *("python", "-m", "vllm.entrypoints.openai.api_server" if model.image else "rljob_trainer.rollout.sidecar"),
        *("--uds", _SOCKET),
        *("--model", parse_source(model.source).container_path.removeprefix("hf://")),
        *("--served-model-name", "model"),
        *("--dtype", model.dtype),
        # Sampling parameters come from the manifest, not from the checkpoint.
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",
    ]
    if reward.model is not None:
        command += ["--runner", "pooling", "--convert", "classify"]
    elif reward.judge is not None and reward.judge.parser.json_schema is not None:
        command += ["--structured-outputs-config", _STRUCTURED_OUTPUTS]
    if model.revision:
        command += ["--revision", model.revision, "--tokenizer-revision", model.revision]
    if model.trust_remote_code:
        command.append("--trust-remote-code")
    if model.max_model_len is not None:
        command += ["--max-model-len", str(model.max_model_len)]
    if model.max_batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(model.max_batched_tokens)]
    if model.gpus:
        command += ["--tensor-parallel-size", str(model.gpus)]
        command += ["--gpu-memory-utilization", str(model.gpu_memory_utilization)]
    else:
        # On CPUs compiling costs more than it gains. The utilization only checks free memory, which can fail on shared
        # nodes; the cache size is set below.
        command += ["--enforce-eager", "--gpu-memory-utilization", "0.1"]
        # One process for scheduler and worker saves one import of vLLM, a third of the startup.
        command += ["--distributed-executor-backend", _UNIPROCESS_EXECUTOR]
        command += ["--kv-cache-memory-bytes", str(int((model.kv_cache_gib or 1.0) * 2**30))]
    return [*command, *model.extra_args]
