"""What every role (head, trainer, rollout, reward) shares: replicas, resources, node pool, Pod template."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from rljob_api.manifest.base import QUANTITY_PATTERN, PathText, Rule, ShortText, Spec


def _spell_out(value: Any) -> Any:
    return str(value) if type(value) is int else value


Quantity = Annotated[
    str,
    BeforeValidator(_spell_out),
    Field(pattern=QUANTITY_PATTERN, max_length=64),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "maxLength": 64,
            "description": "A Kubernetes quantity: 500m, 2, 16Gi.",
        }
    ),
]
"""A whole number or a string, as Kubernetes has it; kept as a string."""
LabelValue = Annotated[str, Field(max_length=63)]
EnvValue = Annotated[str, Field(max_length=32768)]


class Resources(Spec):
    """Kubernetes' ResourceRequirements of the role's main container."""

    requests: dict[str, Quantity] = Field(default={}, max_length=32)
    """What the scheduler reserves, by resource name. Default: none, but for the GPUs of gpusPerReplica."""
    limits: dict[str, Quantity] = Field(default={}, max_length=32)
    """What the kubelet enforces, by resource name. GPUs of gpusPerReplica are added as nvidia.com/gpu."""


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
    """Taint key; null with operator Exists matches every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How value is compared."""
    value: LabelValue | None = None
    """Taint value, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; null matches all effects."""
    toleration_seconds: int | None = None
    """Seconds a NoExecute taint is tolerated; null means for ever."""


class NodePool(Spec):
    """The nodes of one role. Roles with different pools never share a node."""

    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """Taints that the role's Pods tolerate."""
    exclusive: bool = False
    """Whether Pods of this role refuse nodes that run another role of any RLJob (required anti-affinity)."""


class Role(Spec):
    """Fields that every role has."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("env",),
            "must not set names that begin with RLJOB_: they are reserved",
            "choose another name",
            lambda role: not any(name.startswith("RLJOB_") for name in role.env),
            # has(): a role may be defaulted to {}, and rules see a default before its own fields are filled in.
            "!has(self.env) || self.env.all(name, !name.startsWith('RLJOB_'))",
        ),
    )

    image: PathText | None = None
    """Container image; null means the operator's default for the role. Ignored by `rljob run`."""
    resources: Resources = Resources()
    """Requests and limits of the main container."""
    node_pool: NodePool = NodePool()
    """Where the role's Pods may run."""
    env: dict[str, EnvValue] = Field(default={}, max_length=128)
    """Extra environment of the main container. Names that begin with RLJOB_ are reserved."""
    template: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """A partial PodTemplateSpec, merged over the built one (maps by key, containers and volumes by name)."""
    backoff_limit: int = Field(default=6, ge=0, le=1000)
    """How often the role may be restarted after a failure before the job fails."""


class HeadRole(Role):
    """The Pod of the driver: Ray head, agent loops, status and weight manifest. Always one replica."""


class TrainerRole(Role):
    """The FSDP2 actor group."""

    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of trainer Pods. Immutable unless the job is suspended."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs of each Pod, one rank a GPU. 0 means one CPU rank a Pod. Immutable unless the job is suspended."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Compute dtype of forward and backward. Master weights and optimizer state are always fp32."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Most tokens (padding included) of one micro-batch on a rank. A longer single trajectory gets its own."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation, by its name in transformers."""

    @property
    def num_ranks(self) -> int:
        """World size of the trainer: one rank a GPU, or one a Pod without GPUs."""
        return self.replicas * max(1, self.gpus_per_replica)


class Sampling(Spec):
    """How tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1 is off. Training wants 1: the loss assumes the full distribution."""
    top_k: int = Field(default=0, ge=0)
    """Number of candidates; 0 is off. Training wants 0."""
    max_tokens: int = Field(default=512, ge=1)
    """Most new tokens of a trajectory."""
    stop: list[ShortText] = Field(default=[], max_length=16)
    """Strings that end a trajectory, besides the end-of-sequence token."""


class RolloutRole(Role):
    """The vLLM servers."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of vLLM replicas. May change while the job runs."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs of each replica, used as tensor parallelism. 0 means vLLM's CPU backend."""
    sampling: Sampling = Sampling()
    """How training trajectories are sampled."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt plus completion, in tokens. Null means the model's own limit."""
    kv_cache_gib: float | None = Field(default=None, gt=0, alias="kvCacheGiB")
    """KV-cache memory of a CPU replica, in GiB. Null means 1."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes."""
    max_in_flight: int = Field(default=256, ge=1)
    """Most requests in flight on one replica."""
    update_mode: Literal["keep", "finish"] = "keep"
    """What a weight update does with requests in flight: keep pauses and goes on with them under the new weights,
    finish waits until they end under the old ones."""
    request_timeout_seconds: float = Field(default=600, gt=0)
    """Time after which a generation request is retried on another replica."""
    extra_args: list[PathText] = Field(default=[], max_length=64)
    """Further arguments of vLLM's API server."""
