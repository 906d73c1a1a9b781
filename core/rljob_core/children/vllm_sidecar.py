"""The vLLM sidecar of a server, for a served model, judge or simulated user; and its arguments, wherever it runs.

It listens on a Unix socket in a volume of the Pod, so that only the server reaches it. A native sidecar starts before
the server, ends after it (the last requests still get responses), and restarts automatically. The server probes it and
is ready only if it is. Invariant: its environment has no key of RLJob or of an endpoint.
"""

import json

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import ModelReward, ServedModel
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.sources import parse_source
from rljob_api.wire.contract import ENV_HANG_DETECTION, ENV_SERVED_MODELS, ENV_VLLM_SOCKET, FILE_VLLM_SOCKET, PATH_VLLM
from rljob_core.backend import Manifest
from rljob_core.children import pods
from rljob_core.children.env import build_env, override_env
from rljob_core.children.pods import build_liveness
from rljob_core.children.volumes import Volume, build_claim_volumes, build_home_volumes, build_shm_volume
from rljob_core.defaults import Defaults

_SOCKET = f"{PATH_VLLM}/{FILE_VLLM_SOCKET}"
# A restarted container finds the socket of its predecessor, and vLLM does not replace it.
_START = 'rm -f "$0" && exec "$@"'
# The kernel connects to a stopped server, which does not answer. One that still loads refuses. There is no startup
# probe, because the Pod's server would start only after it.
_IS_ALIVE = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(float(sys.argv[2]))
try:
    connection.connect(sys.argv[1])
except (FileNotFoundError, ConnectionRefusedError):
    sys.exit(0)
connection.sendall(b"GET /health HTTP/1.0\\r\\n\\r\\n")
sys.exit(not connection.recv(1))
"""
_PATIENCE_SECONDS = 120
_PROBE_PERIOD_SECONDS = 30
"""Each is a process."""
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
SOCKET_VOLUME = Volume("vllm", {"emptyDir": {"medium": "Memory"}}, PATH_VLLM)
SERVER_ENV = {ENV_VLLM_SOCKET: _SOCKET}
"""With SOCKET_VOLUME, how the server reaches the sidecar."""


def build_sidecar(
    settings: Reward | CallService, defaults: Defaults, source_env: list[Manifest], hang_detection: Manifest
) -> pods.Sidecar | None:
    """The container and its volumes; None for a service without a served model, or with one in the trainer's Pods.
    `source_env`: `build_source_env` of the owner. `hang_detection`: of the job; empty: the defaults."""
    model = settings.served_model
    if model is None or model.placement == "trainer":
        return None
    volumes = [SOCKET_VOLUME, build_shm_volume(), *build_claim_volumes([model.source])]
    volumes += build_home_volumes(defaults, "vllm-tmp")  # a function may write to the server's
    variables = _ENVIRONMENT | ({} if model.gpus_per_replica else _CPU_ENVIRONMENT)
    variables |= {ENV_HANG_DETECTION: json.dumps(hang_detection)} if hang_detection else {}
    environment = build_env(variables) + source_env
    container: Manifest = {
        "name": pods.VLLM_CONTAINER,
        "image": model.image or defaults.trainer_image,
        **pods.pull_policy(defaults),
        "restartPolicy": "Always",
        "command": ["sh", "-c", _START, _SOCKET, *_build_command(model, _returns_json(settings))],
        "env": override_env(environment, settings.env),
        "livenessProbe": build_liveness(
            {"exec": {"command": ["python", "-c", _IS_ALIVE, _SOCKET, "4"]}}, _PATIENCE_SECONDS, _PROBE_PERIOD_SECONDS
        ),
        "resources": pods.build_resources(model, settings.node_pool, model.gpus_per_replica),
        "securityContext": pods.UNPRIVILEGED | pods.build_root_security(defaults),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.build_mount() for volume in volumes],
    }
    return pods.Sidecar(container, volumes)


def build_engines_env(job: RLJob) -> list[Manifest]:
    """The arguments of the engines in a trainer Pod that serve another model than the policy."""
    models = {path: build_arguments(model, True) for path, model in job.spec.models_in_trainer.items()}
    return build_env({ENV_SERVED_MODELS: json.dumps(models, sort_keys=True)} if models else {})


def _returns_json(settings: Reward | CallService) -> bool:
    judge = settings.judge if isinstance(settings, Reward) else None
    return judge is not None and judge.parser.json_schema is not None


def _build_command(model: ServedModel, returns_json: bool) -> list[str]:
    # RLJob's program ends as a user error if the model or an argument is wrong; a user's image has only vLLM's.
    program = "vllm.entrypoints.openai.api_server" if model.image else "rljob_trainer.rollout.sidecar"
    return ["python", "-m", program, "--uds", _SOCKET, *build_arguments(model, returns_json)]


def build_arguments(model: ServedModel, returns_json: bool) -> list[str]:
    """vLLM's arguments for the model, besides where it listens. `returns_json`: whether answers have a schema."""
    command = [
        *("--model", parse_source(model.source).container_path.removeprefix("hf://")),
        *("--served-model-name", "model"),
        *("--dtype", model.dtype),
        # Sampling parameters come from the manifest, not from the checkpoint.
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",
    ]
    if isinstance(model, ModelReward):
        command += ["--runner", "pooling", "--convert", "classify"]
    elif returns_json:
        command += ["--structured-outputs-config", _STRUCTURED_OUTPUTS]
    if model.revision:
        command += ["--revision", model.revision, "--tokenizer-revision", model.revision]
    if model.trust_remote_code:
        command.append("--trust-remote-code")
    if model.max_model_len is not None:
        command += ["--max-model-len", str(model.max_model_len)]
    if model.max_batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(model.max_batched_tokens)]
    if model.gpus_per_replica:
        command += ["--tensor-parallel-size", str(model.gpus_per_replica)]
        command += ["--gpu-memory-utilization", str(model.gpu_share)]
    else:
        # On CPUs compiling costs more than it gains. The utilization only checks free memory, which can fail on shared
        # nodes; the cache size is set below.
        command += ["--enforce-eager", "--gpu-memory-utilization", "0.1"]
        # One process for scheduler and worker saves one import of vLLM, a third of the startup.
        command += ["--distributed-executor-backend", _UNIPROCESS_EXECUTOR]
        command += ["--kv-cache-memory-bytes", str(model.kv_cache_memory.num_bytes)]
    return [*command, *model.extra_args]
