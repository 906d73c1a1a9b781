"""RLJobPolicy: what a platform team sets for one namespace, as defaults and as limits of its RLJobs and RewardModels.

Owns the types. `rljob_core.plan.policy_defaults` applies the defaults, `policy_limits` checks the limits. Invariant: no
field of a policy loosens what the installation's template policy or Kubernetes refuses.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest.base import ObjectMeta, ObjectName, PathText, Rule, ShortText, Spec
from rljob_api.manifest.pod_settings import LocalObjectReference
from rljob_api.manifest.quantity import Quantity
from rljob_api.manifest.roles import LabelValue, Resources, Toleration
from rljob_api.manifest.services.base import PythonVersion
from rljob_api.wire.contract import API_VERSION
from rljob_api.wire.logs import LogFormat

POLICY_NAME: Final = "default"
"""The name of a namespace's policy. There is one, so it is clear which holds."""
_ImageName = Annotated[str, Field(min_length=1, max_length=512)]
_LabelValues = Annotated[list[LabelValue], Field(min_length=1, max_length=64)]
_TemplateField = Annotated[str, Field(max_length=128, pattern=r"^(metadata|spec)\.[A-Za-z]+$")]


class PolicyResources(Spec):
    """Requests and limits of the roles' main containers. Of a resource that is named here, both replace those of the
    installation, and a job's own replace both."""

    head: Resources = Resources()
    trainer: Resources = Resources()
    rollout: Resources = Resources()
    reward: Resources = Resources()
    """Also of the Pods of an agent's user, tools and runner."""
    vllm: Resources = Resources()
    """The sidecar that serves the model of a reward or a judge."""


class PolicyPool(Spec):
    """Nodes of a role."""

    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that a node must have. Those of the role's own nodePool take precedence."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """Taints that the role's Pods tolerate, in addition to those of its own nodePool."""


class PolicyPools(Spec):
    """Nodes by role."""

    head: PolicyPool = PolicyPool()
    trainer: PolicyPool = PolicyPool()
    rollout: PolicyPool = PolicyPool()
    reward: PolicyPool = PolicyPool()
    """Also of an agent's user, tools and runner, and of RewardModels."""


class PolicyDefaults(Spec):
    """Defaults of the namespace's RLJobs and RewardModels, over those of the installation. What an object sets itself
    takes precedence."""

    trainer_image: PathText | None = None
    """Image of heads, trainers, rollouts and vLLM's sidecars. Null: the installation's."""
    reward_image: PathText | None = None
    """Image of rewards and of what an agent calls. Null: the installation's."""
    python_images: dict[PythonVersion, PathText] = Field(default={}, max_length=8)
    """In the place of rewardImage, for what names this version in `python`; over the installation's."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Null: the installation's."""
    image_pull_secrets: list[LocalObjectReference] = Field(default=[], max_length=32)
    """In addition to those of the object and of the installation."""
    resources: PolicyResources = PolicyResources()
    reward_scratch_size: Quantity | None = None
    """Limit of each of a reward's two emptyDirs. Null: the installation's."""
    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that the nodes of all roles must have. Those of nodePools take precedence."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """Taints that the Pods of all roles tolerate, in addition."""
    node_pools: PolicyPools = PolicyPools()
    queue: ShortText | None = None
    """Kueue's LocalQueue of the namespace for jobs with neither spec.scheduling.gang nor queue: they get gang kueue.
    Null: none."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of all Pods. Null: the installation's."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of all Pods. Null: the installation's."""
    labels: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels of all Pods, such as a cost centre; over those of the installation."""
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(default={}, max_length=64)
    """Annotations of all Pods; over those of the installation."""
    log_format: LogFormat | None = None
    """Logs of the programs in the Pods: text, or json with one JSON object per line. Null: the installation's."""


class PolicyLimits(Spec):
    """What one RLJob or RewardModel of the namespace may ask for. They are checked when it starts, is resumed or
    retried, and when its spec changes, in the Pods as RLJob builds them, templates included. What runs when a limit is
    lowered keeps running. A ResourceQuota limits all objects of a namespace together."""

    gpus: int | None = Field(default=None, ge=0)
    """GPUs of all Pods of one object, with the most replicas that its autoscaling may choose: all extended resources
    (names with a domain other than kubernetes.io) but those of devices. Null: any number."""
    devices: list[ShortText] = Field(default=[], max_length=64)
    """Extended resources that do not count as GPUs, such as rdma/hca or vpc.amazonaws.com/efa."""
    rollout_replicas: int | None = Field(default=None, ge=0)
    """Most spec.rollout.replicas. Null: any number."""
    reward_replicas: int | None = Field(default=None, ge=0)
    """Most replicas, or autoscaling.maxReplicas, of one reward, RewardModel, user, tool or runner. Null: any number."""
    images: list[_ImageName] = Field(default=[], max_length=64)
    """Images that containers and image volumes may have: registry.example.com/team allows that name, with any tag or
    digest, and all below it. Those that are defaults of the namespace are always allowed. Empty: any."""
    node_labels: dict[str, _LabelValues] = Field(default={}, max_length=16)
    """Labels of nodes and their allowed values: each Pod must select one of them by its nodeSelector, in the role's
    nodePool or by a default. Empty: any nodes."""
    queues: list[ShortText] = Field(default=[], max_length=64)
    """Queues that jobs may use, also by a label or annotation of Kueue, Volcano, KAI or YuniKorn in a template; a job
    must then have one. RewardModels have none. Empty: any, or none."""
    priority_classes: list[ObjectName] = Field(default=[], max_length=64)
    """PriorityClasses that Pods may name, also by Kueue's label in a template. Empty: any."""
    template_fields: list[_TemplateField] | None = Field(default=None, max_length=64)
    """Fields that Pod templates may set, such as spec.containers or metadata.annotations; empty: none, so no template.
    Null: what the installation's template policy allows."""


class RLJobPolicySpec(Spec):
    """Defaults and limits."""

    defaults: PolicyDefaults = PolicyDefaults()
    limits: PolicyLimits = PolicyLimits()


class RLJobPolicy(Spec):
    """Defaults and limits for the RLJobs and RewardModels of its namespace. Its name is default."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("metadata.name",),
            f"must be {POLICY_NAME}: a namespace has one RLJobPolicy",
            f"rename it to {POLICY_NAME}",
            lambda policy: policy.metadata.name == POLICY_NAME,
            f"self.metadata.name == '{POLICY_NAME}'",
        ),
    )

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    kind: Literal["RLJobPolicy"] = "RLJobPolicy"
    metadata: ObjectMeta
    spec: RLJobPolicySpec
