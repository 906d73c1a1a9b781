"""Names that the parts of a running job share: labels, environment, ports, paths, headers, exit codes.

The operator writes them into Pods, and the programs in the Pods read them. No other module may repeat the literals.
"""

import enum
from typing import Final

API_GROUP: Final = "rljob.dev"
API_VERSION: Final = "rljob.dev/v1alpha1"

# Labels of all children.
LABEL_JOB = "rljob.dev/job"
LABEL_ROLE = "rljob.dev/role"
LABEL_REWARD = "rljob.dev/reward"
LABEL_AGENT = "rljob.dev/agent"
"""On children of the role agent: the name of the service, `user` or that of the tool."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "rljob-operator"
APP_LABEL = "app.kubernetes.io/"
"""Prefix of the labels that Kubernetes recommends. Nothing selects by them, but by managed-by."""
APP_NAME = "rljob"
LABEL_VERSION = f"{APP_LABEL}version"
"""On Pods and their workloads: the version that built them. An upgrade of the operator does not change it."""
LABEL_REWARD_MODEL = "rljob.dev/reward-model"
"""On children of a RewardModel, instead of LABEL_JOB."""
ANNOTATION_RETRY = "rljob.dev/retry"
"""On an RLJob: a new value restarts a failed job from its checkpoint (`kubectl rljob resume --retry`)."""
ANNOTATION_RESTART = "rljob.dev/restart"
"""On an RLJob or RewardModel: a new value replaces all Pods, as the current operator builds them. `-ROLE`, a name of
status.roles, is appended for one role (`kubectl rljob restart`)."""
ANNOTATION_CRD_VERSION = "rljob.dev/version"
"""On a CustomResourceDefinition: the version of RLJob that it was generated from."""
SCHEDULING_GATE = "rljob.dev/gang"
"""Blocks the scheduling of a Pod until all Pods of its job exist (spec.scheduling.gang: gates)."""

# Environment variables of containers.
ENV_TOKEN = "RLJOB_TOKEN"
"""The job's bearer token. All requests between Pods carry `Authorization: Bearer TOKEN`."""
ENV_LOG_FORMAT = "RLJOB_LOG_FORMAT"
"""Optional: `json` for logs of one JSON object per line (see logs). Unset: text."""
ENV_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENV_OTLP_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""Optional: the collector of traces, and headers for it, as OpenTelemetry's SDKs read them."""
ENV_POD_IP = "RLJOB_POD_IP"
"""Address that this Pod's servers bind to."""
ENV_HOSTS_FILE = "RLJOB_HOSTS_FILE"
"""Optional hosts(5) file that replaces cluster DNS (see discovery). Read again for each lookup."""
ENV_JOB_FILE = "RLJOB_JOB_FILE"
"""Path of the RLJob as YAML. Fields with their default, and those that only shape Pods, may be left out."""
ENV_RUN_DIR = "RLJOB_RUN_DIR"
"""Head and trainers: folder of metrics, checkpoints and the export. On a cluster, the checkpoint volume."""
ENV_HEAD = "RLJOB_HEAD"
"""Host name of the head's Service."""
ENV_ROLLOUT_SERVICE = "RLJOB_ROLLOUT_SERVICE"
"""Headless Service of the ready rollout replicas."""
ENV_REWARD_SERVICES = "RLJOB_REWARD_SERVICES"
"""JSON object: name -> host name of its headless Service, for rewards with Pods, the simulated user and tools."""
ENV_REWARD_TOKENS = "RLJOB_REWARD_TOKENS"
"""Optional JSON object: reward name -> environment variable with the token of its RewardModel."""
ENV_GRACE_SECONDS = "RLJOB_GRACE_SECONDS"
"""Head and trainers, optional: seconds from SIGTERM to SIGKILL, if not GRACE_SECONDS. `rljob run` has less patience."""
GRACE_SECONDS: Final = 60
ENV_PORT_OFFSET = "RLJOB_PORT_OFFSET"
"""Optional number that is added to the ports below (ports.py). `rljob run` sets it: its machine has other programs."""
ENV_MODEL = "RLJOB_MODEL"
"""Source of the model in this container: the path of a folder, or hf://org/name as in the manifest."""
ENV_MODEL_STEP = "RLJOB_MODEL_STEP"
"""Optional: ENV_MODEL is the folder of another job's run, and the model its export of this step: a number, last or
best. The head chooses it, and tells the others (UrlPath.MODEL)."""
ENV_TRAIN_DATA = "RLJOB_TRAIN_DATA"
"""Head: source of data.train: a path, or hf://org/name."""
ENV_MIX_DATA = "RLJOB_MIX_DATA"
"""Head: JSON list of the sources of data.mix, as ENV_TRAIN_DATA. Unset without them."""
ENV_EVAL_DATA = "RLJOB_EVAL_DATA"
"""Head: JSON object: name of an evaluation set -> its source, as ENV_TRAIN_DATA has it. Unset without evaluation."""
ENV_HEAD_JOB_UID = "RLJOB_HEAD_JOB_UID"
"""Head, optional: uid of the head's Kubernetes Job. With a new Job, the driver counts restarts from zero."""
ENV_VLLM_SOCKET = "RLJOB_VLLM_SOCKET"
"""Reward server: Unix socket of its vLLM sidecar. Unset for rewards without a served model."""
ENV_HANG_DETECTION = "RLJOB_HANG_DETECTION"
"""vLLM sidecar: spec.hangDetection as JSON. Unset: its defaults, as for a RewardModel, which serves several jobs."""
ENV_VLLM_ENGINES = "RLJOB_VLLM_ENGINES"
"""The same, if its model has placement trainer: HOST:PORT of the engines in the Pods of this Service, separated by
spaces."""
ENV_SERVED_MODELS = "RLJOB_SERVED_MODELS"
"""Trainer: JSON object: path of a served model with placement trainer -> arguments of its vLLM. Unset without one."""
ENV_REWARD_IMAGES = "RLJOB_REWARD_IMAGES"
"""Reward server, optional: images of its Pod, separated by spaces. Part of the reward's version: they affect scores."""
ENV_CONTAINER_ENV = "RLJOB_CONTAINER_ENV"
"""Reward server: names of variables that its container sets, separated by spaces. Functions see them and a fixed list.
`*`: all, since the process has a container's environment (the image sets this). `rljob run` sets it for its Pods."""
ENV_JUDGE_API_KEY = "RLJOB_JUDGE_API_KEY"
"""Reward server: bearer token for a judge's endpoint."""
ENV_MODEL_API_KEY = "RLJOB_MODEL_API_KEY_"
"""Head: followed by an index, the key of this entry of agent.models."""
ENV_DISABLE_ISOLATION = "RLJOB_REWARD_DISABLE_ISOLATION"
"""Isolation mechanisms to disable, separated by commas, for a function that one of them prevents from working. The only
name of RLJob that a manifest may set."""
ENV_TERMINATION_LOG = "RLJOB_TERMINATION_LOG"
"""Optional: where a program writes why it ends. `rljob run` sets it; unset: /dev/termination-log, as on a cluster."""
ENV_EPISODE = "RLJOB_EPISODE"
"""Set for a program that a runner starts: path of a file with its EpisodeCall as JSON."""
ENV_SANDBOX_TOKEN = "RLJOB_SANDBOX_TOKEN"
"""Sandbox of agent-sandbox: the token of requests to it."""
ENV_ENGINE = "RLJOB_ENGINE"
"""vLLM engine in a trainer Pod: its number there. It listens at PORT_ROLLOUT + number."""
ENV_ENGINE_MODEL = "RLJOB_ENGINE_MODEL"
"""Engine of a served model: its path, a key of ENV_SERVED_MODELS. Unset for rollouts."""
ENV_HAND_OVER = "RLJOB_HAND_OVER"
"""Ranks and rollouts of a trainer Pod with rollout.placement trainer: the folder with the sockets at which ranks hand
over weights. The Pod's program sets it."""
ENV_CLIENTS_ADDRESS = "RLJOB_CLIENTS_ADDRESS"
"""Head of a training service, optional: HOST:PORT at which its clients reach it. Unset: all addresses, PORT_CLIENTS."""
ENV_PEERS = "RLJOB_PEERS"
"""Reward server: headless Service of the reward's ready replicas, which share rate limits. Unset: a single replica."""

