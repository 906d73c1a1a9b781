"""The roles (head, trainer, rollout, reward): resources, node pool, Pod template, and role-specific settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from rljob_api.manifest.base import (
    DEVICE_PATTERN,
    LABEL_KEY_PATTERN,
    QUANTITY_PATTERN,
    FreeForm,
    PathText,
    Rule,
    ShortText,
    Spec,
)

MAX_RESTART_DELAY_SECONDS = 600
"""Between a failure and the restart: a Job waits up to 10 minutes, a kubelet up to 5."""
ALL_LINEAR = "all-linear"
"""peft's name for all linear modules but the head."""


def _integer_to_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


Quantity = Annotated[
    str,
    BeforeValidator(_integer_to_text),
    Field(pattern=QUANTITY_PATTERN, max_length=64),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "description": "A Kubernetes quantity: 500m, 2, 16Gi.",
            "maxLength": 64,
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""An integer or a string in YAML; a string in Python."""
LabelValue = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=316)]
DeviceName = Annotated[str, Field(pattern=DEVICE_PATTERN, max_length=200)]
"""Name of an extended resource of Kubernetes."""
EnvValue = Annotated[str, Field(max_length=32768)]


class Resources(Spec):
    """Kubernetes' ResourceRequirements of the role's main container."""

    requests: dict[str, Quantity] = Field(default={}, max_length=32)
    """Resources that the scheduler reserves, by name. Default: only the GPUs of gpusPerReplica."""
    limits: dict[str, Quantity] = Field(default={}, max_length=32)
    """Limits that the kubelet enforces, by name. RLJob adds the GPUs of gpusPerReplica as nodePool.gpuResource."""


class Toleration(Spec):
    """Kubernetes' Toleration."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("key", "operator"),
            "must be set unless operator is Exists",
            "set key, or operator: Exists for every taint",
            lambda t: t.key is not None or t.operator == "Exists",
            "has(self.key) || self.operator == 'Exists'",
        ),
        Rule(
            ("value", "operator"),
            "must be unset when operator is Exists",
            "remove value, or set operator: Equal",
            lambda t: t.value is None or t.operator == "Equal",
            "!has(self.value) || self.operator == 'Equal'",
        ),
    )

    key: Annotated[str, Field(max_length=316)] | None = None
    """Taint key. Null with operator Exists matches every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How value is compared."""
    value: LabelValue | None = None
    """Taint value, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect. Null matches all effects."""
    toleration_seconds: int | None = None
    """Seconds for which a NoExecute taint is tolerated. Null: indefinitely."""


class Topology(Spec):
    """One domain of nodes for all Pods of a role, such as a rack, or the nodes that NVLink connects."""

    key: LabelKey
    """Label of nodes: those with the same value are one domain. nvidia.com/gpu.clique is an NVLink domain."""
    required: bool = True
    """true: Pods start only in the domain of the role's others. false: elsewhere, too, if they do not fit there."""


class NodePool(Spec):
    """The nodes of one role. Roles with different pools never share a node."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("gpuResource",),
            "must be an extended resource: outside kubernetes.io, and without requests. before it",
            "set the name that the device plugin of the nodes gives to a GPU; kubectl describe node lists it",
            lambda pool: "kubernetes.io/" not in pool.gpu_resource and not pool.gpu_resource.startswith("requests."),
            "!has(self.gpuResource) || "
            "!(self.gpuResource.contains('kubernetes.io/') || self.gpuResource.startsWith('requests.'))",
        ),
    )

    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """Taints that the role's Pods tolerate."""
    exclusive: bool = False
    """Whether Pods of this role avoid nodes that run another role of any RLJob (required anti-affinity)."""
    gpu_resource: DeviceName = "nvidia.com/gpu"
    """Resource name of one GPU on these nodes, such as amd.com/gpu, or nvidia.com/mig-3g.40gb for a slice. The role's
    GPUs, and those of a reward's or user's model, are requested by this name."""
    topology: Topology | None = None
    """One domain for all Pods of the role: by Kueue's topology annotations with scheduling.gang kueue, else by affinity
    between the Pods. Null: any nodes of the pool."""


