"""The roles (head, trainer, rollout, reward): resources, node pool, Pod template, and role-specific settings."""

from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, PrivateAttr

from rljob_api.manifest.base import (
    DEVICE_PATTERN,
    LABEL_KEY_PATTERN,
    Choice,
    FreeForm,
    PathText,
    Rule,
    ShortText,
    Spec,
)
from rljob_api.manifest.quantity import Quantity, Size, size_within

_MAX_RESTART_DELAY_SECONDS: Final = 600
"""Between a failure and the restart: a Job waits up to 10 minutes, a kubelet up to 5."""
_WINDOW_SECONDS: Final = 21600
ALL_LINEAR = "all-linear"
"""peft's name for all linear modules but the head."""


LabelValue = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=316)]
DeviceName = Annotated[str, Field(pattern=DEVICE_PATTERN, max_length=200)]
"""Name of an extended resource of Kubernetes."""
EnvValue = Annotated[str, Field(max_length=32768)]


class Resources(Spec):
    """Kubernetes' ResourceRequirements of the role's main container."""

    requests: dict[str, Quantity] = Field(default={}, max_length=32)
    """What the scheduler reserves, by name. Default: only the GPUs of gpusPerReplica."""
    limits: dict[str, Quantity] = Field(default={}, max_length=32)
    """What the kubelet enforces, by name. RLJob adds the GPUs of gpusPerReplica as nodePool.gpuResource."""


class Toleration(Spec):
    """Kubernetes' Toleration."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("key", "operator"),
            "must be set unless operator is Exists",
            "set it",
            lambda t: t.key is not None or t.operator == "Exists",
            "has(self.key) || self.operator == 'Exists'",
        ),
        Rule(
            ("value", "operator"),
            "must be unset when operator is Exists",
            "remove it",
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
    """Label of nodes. Those with the same value are one domain, as with `nvidia.com/gpu.clique` (NVLink)."""
    required: bool = True
    """Whether it is a must. true: Pods start only in the domain of the others. false: elsewhere, too, if it is full."""


class NodePool(Spec):
    """The nodes of one role. Roles with different pools never share a node."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("gpuResource",),
            "must be an extended resource: outside kubernetes.io, and without requests. before it",
            "set one that kubectl describe node lists",
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
    """Whether its Pods avoid nodes of other roles. They do it by a required anti-affinity to those of any RLJob."""
    gpu_resource: DeviceName = "nvidia.com/gpu"
    """Resource name of a GPU. Others are amd.com/gpu, or nvidia.com/mig-3g.40gb for a slice. The role's
    GPUs, and those of a reward's or user's model, are requested by this name."""
    topology: Topology | None = None
    """One domain for all Pods of the role. By Kueue's topology annotations with scheduling.gang kueue, else by affinity
    between the Pods. Null: any nodes of the pool."""


def reserve_names(*allowed: str) -> Rule:
    """Return the rule that `env` sets no names of RLJob but these."""
    unless = "".join(f" || name == '{name}'" for name in allowed)
    return Rule(
        ("env",),
        f"must not set names that begin with RLJOB_{', except ' if allowed else ''}{', '.join(allowed)}: "
        "they are reserved",
        "choose another name",
        lambda role: not any(name.startswith("RLJOB_") and name not in allowed for name in role.env),
        # has(): the API server evaluates rules before it fills in the fields of a defaulted role.
        f"!has(self.env) || self.env.all(name, !name.startsWith('RLJOB_'){unless})",
    )


def _shortest_window(backoff_limit: int) -> int:
    """In a shorter one, a container that always fails might never exceed the limit."""
    return _MAX_RESTART_DELAY_SECONDS * (backoff_limit + 1)


WINDOW_FITS: Final = Rule(
    ("backoffWindowSeconds", "backoffLimit"),
    f"must be at least {_MAX_RESTART_DELAY_SECONDS} x (backoffLimit + 1): a restart may be delayed by 10 minutes",
    "raise it, or lower backoffLimit",
    lambda role: (
        role.backoff_window_seconds is None or role.backoff_window_seconds >= _shortest_window(role.backoff_limit)
    ),
    "!has(self.backoffWindowSeconds) || self.backoffWindowSeconds >= "
    f"{_MAX_RESTART_DELAY_SECONDS} * ((has(self.backoffLimit) ? self.backoffLimit : 6) + 1)",
)