# Ports.
PORT_RAY = 6379
PORT_DRIVER = 8100
"""Head: /status, /metrics, /weights."""
PORT_WEIGHTS = 8200
"""Trainer rank 0: the published safetensors."""
PORT_RUN_FILES = 8400
"""Head: checkpoints and the export of ranks that do not see the run's folder."""
RUN_ROUTE = "/run"
"""Head, PORT_RUN_FILES: the path of these files, and of those that reports read; `RUN_ROUTE/` lists the latter."""
PORT_ROLLOUT = 8000
"""Rollout: vLLM's OpenAI server with RLJob's middleware. In a trainer Pod, the first of several."""
PORT_ENGINES = 8600
"""Trainer, with rollout.placement trainer: the supervisor of the Pod's rollout replicas."""
PORT_GATEWAY = 8300
"""Head: the APIs through which environments and programs call the policy."""
PORT_CLIENTS = 8700
"""Head of a training service: the API of its clients."""
PORT_SERVICE = 8080
"""Reward, user, tool and runner: the reward protocol and calls."""
PORT_SANDBOX = 8500
"""Sandbox of agent-sandbox: runs code for the tool to which it belongs. Only on a cluster."""
PORTS = (
    *(PORT_RAY, PORT_DRIVER, PORT_WEIGHTS, PORT_RUN_FILES, PORT_ROLLOUT, PORT_GATEWAY, PORT_SERVICE),
    PORT_ENGINES,
)
"""Ports of programs that also run without a cluster."""

