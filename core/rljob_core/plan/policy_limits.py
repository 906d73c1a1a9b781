"""Whether an object stays within the limits of its namespace's RLJobPolicy. Pure.

Most limits are checked in the Pods as they would be built, so that a template cannot evade them. Invariant: an object
whose present spec has workloads was admitted before, and is not checked again: a lower limit stops nothing that runs.

Requests are what the scheduler counts. What is not requested counts as its limit, as the API server sets it. What a
template has of another type than Kubernetes, or a quantity that is none, counts as left out: the checks of Pod
templates, or a dry run, report it.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import POLICY_NAME, PolicyLimits, RLJobPolicy
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.quantity import format_bytes, parse_quantity
from rljob_api.read.documents import Location
from rljob_core.backend import Manifest, ObservedState, Owner
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.children.common import SANDBOX_POOL, SANDBOX_TEMPLATE
from rljob_core.children.gang import LABEL_KUEUE_QUEUE
from rljob_core.children.sandbox import count_episodes
from rljob_core.defaults import Defaults
from rljob_core.plan import conditions
from rljob_core.plan.conditions import find_running_generation
from rljob_core.plan.lifecycle import has_been_running
from rljob_core.plan.validate import find_role_paths
from rljob_core.pod_checks.origin import RolePath, find_origin

_IN_BYTES = ("memory", "ephemeral-storage", "hugepages-")
_OF_PODS = ("cpu", "memory")
_Amounts = Counter[str]
"""Amounts of resources by name; Decimal where they are fractions of a unit."""


def sum_requests(pods: Iterable[tuple[Manifest, int]]) -> dict[str, str]:
    """The requests of Pods, given by their spec and number, as a Kubernetes ResourceList."""
    total = _Amounts()
    for spec, number in pods:
        for name, amount in _requests_of_pod(spec).items():
            total[name] += amount * number
    return {name: _format(name, Decimal(amount)) for name, amount in sorted(total.items()) if amount}


def _requests_of_pod(spec: Manifest) -> _Amounts:
    """The containers and sidecars together, or an earlier moment of the start if that needs more."""
    sidecars, most = _Amounts(), _Amounts()
    for container in spec.get("initContainers") or []:
        requests = _requests_of_container(container)
        if container.get("restartPolicy") == "Always":
            sidecars += requests
            most |= sidecars
        else:
            most |= sidecars + requests
    for container in spec.get("containers") or []:
        sidecars += _requests_of_container(container)
    # Resources of the whole Pod count in place of its containers'. It has no other ones, such as GPUs.
    whole = {n: a for n, a in _requests_of_container(spec).items() if n in _OF_PODS or n.startswith("hugepages-")}
    return _Amounts({**(most | sidecars), **whole})


def _requests_of_container(container: Manifest) -> _Amounts:
    resources = _as_mapping(container.get("resources"))
    requests = _as_mapping(resources.get("limits")) | _as_mapping(resources.get("requests"))
    return _Amounts({name: parse_quantity(value) or 0 for name, value in requests.items()})


def _as_mapping(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}


def _format(name: str, amount: Decimal) -> str:
    if name.startswith(_IN_BYTES):
        return format_bytes(int(amount.to_integral_value()))
    is_whole = amount == amount.to_integral_value()
    return str(int(amount)) if is_whole else f"{int((amount * 1000).to_integral_value())}m"


_QUEUE_KEYS = (
    *(("labels", LABEL_KUEUE_QUEUE), ("annotations", "scheduling.volcano.sh/queue-name")),
    *(("labels", "kai.scheduler/queue"), ("labels", "runai/queue")),
    *(("labels", "queue"), ("annotations", "yunikorn.apache.org/queue")),
)
"""Where a Pod may name its queue, for Kueue, Volcano, KAI and YuniKorn."""
_PRIORITY_KEY = ("labels", "kueue.x-k8s.io/priority-class")
"""Kueue reads it before the Pod's PriorityClass."""

_NATIVE = re.compile(r"^([^/]+\.)?kubernetes\.io/")
"""Names of resources that are Kubernetes' own."""
EXEMPTS_DEFAULTS = ("images", "priorityClasses")
"""Limits that allow the defaults of the installation."""


class Violation(NamedTuple):
    """What an object asks for beyond a limit."""

    problem: str
    """The path, and what is wrong there."""
    limit: str
    """Its name in spec.limits."""
    remedy: str

    def describe(self, policy: str) -> str:
        return f"{self.problem} (spec.limits.{self.limit} of {policy}); {self.remedy}"


