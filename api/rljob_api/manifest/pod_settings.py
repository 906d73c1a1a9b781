"""Fields for all Pods of an RLJob or of a RewardModel, under the names that Kubernetes' PodSpec gives them."""

from pydantic import Field

from rljob_api.manifest.base import ObjectName, Spec


class LocalObjectReference(Spec):
    """Kubernetes' LocalObjectReference."""

    name: ObjectName
    """Name of the Secret, in the object's namespace."""


class PodSettings(Spec):
    """Fields of all Pods. A role's `template` takes precedence. A change replaces the Pods."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of all Pods, for scheduling and preemption. Null: the installation's default, or the cluster's."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of all Pods, such as gvisor or nvidia. Null: the installation's default, or the cluster's."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of all Pods, for its image pull secrets and for policies that refer to it. No token is mounted
    unless a role's template sets automountServiceAccountToken. Null: the namespace's `default`."""
    image_pull_secrets: list[LocalObjectReference] = Field(default=[], max_length=32)
    """Secrets for pulling the images of all Pods, in addition to those of the installation."""


POD_SETTINGS = frozenset(PodSettings.model_fields)
"""Python names of the fields."""