class Role(Spec):
    """Fields that every role has."""

    RULES: ClassVar[tuple[Rule, ...]] = (reserve_names(), WINDOW_FITS)

    image: PathText | None = None
    """Container image. Null: the operator's default for the role. Ignored by `rljob run`."""
    resources: Resources = Resources()
    """Requests and limits of the main container."""
    node_pool: NodePool = NodePool()
    """Nodes on which the role's Pods may run."""
    env: dict[str, EnvValue] = Field(default={}, max_length=128)
    """Additional environment of the main container. Names that begin with RLJOB_ are reserved, except, for rewards and
    what an agent calls, RLJOB_REWARD_DISABLE_ISOLATION (docs/isolation.md)."""
    template: FreeForm = {}
    """A partial PodTemplateSpec, merged over the generated one. Containers and volumes are merged by name."""
    backoff_limit: int = Field(default=6, ge=0, le=1000)
    """Failures within backoffWindowSeconds; one more fails the job. Rollouts and rewards count per Pod, the
    trainers as one group. Failures of RLJob's containers count; evictions, lost nodes and other containers do not."""
    backoff_window_seconds: int | None = Field(default=None, ge=_MAX_RESTART_DELAY_SECONDS, le=31_536_000)
    """Seconds after which a failure no longer counts. Null: 21600, which detects a container that loads for half an
    hour and then fails, or 600 x (backoffLimit + 1) if that is longer."""

    @property
    def backoff_window(self) -> timedelta:
        """backoffWindowSeconds, and what null means."""
        longest = max(_WINDOW_SECONDS, _shortest_window(self.backoff_limit))
        return timedelta(seconds=self.backoff_window_seconds or longest)


KV_CACHE_FITS: Final = size_within("kvCacheMemory", "64Ki")
"""Rule of what vLLM serves."""


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
    """Last part of the names of the linear modules that get an adapter, such as q_proj. all-linear, peft's name:
    every linear module but the head."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """What rollouts get at a weight update. adapter: the adapters alone, which vLLM computes in addition. merged: whole
    weights, with the adapters added, in the compute dtype, which loses most of a small update. auto: adapter where vLLM
    supports adapters of the model, otherwise merged."""


_MAX_MICRO_BATCH_TOKENS = 16384


class TrainerRole(Role):
    """The FSDP2 actor group."""

    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of trainer Pods. Immutable unless the job is suspended."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs per Pod (nodePool.gpuResource), with one rank per GPU. 0 means one CPU rank per Pod. Immutable unless the
    job is suspended."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the forward and backward pass, and of the rollouts. Master weights and optimizer state are always
    fp32. Unset, `rljob run` chooses float32 for CPUs without instructions for bfloat16, which compute that slowly."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type of the logits, in the trainer and in the rollouts. model: dtype. float32: the product of hidden states
    and head is not rounded to 16 bits, so that both agree better about the probabilities of tokens."""
    micro_batch_tokens: int | None = Field(default=None, ge=16)
    """Maximum tokens of one micro-batch on a rank, including padding. A longer trajectory gets its own micro-batch.
    Null: 16384, or on GPUs 8192 or 4096 where gradientCheckpointing: auto is then less than full, by `rljob plan`."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What the backward pass computes again instead of keeping it. full: each layer, for about a third more compute.
    selective: all but matrix products and attention. auto: on GPUs the least that fits by `rljob plan`, else none."""
    offload: Literal["none", "reference", "all"] = "none"
    """What is kept in the Pod's host memory and copied to the GPU layer by layer (FSDP2's CPUOffloadPolicy). reference:
    the weights of the reference model. all: also weights, gradients and optimizer state of the policy and of a critic;
    AdamW then runs on the Pod's CPUs. Without GPUs it has no effect."""
    attention: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation. packed: rows one after the other without padding, by torch's varlen flash attention; it
    needs full attention in all layers, and on GPUs Ampere or newer and a dtype of 16 bits. auto: packed on GPUs that
    support it, otherwise sdpa. The others have their names from transformers; flash_attention_2 needs flash-attn."""
    compile: Choice = "auto"
    """Compile each decoder layer with torch.compile: fewer and larger kernels, but a first update that takes minutes.
    Needs a C++ compiler in the image on CPUs, a C compiler with GPUs. auto: with GPUs, where the model allows it."""
    lora: Lora | None = None
    """LoRA adapters instead of all weights. Null: full fine-tuning. Immutable."""

    @property
    def num_ranks(self) -> int:
        """World size of the trainer: one rank per GPU, or per Pod without GPUs."""
        return self.replicas * max(1, self.gpus_per_replica)

    # Jobs of 4f444b1d and before store 16384, their default: digests leave it out, as their operators' did.
    _changed_defaults: dict[str, Any] = PrivateAttr(
        default_factory=lambda: {"micro_batch_tokens": _MAX_MICRO_BATCH_TOKENS}
    )

    @property
    def largest_micro_batch(self) -> int:
        """The most tokens of a micro-batch, whatever the ranks choose."""
        return self.micro_batch_tokens or _MAX_MICRO_BATCH_TOKENS

    @property
    def offloads_state(self) -> bool:
        """Whether what the optimizer updates is in host memory."""
        return self.offload == "all"

    @property
    def offloads_reference(self) -> bool:
        """Whether the frozen weights of the reference model are in host memory."""
        return self.offload != "none"


UpdateMode = Literal["keep", "recompute", "finish"]
WeightTransfer = Literal["auto", "file", "device"]


class Sampling(Spec):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature. 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus probability mass; 1 is off. Training needs 1."""
    top_k: int = Field(default=0, ge=0)
    """Number of candidate tokens; 0 is off. Training needs 0."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum new tokens of one answer. An episode with turns has several, each with this limit. Null: by the model's
    files; `rljob validate` shows it. max_new_tokens of generation_config.json; else 16384 if the chat template lets the
    model think, otherwise 512; at most half of maxModelLen or the context. evaluation.sampling: as
    rollout.sampling."""
    stop: list[ShortText] = Field(default=[], max_length=16)
    """Texts that end an answer, in addition to the model's end-of-sequence tokens. The text of a special token stands
    for the token."""

    @property
    def answer_tokens(self) -> int:
        """max_tokens of a resolved job, in which it is never null (rljob_inputs.models.defaults)."""
        assert self.max_tokens is not None, "the job's open settings are not resolved"
        return self.max_tokens


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