@dataclass(frozen=True)
class _Pods:
    """The Pods of one workload, as they would be built."""

    role: RolePath | None
    template: Manifest
    most: int
    """The largest number of replicas; of sandboxes, those of the episodes of a step and those that wait."""

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    def find_mark(self, part: str, key: str) -> Any:
        """Return a label or an annotation."""
        return _mapping(_mapping(self.template.get("metadata")).get(part)).get(key)

    def find_field(self, location: Location, fallback: str) -> str:
        """Return the path of the user's field behind a location of the template."""
        found = find_origin(self.role, self.template, location) if self.role else None
        return found or (f"{self.role.path}.{fallback}" if self.role else f"spec.{fallback}")


def is_admitted(owner: Owner, state: ObservedState) -> bool:
    """Whether the workloads of the present spec were created, so that no limit is checked again. A restart may have
    deleted those of a job that runs. What was refused for another reason may not have been checked."""
    type_ = conditions.FAILED if isinstance(owner, RLJob) else "Ready"
    condition = conditions.find(owner.status, type_)
    is_refused = condition is not None and condition.reason == conditions.REASON_INVALID_SPEC
    exists = any(key.kind in WORKLOAD_KINDS for key in state.children)
    exists = exists or (isinstance(owner, RLJob) and has_been_running(owner))
    generation = find_running_generation(owner) or owner.status.observed_generation
    return exists and not is_refused and generation == owner.metadata.generation


def find_policy_problems(
    owner: Owner, children: Iterable[Manifest], state: ObservedState, defaults: Defaults
) -> list[str]:
    """Why the object must not start: what it asks for beyond the limits, or a policy that cannot be read."""
    if is_admitted(owner, state):
        return []
    if state.policy_problem:
        return [state.policy_problem]
    return find_limit_problems(owner, children, state.policy, defaults) if state.policy else []


def find_limit_problems(
    owner: Owner, children: Iterable[Manifest], policy: RLJobPolicy, defaults: Defaults
) -> list[str]:
    """All violations of the policy, each with path, limit and remedy. `children`: as built with `defaults`, which
    contain the policy's own."""
    where = f"RLJobPolicy {owner.metadata.namespace}/{POLICY_NAME}"
    return [each.describe(where) for each in find_violations(owner, children, policy.spec.limits, defaults)]


def find_violations(
    owner: Owner, children: Iterable[Manifest], limits: PolicyLimits, defaults: Defaults
) -> list[Violation]:
    """The same, each with the name of its limit."""
    if isinstance(owner, RewardModel) and not owner.spec.is_served:
        return []  # it has no Pods
    pods = _list_pods(owner, children)
    found = [
        *_check_replicas(owner, limits),
        *_check_gpus(pods, limits),
        *_check_images(pods, limits, {defaults.trainer_image, defaults.reward_image, *defaults.python_images.values()}),
        *_check_nodes(pods, limits),
        *_check_queue(owner, pods, limits),
        *_check_priorities(pods, limits, defaults.priority_class_name),
        *_check_templates(owner, limits),
    ]
    return [Violation(*each) for each in dict.fromkeys(found)]


_Problem = tuple[str, str, str]
"""A Violation's fields."""


def _list_pods(owner: Owner, children: Iterable[Manifest]) -> list[_Pods]:
    roles, pods, children = find_role_paths(owner), [], list(children)
    pools = {child["metadata"]["name"]: child for child in children if child["kind"] == SANDBOX_POOL}
    for child in children:
        name = child["metadata"]["name"]
        if child["kind"] in WORKLOAD_KINDS:
            pods.append(_Pods(roles.get(name), child["spec"]["template"], _count_most(child, roles.get(name))))
        elif child["kind"] == SANDBOX_TEMPLATE and isinstance(owner, RLJob):
            most = count_episodes(owner) + pools[name]["spec"]["replicas"]
            pods.append(_Pods(roles.get(name), child["spec"]["podTemplate"], most))
    return pods


def _count_most(workload: Manifest, role: RolePath | None) -> int:
    settings = role.role if role else None
    if isinstance(settings, ServiceSettings) and settings.autoscaling:
        return settings.autoscaling.max_replicas
    return int(workload["spec"].get("replicas", 1))


def _check_replicas(owner: Owner, limits: PolicyLimits) -> Iterator[_Problem]:
    remedy = "lower it"
    if isinstance(owner, RLJob) and limits.rollout_replicas is not None and not owner.spec.shares_trainer:
        number = owner.spec.rollout.replicas
        if number > limits.rollout_replicas:
            message = f"spec.rollout.replicas must be at most {limits.rollout_replicas}, got {number}"
            yield message, "rolloutReplicas", remedy
    for each in find_role_paths(owner).values():
        if not isinstance(each.role, ServiceSettings) or limits.reward_replicas is None:
            continue
        autoscaling = each.role.autoscaling
        field, number = (
            ("autoscaling.maxReplicas", autoscaling.max_replicas) if autoscaling else ("replicas", each.role.replicas)
        )
        if number > limits.reward_replicas:
            message = f"{each.path}.{field} must be at most {limits.reward_replicas}, got {number}"
            yield message, "rewardReplicas", remedy


