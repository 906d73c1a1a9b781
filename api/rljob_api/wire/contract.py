"""What the parts of a running job agree on: environment, ports, paths, labels, exit codes.

The operator writes them into Pods; the programs in the Pods read them. Nothing else may spell them out.
"""

from __future__ import annotations

import enum

# Labels and selectors of every child.
LABEL_JOB = "rljob.dev/job"
LABEL_ROLE = "rljob.dev/role"
LABEL_REWARD = "rljob.dev/reward"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "rljob-operator"
LABEL_REWARD_MODEL = "rljob.dev/reward-model"
"""Children of a RewardModel carry it in place of LABEL_JOB."""
ANNOTATION_RETRY = "rljob.dev/retry"
"""On an RLJob: any new value starts a failed job again from its checkpoint (`kubectl rljob retry`)."""
SCHEDULING_GATE = "rljob.dev/gang"
"""Holds a Pod back until all Pods of its job exist (spec.scheduling.gang: gates)."""

# Environment of every container.
ENV_TOKEN = "RLJOB_TOKEN"
"""Bearer token of the job. Every request between parts carries `Authorization: Bearer TOKEN`."""
ENV_POD_IP = "RLJOB_POD_IP"
"""Address that this Pod's servers bind to."""
ENV_HOSTS_FILE = "RLJOB_HOSTS_FILE"
"""Optional hosts(5) file that stands in for cluster DNS (see discovery). Read anew at each look-up."""
ENV_JOB_FILE = "RLJOB_JOB_FILE"
"""Path of the whole RLJob as YAML, defaults filled in."""
ENV_RUN_DIR = "RLJOB_RUN_DIR"
"""Head and trainers: folder for metrics, checkpoints and the export; on a cluster the checkpoint volume."""
ENV_HEAD = "RLJOB_HEAD"
"""Host name of the head's Service."""
ENV_ROLLOUT_SERVICE = "RLJOB_ROLLOUT_SERVICE"
"""Headless Service of the ready rollout replicas."""
ENV_REWARD_SERVICES = "RLJOB_REWARD_SERVICES"
"""JSON object: reward name -> host name of its headless Service, for the rewards that we serve."""
ENV_REWARD_TOKENS = "RLJOB_REWARD_TOKENS"
"""Optional JSON object: reward name -> name of the environment variable with that reward's token, for rewards that do
not take the job's own (RewardModels)."""
ENV_RAY_PORT = "RLJOB_RAY_PORT"
"""Optional port of the Ray head instead of PORT_RAY. `rljob run` sets it: whatever address Ray's head is given, it
listens on all of the machine's, so that two runs on one machine need two ports."""
ENV_MODEL = "RLJOB_MODEL"
"""Where the model is for this container: a folder's path, or hf://org/name as the user wrote it."""
ENV_TRAIN_DATA = "RLJOB_TRAIN_DATA"
"""Head: where data.train is: a path, or hf://org/name."""
ENV_EVAL_DATA = "RLJOB_EVAL_DATA"
"""Head: where data.eval is; unset without evaluation."""
ENV_HEAD_JOB_UID = "RLJOB_HEAD_JOB_UID"
"""Head, optional: which life of the job this is. Suspend and resume, a retry or a changed spec begin another one, and
restarts count from zero in each."""
ENV_VLLM_SOCKET = "RLJOB_VLLM_SOCKET"
"""Reward server: Unix socket of the vLLM beside it. Unset for rewards without a model of their own."""
ENV_REWARD_IMAGES = "RLJOB_REWARD_IMAGES"
"""Reward server: the images of its Pod, parted by spaces. They are a part of its version: another image may score
otherwise. Unset where it runs without one."""
ENV_JUDGE_API_KEY = "RLJOB_JUDGE_API_KEY"
"""Reward server: bearer token for a judge's endpoint."""
ENV_PEERS = "RLJOB_PEERS"
"""Reward server: headless Service of the reward's own ready replicas, over which limits are shared. Unset: it is
alone."""

# Ports.
PORT_RAY = 6379
PORT_DRIVER = 8100
"""Head: /status, /metrics, /weights."""
PORT_WEIGHTS = 8200
"""Trainer rank 0: the published safetensors."""
PORT_ROLLOUT = 8000
"""Rollout: vLLM's OpenAI server with our middleware."""
PORT_REWARD = 8080
"""Reward: the reward protocol."""

# Mount paths in containers. The local backend maps each to a folder of the run.
PATH_CONFIG = "/etc/rljob"
PATH_RUN = "/var/lib/rljob"
PATH_CLAIMS = "/mnt/pvc"
"""pvc://CLAIM/PATH is mounted read-only at PATH_CLAIMS/CLAIM."""
PATH_SCRATCH = "/var/run/rljob"
PATH_VLLM = "/var/run/vllm"
"""Between a reward server and the vLLM beside it."""
FILE_VLLM_SOCKET = "socket"
FILE_JOB = "job.yaml"
FILE_REWARD = "reward.yaml"
FILE_FUNCTION = "function.py"

RAY_RESOURCE_TRAINER = "rljob-trainer"
"""Ray custom resource of trainer Pods: one unit a rank."""

SERVED_MODEL_NAME = "policy"
"""The `model` of every request to a rollout replica."""

# Headers of each response of a rollout replica. Values: GENERATION:VERSION; empty while it serves the start model.
HEADER_WEIGHTS = "x-rljob-weights"
"""Weights that the replica served when it sent the response."""
HEADER_WEIGHTS_BEGIN = "x-rljob-weights-begin"
"""Weights that it served when the request arrived. They differ after an update in between (updateMode keep)."""


class UrlPath(enum.StrEnum):
    """HTTP paths. READY and METRICS alone answer without the token."""

    READY = "/rljob/ready"
    """Any server: 200 when it may get traffic, else 503 with the reason."""
    METRICS = "/metrics"
    STATUS = "/status"
    """Head: Status as JSON."""
    WEIGHTS_CURRENT = "/weights/current"
    """Head: WeightManifest. `?after=GENERATION:VERSION&timeout=SECONDS` waits for another one (204: none came)."""
    ROLLOUT_WEIGHTS = "/rljob/weights"
    """Rollout: RolloutWeights. `?want=GENERATION:VERSION&timeout=SECONDS` waits until it serves that version."""
    SCORE = "/v1/score"
    """Reward: ScoreRequest -> ScoreResult."""
    SCORE_GROUP = "/v1/score-group"
    """Reward: GroupRequest -> GroupResult."""
    INFO = "/v1/info"
    """Reward: name, signature, scope, slots, version of the function."""


class ExitCode(enum.IntEnum):
    """Exit codes of our containers, so that a restart policy can tell whose fault it was."""

    SUCCEEDED = 0
    INFRASTRUCTURE = 75  # EX_TEMPFAIL: a restart may help
    USER = 78  # EX_CONFIG: the job, its data or its reward is wrong; a restart cannot help