# Mount paths in containers. The local backend maps each to a folder of the run.
PATH_CONFIG = "/etc/rljob"
PATH_RUN = "/var/lib/rljob"
PATH_CLAIMS = "/mnt/pvc"
"""pvc://CLAIM/PATH is mounted read-only at PATH_CLAIMS/CLAIM."""
PATH_SCRATCH = "/var/run/rljob"
PATH_SANDBOX = "/var/run/secrets/rljob.dev/sandbox"
"""Tool with provider agentSandbox: folder with FILE_SANDBOX."""
KEY_SANDBOX_TOKEN = "sandbox-token"
"""In the Secret with FILE_SANDBOX: the token alone, for the sandboxes."""
FILE_SANDBOX = "sandbox.json"
"""{pool, port, token, seconds}: the warm pool, the sandboxes' port and token, and how long a claim may live."""
PATH_VLLM = "/var/run/vllm"
"""Folder that a service's server shares with its vLLM sidecar."""
FILE_VLLM_SOCKET = "socket"
FILE_JOB = "job.yaml"
FILE_SERVICE = "service.yaml"
"""Settings of one service: a Reward or a CallService."""
ENV_INSTALLED_ONLY = "RLJOB_INSTALLED_ONLY"
"""Set where a server must not install a function's requirements: it ends with NOT_INSTALLED if they are missing, or
with what is wrong with them."""
NOT_INSTALLED = "function.requirements are not installed on this machine yet"
MARK_INSTALLS, MARK_INSTALLED = "installs", "the requirements are installed"
"""In a server's log: what uv or pip does, and its end."""
FILE_FUNCTION = "function.py"

RAY_RESOURCE_TRAINER = "rljob-trainer"
"""Ray custom resource of trainer Pods: one unit per rank."""

SERVED_MODEL_NAME = "policy"
"""The `model` of every request to a rollout replica."""

END_EPISODE = "rljob.endEpisode"
"""`function` of a CallRequest that means: the episode has ended. No function of a tool has this name."""

READ_ROWS = "rljob.readRows"
"""`function` of a CallRequest to a runner that asks for rows of its environment or program, and not for an episode."""

# Bounds of a reward's result.
MAX_COMPONENTS = 1000
"""Each is a curve."""
MAX_RESULT_BYTES = 64 << 10
"""Limit of one sample's result as JSON. Longer ones are invalid, and never parsed."""