OWN_GPU: Final = 0.9
SHARED_GPU: Final = 0.8
"""vLLM's fraction of a GPU: its own, and one that it shares with a rank."""
Placement = Literal["separate", "trainer"]


class RolloutRole(Role):
    """The vLLM servers."""

    RULES: ClassVar[tuple[Rule, ...]] = (*Role.RULES, KV_CACHE_FITS)

    placement: Placement = "separate"
    """Where the replicas run. separate: in Pods of their own, next to the trainer. trainer: in the trainer's Pods, on
    its GPUs, in turns: they sleep while the trainer updates. It needs schedule.type onPolicy or synchronous. A replica
    that ends is restarted within its Pod: backoffLimit does not apply. See docs/one-gpu.md. Immutable unless the job is
    suspended."""
    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of vLLM replicas. May change while the job runs. With placement trainer, leave it out: there is one per
    gpusPerReplica GPUs of the trainer, or one per trainer Pod without GPUs."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs per replica (nodePool.gpuResource), used for tensor parallelism. 0 means vLLM's CPU backend. With placement
    trainer, a divisor of trainer.gpusPerReplica."""
    sampling: TrainingSampling = TrainingSampling()
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of prompt plus completion, in tokens. Null: the model's limit."""
    kv_cache_memory: Size = Size("1Gi")
    """Memory for the KV cache of a CPU replica, such as 512Mi."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM uses. Null: 0.9; with placement trainer 0.8, because the ranks keep a CUDA
    context there, and what their allocator cannot free, while the replicas work; less what served models with placement
    trainer use."""
    max_in_flight: int = Field(default=256, ge=1)
    """Maximum requests in flight on one replica."""
    update_mode: UpdateMode = "keep"
    """What a weight update does with requests in flight. keep: pause them, and continue with the new weights and the
    keys and values that the old ones computed. recompute: the same, but compute these again with the new weights, which
    costs a prefill of each request. finish: wait until they end with the old weights. schedule.type oneStepOff always
    uses finish."""
    weight_transfer: WeightTransfer = "file"
    """How published weights come to the replicas. file: rank 0 of the trainer writes them to a file, which replicas map
    or download. device, with placement trainer: each rank hands them to the replicas on its GPU, without a file;
    without GPUs, through shared memory. No run on a GPU has shown device yet, so it is a choice. auto: device with
    placement trainer and GPUs, unless replicas load an adapter, the weights have another form in a checkpoint, or CUDA
    cannot share memory, as under WSL2; else file."""
    stall_timeout_seconds: int = Field(default=600, ge=1)
    """Seconds without a new token after which a generation request is retried on another replica. It does not limit the
    whole request. While it produces tokens for other requests, the replica stays in use."""
    startup_timeout_seconds: int | None = Field(default=None, ge=10, le=86400)
    """Seconds from the start of a replica's container until vLLM listens; then the container restarts. Null: 600, and
    4200 for a model of the Hub."""
    extra_args: list[PathText] = Field(default=[], max_length=64)
    """Additional arguments of vLLM's API server."""