class Role(Spec):
    """Fields that every role has."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("env",),
            "must not set names that begin with RLJOB_: they are reserved",
            "choose another name",
            lambda role: not any(name.startswith("RLJOB_") for name in role.env),
            # has(): the API server evaluates rules before it fills in the fields of a defaulted role.
            "!has(self.env) || self.env.all(name, !name.startsWith('RLJOB_'))",
        ),
    )

    image: PathText | None = None
    """Container image. Null: the operator's default for the role. Ignored by `rljob run`."""
    resources: Resources = Resources()
    """Requests and limits of the main container."""
    node_pool: NodePool = NodePool()
    """Nodes on which the role's Pods may run."""
    env: dict[str, EnvValue] = Field(default={}, max_length=128)
    """Additional environment of the main container. Names that begin with RLJOB_ are reserved."""
    template: FreeForm = {}
    """A partial PodTemplateSpec, merged over the generated one (maps by key, containers and volumes by name)."""
    backoff_limit: int = Field(default=6, ge=0, le=1000)
    """Maximum failures within backoffWindowSeconds; one more fails the job. Rollouts and rewards count per Pod, the
    trainers as one group. Failures of RLJob's containers count; evictions, lost nodes and other containers do not."""
    backoff_window_seconds: int = Field(default=21600, ge=60, le=31_536_000)
    """Time after which a failure no longer counts. The default detects a container that loads for half an hour and then
    fails. At least 600 * (backoffLimit + 1) are used, because Kubernetes delays a restart by up to 10 minutes."""

    @property
    def backoff_window(self) -> timedelta:
        """The window that counts. In a shorter one a container that always fails might never exceed the limit."""
        return timedelta(seconds=max(self.backoff_window_seconds, MAX_RESTART_DELAY_SECONDS * (self.backoff_limit + 1)))


class HeadRole(Role):
    """The driver's Pod: Ray head, agent loops, status and weight manifest. Always one replica."""


class Lora(Spec):
    """LoRA (Hu et al. 2021): low-rank adapters are trained, and the model's own weights stay as they are. Names and
    files are those of peft. Use about 10 times the learning rate of full fine-tuning. See docs/lora.md. Immutable."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("targetModules",),
            "must be names of modules, or all-linear alone",
            "remove all-linear, or the other names",
            lambda lora: ALL_LINEAR not in lora.target_modules or len(lora.target_modules) == 1,
            f"!has(self.targetModules) || self.targetModules.size() == 1 || !('{ALL_LINEAR}' in self.targetModules)",
        ),
    )

    rank: int = Field(default=32, ge=1, le=512)
    """Rank r of the update of a module. vLLM serves ranks up to 512."""
    alpha: int = Field(default=32, ge=1)
    """The update of a module is alpha / rank x B A. With a fixed alpha, the best learning rate hardly depends on the
    rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an input of an adapter in training. Rollouts sample without dropout, so a value above 0
    makes the trainer's probabilities differ from theirs."""
    target_modules: list[ShortText] = Field(default=[ALL_LINEAR], min_length=1, max_length=64)
    """Last part of the names of the linear modules that get an adapter, such as q_proj. all-linear: every linear module
    but the head."""
    publish: Literal["merged", "adapter"] = "merged"
    """What rollouts get at a weight update. merged: whole weights, with the adapters added, in the compute dtype.
    adapter: the adapters alone, which vLLM computes in addition: a small transfer and no rounding of the sum, but more
    work per token."""