def _check_gpus(pods: list[_Pods], limits: PolicyLimits) -> Iterator[_Problem]:
    if limits.gpus is None:
        return
    numbers = Counter[str]()
    for each in pods:
        if number := _count_gpus(each, limits.devices):
            numbers[each.role.path if each.role else ""] += number
    if (total := sum(numbers.values())) > limits.gpus:
        parts = ", ".join(f"{path} {number}" for path, number in numbers.items())
        message = f"spec must ask for at most {limits.gpus} GPUs, got {total} ({parts})"
        yield message, "gpus", "lower replicas, maxReplicas or gpusPerReplica"


def _count_gpus(pods: _Pods, devices: Collection[str]) -> int:
    """All extended resources: device plugins give GPUs, and parts of GPUs, any name."""
    requests = sum_requests([(pods.spec, pods.most)])
    return sum(
        int(amount)
        for name, amount in requests.items()
        if amount.isdigit() and "/" in name and name not in devices and not _NATIVE.search(name)
    )


def _check_images(pods: list[_Pods], limits: PolicyLimits, own: set[str]) -> Iterator[_Problem]:
    if not limits.images:
        return
    allowed = " or ".join(limits.images)
    for each in pods:
        for location, image in _find_images(each.spec):
            if image not in own and not any(_is_below(image, name) for name in limits.images):
                field = each.find_field(location, "template")
                yield f"{field} must begin with {allowed}, got {image}", "images", "use an image from there"


def _find_images(spec: Manifest) -> Iterator[tuple[Location, str]]:
    for part in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(part) or []):
            yield ("spec", part, index, "image"), str(container.get("image"))
    for index, volume in enumerate(spec.get("volumes") or []):
        if reference := _mapping(volume.get("image")).get("reference"):
            yield ("spec", "volumes", index, "image", "reference"), str(reference)


def _is_below(image: str, name: str) -> bool:
    """Whether an image has this name, or one below it. registry.io/a is not below registry.io/ab, nor is a port."""
    name = name.rstrip("/")
    rest = image.removeprefix(name)
    if rest == image or ".." in rest.split("/"):
        return False
    return not rest or rest[0] in "/@" or (rest[0] == ":" and "/" not in rest)


def _check_nodes(pods: list[_Pods], limits: PolicyLimits) -> Iterator[_Problem]:
    for each in pods:
        selector = _mapping(each.spec.get("nodeSelector"))
        for key, values in limits.node_labels.items():
            if (value := selector.get(key)) not in values:
                field = each.find_field(("spec", "nodeSelector", key), f"nodePool.nodeSelector.{key}")
                got = value if key in selector else "none"
                yield (
                    f"{field} must be one of {', '.join(values)}, got {got}",
                    "nodeLabels",
                    "select these nodes",
                )


def _check_queue(owner: Owner, pods: list[_Pods], limits: PolicyLimits) -> Iterator[_Problem]:
    if not limits.queues:
        return
    allowed, remedy = ", ".join(limits.queues), "set spec.scheduling.gang and queue"
    queue = owner.spec.scheduling.queue if isinstance(owner, RLJob) else None
    if isinstance(owner, RLJob) and queue not in limits.queues:
        yield f"spec.scheduling.queue must be one of {allowed}, got {queue or 'none'}", "queues", remedy
    for each in pods:
        for part, key in _QUEUE_KEYS:
            name = each.find_mark(part, key)
            if name not in (None, queue, *limits.queues):
                field = each.find_field(("metadata", part, key), f"template.metadata.{part}")
                yield f"{field} must be one of {allowed}, got {name}", "queues", "remove it, or name one of these"


def _check_priorities(pods: list[_Pods], limits: PolicyLimits, default: str | None) -> Iterator[_Problem]:
    allowed = limits.priority_classes
    for each in pods:
        named: list[tuple[Location, Any]] = [(("spec", "priorityClassName"), each.spec.get("priorityClassName"))]
        named.append((("metadata", *_PRIORITY_KEY), each.find_mark(*_PRIORITY_KEY)))
        for location, name in named if allowed else []:
            if name and name not in (default, *allowed):
                field = each.find_field(location, "template." + ".".join(map(str, location)))
                message = f"{field} must be one of {', '.join(allowed)}, got {name}"
                yield message, "priorityClasses", "use such a class, or none"


def _check_templates(owner: Owner, limits: PolicyLimits) -> Iterator[_Problem]:
    if limits.template_fields is None:
        return
    allowed = ", ".join(limits.template_fields) or "no field"
    for each in find_role_paths(owner).values():
        for part, fields in each.role.template.items():
            for field in _mapping(fields) or [""]:
                if f"{part}.{field}" not in limits.template_fields:
                    path = f"{each.path}.template.{part}.{field}".rstrip(".")
                    yield f"{path} is not allowed: templates may set {allowed}", "templateFields", "remove it"


def _mapping(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}