# Requests of seats to the gateway.
MAX_TRAJECTORIES = 64
"""Trajectories of an episode with seats: each seat that trains has one, or several."""
POLICY_MODEL = "policy"
"""The `model` of requests that the policy answers. POLICY_MODEL/SEAT: as a seat that trains."""
HEADER_SESSION = "X-Session-ID"
"""Header of a request to the gateway: which of its seat's conversations it belongs to. verifiers sends it."""

# Bounds of a call's value.
MAX_TOOL_RESULT_CHARACTERS = 1_000_000
"""Limit of what a tool returned. The rest is cut off."""
MAX_USER_REPLY_BYTES = 1 << 20
"""Limit of a UserReply as JSON: its state travels with every later call of the episode. Longer ones are invalid."""
MAX_EPISODE_REPLY_BYTES = 4 << 20
"""Limit of an EpisodeReply as JSON. Longer ones are invalid."""
MAX_ROWS_OF_PAGE = 1000
"""Limit of the rows that a runner returns at once."""
MAX_ROW_BYTES = 4 << 20
"""Limit of one row as JSON. A page of rows ends once it has as many."""


class UrlPath(enum.StrEnum):
    """HTTP paths. All except READY, LIVE and METRICS require the token."""

    READY = "/rljob/ready"
    """Any server: 200 if it is ready, else 503 with the reason."""
    LIVE = "/rljob/live"
    """Head, rollout, reward: 200 whenever its event loop runs. A rollout whose engine hangs ends itself."""
    METRICS = "/metrics"
    STATUS = "/status"
    """Head: DriverStatus."""
    SAMPLES = "/samples"
    """Head: RecentSamples, the samples that were scored last. `?after=NUMBER`: those from this number on."""
    LEAVE = "/rljob/leave"
    """Head, POST by a trainer whose Pod is terminated: what became of the last steps, once they are saved or lost."""
    HUNG = "/hung"
    """Head, POST HungPart: a part of the job that is about to end itself says why."""
    MODEL = "/model"
    """Head: where the trained model is, as the head and the ranks read it: of object storage, with its version."""
    WEIGHTS_CURRENT = "/weights/current"
    """Head: WeightManifest. `?after=GENERATION:VERSION&timeout=SECONDS` waits for a different one (204 on timeout)."""
    ROLLOUT_WEIGHTS = "/rljob/weights"
    """Rollout: RolloutWeights. `?want=GENERATION:VERSION&timeout=SECONDS` waits until it serves that version."""
    ROLLOUT_SLEEP = "/rljob/sleep"
    """Engine in a trainer Pod, POST: free the memory of weights and cache -> EngineMemory. A rollout aborts its
    requests, the engine of a served model first answers them."""
    ROLLOUT_WAKE = "/rljob/wake"
    """Rollout in a trainer Pod, POST `?want=GENERATION:VERSION`: allocate the memory of the weights again, and load
    that version once it is announced -> EngineMemory. Once it is loaded, the cache is allocated, too. The engine of
    a served model has its weights, and needs no query."""
    ENGINES = "/rljob/engines"
    """Trainer, POST `?turn=trainer`: put the Pod's replicas to sleep. `?turn=rollouts&want=GENERATION:VERSION`: wake
    them, and start those that have died. -> EnginesReport, once that is done."""
    SCORE = "/v1/score"
    """Reward: ScoreRequest -> ScoreResult."""
    SCORE_GROUP = "/v1/score-group"
    """Reward: GroupRequest -> GroupResult."""
    CALL = "/v1/call"
    """Simulated user, tools, runner: CallRequest -> CallResult."""
    INFO = "/v1/info"
    """Reward: name, signature, scope, slots, version of the function. Tools: also `tools`, a list of ToolSchema."""


class ExitCode(enum.IntEnum):
    """Exit codes of RLJob's containers, which select the restart policy."""

    SUCCEEDED = 0
    INFRASTRUCTURE = 75  # EX_TEMPFAIL: a restart may help
    USER = 78  # EX_CONFIG: the job, its data or its reward is wrong; a restart does not help