class TrainerRole(Role):
    """The FSDP2 actor group."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *Role.RULES,
        Rule(
            ("sharding",),
            "must be full with fewer than 2 GPUs per Pod: otherwise each rank holds a whole copy",
            "remove it, or set gpusPerReplica to 2 or more",
            lambda trainer: trainer.sharding == "full" or trainer.gpus_per_replica > 1,
            "!has(self.sharding) || self.sharding == 'full' || (has(self.gpusPerReplica) && self.gpusPerReplica > 1)",
        ),
    )

    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of trainer Pods. Immutable unless the job is suspended."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs per Pod (nodePool.gpuResource), with one rank per GPU. 0 means one CPU rank per Pod. Immutable unless the
    job is suspended."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the forward and backward pass, and of the rollouts. Master weights and optimizer state are always
    fp32. Unset, `rljob run` chooses float32 for CPUs without instructions for bfloat16, which compute that slowly."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Maximum tokens of one micro-batch on a rank, including padding. A longer trajectory gets its own micro-batch."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: far less memory, about a third more compute. Null: with GPUs."""
    sharding: Literal["full", "perReplica"] = "full"
    """Over which ranks FSDP2 shards weights, gradients and optimizer state. full: over all. perReplica: over those of a
    Pod, so each Pod has a copy; between Pods, only gradients travel, but a GPU needs more memory."""
    offload: Literal["none", "reference", "all"] = "none"
    """What is kept in the Pod's host memory and copied to the GPU layer by layer (FSDP2's CPUOffloadPolicy). reference:
    the weights of the reference model. all: also weights, gradients and optimizer state of the policy and of a critic;
    AdamW then runs on the Pod's CPUs. Without GPUs it has no effect: all of it is in host memory."""
    attention: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation. packed: rows one after the other without padding, by torch's varlen flash attention; it
    needs full attention in all layers, and on GPUs Ampere or newer and a dtype of 16 bits. auto: packed on GPUs that
    support it, otherwise sdpa. The others have their names from transformers; flash_attention_2 needs flash-attn."""
    compile: bool = False
    """Compile each decoder layer with torch.compile: fewer and larger kernels, but a first update that takes minutes.
    Needs a C++ compiler in the image on CPUs, and a C compiler with GPUs."""
    lora: Lora | None = None
    """LoRA adapters instead of all weights. Null: full fine-tuning. Immutable."""

    @property
    def num_ranks(self) -> int:
        """World size of the trainer: one rank per GPU, or per Pod without GPUs."""
        return self.replicas * max(1, self.gpus_per_replica)

    @property
    def recomputes_activations(self) -> bool:
        """gradientCheckpointing, and what null means."""
        return self.gpus_per_replica > 0 if self.gradient_checkpointing is None else self.gradient_checkpointing

    @property
    def offloads_state(self) -> bool:
        """Whether what the optimizer updates is in host memory."""
        return self.offload == "all"

    @property
    def offloads_reference(self) -> bool:
        """Whether the frozen weights of the reference model are in host memory."""
        return self.offload != "none"

    @property
    def num_copies(self) -> int:
        """Copies of weights and optimizer state, each sharded over equally many adjacent ranks."""
        return self.replicas if self.sharding == "perReplica" else 1


UpdateMode = Literal["keep", "recompute", "finish"]


class Sampling(Spec):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature. 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus probability mass; 1 is off. Training needs 1."""
    top_k: int = Field(default=0, ge=0)
    """Number of candidate tokens; 0 is off. Training needs 0."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum new tokens of a trajectory."""
    stop: list[ShortText] = Field(default=[], max_length=16)
    """Strings that end a trajectory, in addition to the end-of-sequence token."""


_FULL_DISTRIBUTION = "for training: otherwise vLLM's log-probs cover fewer tokens than the trainer's"
_EVALUATION_MAY = "remove it; evaluation.sampling may have it"


class TrainingSampling(Sampling):
    """How training trajectories are sampled: from the whole distribution, which the loss assumes."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("topP",),
            f"must be 1 {_FULL_DISTRIBUTION}",
            _EVALUATION_MAY,
            lambda sampling: sampling.top_p == 1,
            "!has(self.topP) || self.topP == 1.0",
            is_ratcheted=True,
        ),
        Rule(
            ("topK",),
            f"must be 0 {_FULL_DISTRIBUTION}",
            _EVALUATION_MAY,
            lambda sampling: sampling.top_k == 0,
            "!has(self.topK) || self.topK == 0",
            is_ratcheted=True,
        ),
    )


class RolloutRole(Role):
    """The vLLM servers."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of vLLM replicas. May change while the job runs."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs per replica (nodePool.gpuResource), used for tensor parallelism. 0 means vLLM's CPU backend."""
    sampling: TrainingSampling = TrainingSampling()
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of prompt plus completion, in tokens. Null: the model's limit."""
    kv_cache_gib: float | None = Field(default=None, gt=0, alias="kvCacheGiB")
    """KV-cache memory of a CPU replica, in GiB. Null means 1."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM uses."""
    max_in_flight: int = Field(default=256, ge=1)
    """Maximum requests in flight on one replica."""
    update_mode: UpdateMode = "keep"
    """What a weight update does with requests in flight. keep: pause them, and continue with the new weights and the
    keys and values that the old ones computed. recompute: the same, but compute these again with the new weights, which
    costs a prefill of each request. finish: wait until they end with the old weights. schedule.type oneStepOff always
    uses finish."""
    request_timeout_seconds: float = Field(default=600, gt=0)
    """Seconds without a new token after which a generation request is retried on another replica. The length of a
    completion does not matter. While it produces tokens for other requests, the replica stays in use."""
    startup_timeout_seconds: int | None = Field(default=None, ge=10, le=86400)
    """Seconds from the start of a replica's container until vLLM listens; then the container restarts. Null: 600, and
    4200 for a model of the Hub. A change restarts the rollouts."""
    extra_args: list[PathText] = Field(default=[], max_length=64)
    """Additional arguments of vLLM's API server."""
