"""The kinds that the operator reads and writes, and their API paths. Pure."""

from dataclasses import dataclass

from rljob_api import API_VERSION
from rljob_api.wire.contract import LABEL_MANAGED_BY, MANAGED_BY


@dataclass(frozen=True)
class Resource:
    kind: str
    api_version: str
    plural: str
    label_selector: str | None = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
    """With field_selector: which objects are listed and watched. Children have the operator's label."""
    field_selector: str | None = None
    is_optional: bool = False
    """Its CRD, or RBAC for it, may be missing in a cluster: listed and watched only if it exists."""
    remedy: str = ""
    """If it is optional: what to do where its CRD is missing."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def describe_missing_kind(self) -> str:
        """Return what to do where its CRD is missing."""
        return f"this cluster has no {self.kind} of {self.api_version}; {self.remedy}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return '/apis/batch/v1/namespaces/ns/jobs/name/status'. Without a namespace it is that of all namespaces."""
        parts = ["apis", self.api_version] if self.group else ["api", self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(parts)


RLJOB = Resource("RLJob", API_VERSION, "rljobs", label_selector=None)
REWARD_MODEL = Resource("RewardModel", API_VERSION, "rewardmodels", label_selector=None)
POLICY = Resource("RLJobPolicy", API_VERSION, "rljobpolicies", label_selector=None)
POD = Resource("Pod", "v1", "pods")
EVENT = Resource("Event", "v1", "events", label_selector=None, field_selector="type=Warning")
CLAIM = Resource("PersistentVolumeClaim", "v1", "persistentvolumeclaims", label_selector=None)
"""Read to find out whether it exists; neither cached nor watched."""
CHILDREN = (
    Resource("Secret", "v1", "secrets"),
    Resource("ConfigMap", "v1", "configmaps"),
    Resource("Service", "v1", "services"),
    Resource("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
    Resource("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
    Resource("Job", "batch/v1", "jobs"),
    Resource("StatefulSet", "apps/v1", "statefulsets"),
    Resource("Deployment", "apps/v1", "deployments"),
)
_SANDBOX_API = "extensions.agents.x-k8s.io/v1beta1"
_SANDBOX_REMEDY = (
    "install kubernetes-sigs/agent-sandbox with its extensions, or set sandbox.provider: process in spec.agent.tools"
)
SANDBOXES = (
    Resource("ServiceAccount", "v1", "serviceaccounts", is_optional=True),
    Resource("Role", "rbac.authorization.k8s.io/v1", "roles", is_optional=True),
    Resource("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings", is_optional=True),
    Resource("SandboxTemplate", _SANDBOX_API, "sandboxtemplates", is_optional=True, remedy=_SANDBOX_REMEDY),
    Resource("SandboxWarmPool", _SANDBOX_API, "sandboxwarmpools", is_optional=True, remedy=_SANDBOX_REMEDY),
)
"""Resources of tools with provider agentSandbox."""
# Owners first: objects that are listed later refer to those listed earlier.
WATCHED = (POLICY, RLJOB, REWARD_MODEL, *CHILDREN, *SANDBOXES, POD, EVENT)
BY_KIND = {resource.kind: resource for resource in WATCHED}
