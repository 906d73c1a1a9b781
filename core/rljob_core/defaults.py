"""What an administrator sets for the Pods of all jobs: the file of `--defaults`, which the chart writes.

A job's own fields take precedence. Invariant: a running job keeps the defaults that it started with.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rljob_api import __version__
from rljob_api.errors import UserError
from rljob_api.manifest.base import FreeForm, ObjectName, PathText, Spec
from rljob_api.manifest.pod_settings import LocalObjectReference
from rljob_api.manifest.policy import PolicyPools
from rljob_api.manifest.quantity import Quantity
from rljob_api.manifest.roles import LabelValue, Resources, Toleration
from rljob_api.manifest.services.base import PythonVersion
from rljob_api.read.documents import Problem, read_documents
from rljob_api.read.load import InvalidManifestError, read_section
from rljob_api.wire.logs import LogFormat


class _Section(Spec):
    """A part of the file. It is shared by all reconciles, so it never changes."""

    model_config = ConfigDict(frozen=True)


class PodSecurityContext(_Section):
    """Kubernetes' PodSecurityContext. A field that is null or left out is not set: the platform chooses."""

    run_as_non_root: bool | None = None
    run_as_user: int | None = Field(default=None, ge=0)
    run_as_group: int | None = Field(default=None, ge=0)
    fs_group: int | None = Field(default=None, ge=0)
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    supplemental_groups: list[int] | None = None
    seccomp_profile: FreeForm | None = None
    se_linux_options: FreeForm | None = None


_RESTRICTED = PodSecurityContext(
    run_as_non_root=True,
    run_as_user=1000,
    run_as_group=1000,
    fs_group=1000,
    fs_group_change_policy="OnRootMismatch",
    seccomp_profile={"type": "RuntimeDefault"},
)
"""Meets the `restricted` Pod Security Standard."""


def _request(memory: str, disk: str = "512Mi") -> Resources:
    """Little, so that jobs start on small nodes, and enough that they are not the first to be evicted (BestEffort) and
    have a share of a busy node's processors. GPUs, the scarce resource, are requested by the job. The disk is for logs;
    downloaded models and a run's files without a claim need more."""
    return Resources(requests={"cpu": "100m", "memory": memory, "ephemeral-storage": disk})


class RoleResources(_Section):
    """Requests and limits of a role's main container, by resource. A job's request or limit of a resource replaces
    both: a default request above a job's limit would be refused."""

    head: Resources = _request("512Mi")
    trainer: Resources = _request("1Gi")
    rollout: Resources = _request("1Gi")
    reward: Resources = _request("256Mi", "256Mi")
    """Also of the Pods of an agent's user, tools and runner, which run the same server."""
    vllm: Resources = _request("1Gi")
    """The sidecar that serves the model of a reward or a judge."""


def image_tag(version: str = __version__) -> str:
    """Return a package's version as a tag of images, a version of the chart (SemVer), and a value of labels:
    0.2.0.dev0+g1a2b3c4 is 0.2.0-dev.g1a2b3c4."""
    return re.sub(r"\.dev\d+", "-dev", version).replace("+", ".")


class Defaults(_Section):
    """Defaults for all jobs of an installation."""

    trainer_image: PathText = f"rljob/trainer:{image_tag()}"
    """Image of heads, trainers and rollouts: NAME:TAG or NAME@sha256:DIGEST."""
    reward_image: PathText = f"rljob/reward:{image_tag()}"
    python_images: dict[PythonVersion, PathText] = {"3.12": f"rljob/reward-py312:{image_tag()}"}
    """In the place of rewardImage, for what names this version in `python`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Null: Kubernetes' default for the tag."""
    image_pull_secrets: list[LocalObjectReference] = Field(default=[], max_length=32)
    """In addition to the job's. The Secrets must exist in the namespaces of the jobs."""
    resources: RoleResources = RoleResources()
    reward_scratch_size: Quantity = "20Gi"
    """Limit of each of a reward's two emptyDirs (scratch and /tmp), so that a function cannot fill the node's disk.
    A reward's own resources.limits.ephemeral-storage replaces it."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """In addition to those of the role's nodePool."""
    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """The labels of the role's nodePool take precedence."""
    node_pools: PolicyPools = PolicyPools()
    """Nodes by role, in addition: labels over those of nodeSelector, and tolerations. The role's own nodePool takes
    precedence."""
    priority_class_name: ObjectName | None = None
    runtime_class_name: ObjectName | None = None
    pod_security_context: PodSecurityContext = _RESTRICTED
    """Replaces the built-in one as a whole."""
    read_only_root_filesystem: bool = True
    """Whether heads, trainers, rollouts and vLLM's sidecars have one, with an emptyDir at /tmp, the home of the image.
    A role's template may set another value for its container. Reward servers always have it."""
    labels: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels of all Pods, such as a cost centre. RLJob's own labels and those of a role's template take precedence."""
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(default={}, max_length=64)
    log_format: LogFormat = "text"
    """text, or json: one JSON object per line, of the operator and of the programs in the Pods."""
    operator_namespace: ObjectName | None = None
    """Namespace from which the operator polls the drivers: their NetworkPolicies admit no other. Null: the operator's
    own. If that is unknown too, as outside a cluster, they admit the operator's label in any namespace."""

    def find_reward_image(self, python: PythonVersion | None) -> str:
        """Return the image with this Python. If there is none: rewardImage, whose server names the remedy."""
        return self.python_images.get(python, self.reward_image) if python else self.reward_image


DEFAULTS = Defaults()
"""Defaults of `rljob run`, `render` and `validate`, and of an operator without a file."""


def load_defaults(path: Path) -> Defaults:
    """Return the defaults in a YAML file, which may be empty. Raises UserError with all problems and their lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    documents, problems = read_documents(text)
    if len(documents) > 1:
        problems.append(Problem("", documents[1].line_of(()), "must be a single document; remove the others"))
    defaults: Defaults | None = DEFAULTS
    if documents and not problems:
        defaults, problems = read_section(Defaults, documents[0])
    if problems or defaults is None:
        raise InvalidManifestError(str(path), problems)
    return defaults
