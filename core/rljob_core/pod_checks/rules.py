"""What the API server checks in a Pod template beyond types: formats of values, and relations between fields.

Two tables. FORMATS checks single values; RELATIONS checks mappings and lists. In their paths `*` is every entry of a
list or mapping, `~` is every key, and a leading `C` is every container. Rules that need the cluster (admission,
classes, quotas) are left to it. Invariant: no rule is stricter than the API server; a test compares them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rljob_api.read.documents import Location
from rljob_core.pod_checks import formats
from rljob_core.pod_checks.formats import Format, between, one_of
from rljob_core.pod_checks.resources import check_resources
from rljob_core.pod_checks.schema import Violation

_CONTAINER_LISTS = ("spec.containers.*", "spec.initContainers.*")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
_HOOKS = ("postStart", "preStop")
_OPERATORS = one_of("In", "NotIn", "Exists", "DoesNotExist")
_NODE_OPERATORS = one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_AFFINITIES = tuple(
    f"spec.affinity.{kind}.{when}"
    for kind in ("podAffinity", "podAntiAffinity")
    for when in (
        "requiredDuringSchedulingIgnoredDuringExecution.*",
        "preferredDuringSchedulingIgnoredDuringExecution.*.podAffinityTerm",
    )
)
_SELECTORS = (*(f"{term}.labelSelector" for term in _AFFINITIES), "spec.topologySpreadConstraints.*.labelSelector")
_NODE_TERMS = (
    "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.*",
    "spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution.*.preference",
)


def _each(paths: Iterable[str], *fields: str) -> tuple[str, ...]:
    return tuple(f"{path}.{field}" for path in paths for field in fields)


FORMATS: tuple[tuple[tuple[str, ...], Format], ...] = (
    (("metadata.labels.~", "metadata.annotations.~", "spec.nodeSelector.~"), formats.is_qualified_name),
    (("metadata.labels.*", "spec.nodeSelector.*"), formats.is_label_value),
    (_each(_SELECTORS, "matchLabels.~", "matchExpressions.*.key"), formats.is_qualified_name),
    (_each(_SELECTORS, "matchLabels.*"), formats.is_label_value),
    (_each(_SELECTORS, "matchExpressions.*.operator"), _OPERATORS),
    (_each(_NODE_TERMS, "matchExpressions.*.key"), formats.is_qualified_name),
    (_each(_NODE_TERMS, "matchExpressions.*.operator"), _NODE_OPERATORS),
    (_each(_AFFINITIES, "topologyKey"), formats.is_qualified_name),
    (("spec.affinity.*.preferredDuringSchedulingIgnoredDuringExecution.*.weight",), between(1, 100)),
    (("C.name", "spec.volumes.*.name"), formats.is_dns_label),
    (("C.image",), formats.is_image),
    (("C.imagePullPolicy",), one_of("Always", "IfNotPresent", "Never")),
    (("C.terminationMessagePolicy",), one_of("File", "FallbackToLogsOnError")),
    (("C.env.*.name",), formats.is_env_name),
    (("C.env.*.valueFrom.configMapKeyRef.key", "C.env.*.valueFrom.secretKeyRef.key"), formats.is_config_key),
    (("C.env.*.valueFrom.configMapKeyRef.name", "C.env.*.valueFrom.secretKeyRef.name"), formats.is_subdomain),
    (("C.env.*.valueFrom.fieldRef.fieldPath",), formats.is_field_path),
    (("C.ports.*.containerPort", "C.ports.*.hostPort"), between(1, 65535)),
    (("C.ports.*.name",), formats.is_port_name),
    (("C.ports.*.protocol",), one_of("TCP", "UDP", "SCTP")),
    (("C.resources.limits.*", "C.resources.requests.*"), formats.is_quantity),
    (("C.volumeMounts.*.mountPath",), formats.is_not_blank),
    (("C.volumeMounts.*.subPath",), formats.is_sub_path),
    (("C.securityContext.runAsUser", "spec.securityContext.runAsUser"), between(0, 2**31 - 1)),
    (("C.securityContext.runAsGroup", "spec.securityContext.runAsGroup"), between(0, 2**31 - 1)),
    (("spec.securityContext.fsGroup", "spec.securityContext.supplementalGroups.*"), between(0, 2**31 - 1)),
    (("spec.securityContext.fsGroupChangePolicy",), one_of("OnRootMismatch", "Always")),
    (
        _each(("C.securityContext", "spec.securityContext"), "seccompProfile.type"),
        one_of("RuntimeDefault", "Unconfined", "Localhost"),
    ),
    (tuple(f"C.{probe}.httpGet.port" for probe in _PROBES), formats.is_port),
    (tuple(f"C.{probe}.tcpSocket.port" for probe in _PROBES), formats.is_port),
    (_each((f"C.{probe}" for probe in _PROBES), "initialDelaySeconds", "timeoutSeconds", "periodSeconds"), between(0)),
    (_each((f"C.{probe}" for probe in _PROBES), "failureThreshold", "successThreshold"), between(0)),
    (("spec.volumes.*.emptyDir.sizeLimit",), formats.is_quantity),
    (("spec.volumes.*.persistentVolumeClaim.claimName",), formats.is_not_blank),
    (("spec.volumes.*.hostPath.path",), formats.is_not_blank),
    (("spec.tolerations.*.effect",), one_of("", "NoSchedule", "PreferNoSchedule", "NoExecute")),
    (("spec.tolerations.*.value",), formats.is_label_value),
    (("spec.dnsPolicy",), one_of("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None")),
    (("spec.priorityClassName", "spec.serviceAccountName", "spec.runtimeClassName"), formats.is_subdomain),
    (("spec.hostname", "spec.subdomain"), formats.is_dns_label),
    (("spec.topologySpreadConstraints.*.maxSkew",), between(1)),
    (("spec.topologySpreadConstraints.*.topologyKey",), formats.is_qualified_name),
    (("spec.topologySpreadConstraints.*.whenUnsatisfiable",), one_of("DoNotSchedule", "ScheduleAnyway")),
    (("spec.schedulingGates.*.name",), formats.is_qualified_name),
)
"""Paths and what their values must be. Absent values pass."""

_MAY_BE_EMPTY = {
    *("imagePullPolicy", "terminationMessagePolicy", "protocol", "priorityClassName", "serviceAccountName", "hostname"),
    *("subdomain", "subPath", "dnsPolicy", "runtimeClassName", "image"),
}
"""Fields for which the API server takes empty text as absent."""

Relation = Callable[[Any], Iterator[Violation]]


def _has_image(container: Mapping[str, Any]) -> Iterator[Violation]:
    if not container.get("image"):
        yield ("image",), "is required: the template adds this container, or removes its image; set image"


def _has(name: str) -> Relation:
    def check(holder: Mapping[str, Any]) -> Iterator[Violation]:
        if not holder.get(name):
            yield (name,), "is required"

    return check


def _has_one_of(*names: str) -> Relation:
    def check(holder: Mapping[str, Any]) -> Iterator[Violation]:
        found = [name for name in names if name in holder]
        if len(found) != 1:
            got = " and ".join(found) or "none"
            yield (), f"must have exactly one of {', '.join(names)}, got {got}"

    return check


def _has_one_source(volume: Mapping[str, Any]) -> Iterator[Violation]:
    # A volume without a source is an empty directory for the API server.
    sources = [name for name in volume if name != "name"]
    if len(sources) > 1:
        yield (), f"must have one kind of volume, got {' and '.join(sources)}; remove one"


def _has_one_value(variable: Mapping[str, Any]) -> Iterator[Violation]:
    if variable.get("value") and "valueFrom" in variable:
        yield (), "must have value or valueFrom, got both; remove one"


def _is_unique(key: str) -> Relation:
    def check(entries: list[Mapping[str, Any]]) -> Iterator[Violation]:
        seen = set()
        for index, entry in enumerate(entries):
            value = entry.get(key)
            if value and value in seen:
                yield (index, key), f"must be unique, got {value} twice"
            seen.add(value)

    return check


def _check_toleration(toleration: Mapping[str, Any]) -> Iterator[Violation]:
    key, operator = toleration.get("key"), toleration.get("operator") or "Equal"
    if operator not in ("Equal", "Exists", "Lt", "Gt"):
        yield ("operator",), f"must be Equal or Exists, got {operator}"
    if key and (message := formats.is_qualified_name(key)):
        yield ("key",), f"{message}, got {key}"
    if not key and operator != "Exists":
        yield ("operator",), "must be Exists without a key; set key, or operator: Exists for every taint"
    if operator == "Exists" and toleration.get("value"):
        yield ("value",), "must be unset when operator is Exists; remove value, or set operator: Equal"
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield ("effect",), "must be NoExecute with tolerationSeconds; remove tolerationSeconds, or set the effect"


def _check_expression(expression: Mapping[str, Any]) -> Iterator[Violation]:
    operator, values = expression.get("operator"), expression.get("values") or []
    if operator in ("In", "NotIn") and not values:
        yield ("values",), f"must have a value for {operator}"
    if operator in ("Exists", "DoesNotExist") and values:
        yield ("values",), f"must be empty for {operator}"
    if operator in ("Gt", "Lt") and len(values) != 1:
        yield ("values",), f"must have exactly one value for {operator}"


def _has_terms(selector: Mapping[str, Any]) -> Iterator[Violation]:
    if not selector.get("nodeSelectorTerms"):
        yield ("nodeSelectorTerms",), "must have at least one term"


def _check_privileges(container: Mapping[str, Any]) -> Iterator[Violation]:
    security = container.get("securityContext") or {}
    if security.get("allowPrivilegeEscalation") is not False:
        return
    where = ("securityContext", "allowPrivilegeEscalation")
    fix = "must be true: RLJob sets it to false, which excludes"
    if security.get("privileged"):
        yield where, f"{fix} privileged"
    if "CAP_SYS_ADMIN" in ((security.get("capabilities") or {}).get("add") or []):
        yield where, f"{fix} CAP_SYS_ADMIN"


def _check_seccomp(security: Mapping[str, Any]) -> Iterator[Violation]:
    profile = security.get("seccompProfile") or {}
    if (profile.get("type") == "Localhost") != bool(profile.get("localhostProfile")):
        yield ("seccompProfile", "localhostProfile"), "must be set for type Localhost, and for no other type"


def _check_success_threshold(probe: Mapping[str, Any]) -> Iterator[Violation]:
    if probe.get("successThreshold", 1) not in (0, 1):
        yield ("successThreshold",), f"must be 1, got {probe['successThreshold']}"


def _check_pod(spec: Mapping[str, Any]) -> Iterator[Violation]:
    lists = ("containers", "initContainers")
    containers = [(kind, entry) for kind in lists for entry in enumerate(spec.get(kind) or [])]
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    names = set()
    for kind, (index, container) in containers:
        name = container.get("name")
        if name and name in names:
            yield (kind, index, "name"), f"must be unique, got {name} twice"
        names.add(name)
        for place, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in volumes:
                message = f"must be a volume of the Pod, got {mount.get('name')}; add it to spec.volumes"
                yield (kind, index, "volumeMounts", place, "name"), message
    if spec.get("dnsPolicy") == "None" and not (spec.get("dnsConfig") or {}).get("nameservers"):
        yield ("dnsPolicy",), "must have name servers with None; set dnsConfig.nameservers"
    if spec.get("ephemeralContainers"):
        yield ("ephemeralContainers",), "is not allowed in a Pod template; remove it"
    if "activeDeadlineSeconds" in spec and spec.get("restartPolicy") == "Always":
        yield ("activeDeadlineSeconds",), "is not allowed here; use spec.activeDeadlineSeconds of the job"
    if spec.get("nodeName") and spec.get("schedulingGates"):
        yield (
            ("nodeName",),
            "must not be set with scheduling gates; use nodePool.nodeSelector, or scheduling.gang: none",
        )


RELATIONS: tuple[tuple[tuple[str, ...], Relation], ...] = (
    (("spec",), _check_pod),
    (("C",), _has_image),
    (("C",), _check_privileges),
    (("C.securityContext", "spec.securityContext"), _check_seccomp),
    (("C.resources",), check_resources),
    (("C.env.*",), _has_one_value),
    (
        ("C.env.*.valueFrom",),
        _has_one_of("configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"),
    ),
    (("C.envFrom.*",), _has_one_of("configMapRef", "secretRef")),
    (("C.volumeMounts",), _is_unique("mountPath")),
    (("C.ports",), _is_unique("name")),
    (tuple(f"C.{probe}" for probe in _PROBES), _has_one_of(*_HANDLERS)),
    (("C.livenessProbe", "C.startupProbe"), _check_success_threshold),
    (tuple(f"C.lifecycle.{hook}" for hook in _HOOKS), _has_one_of("exec", "httpGet", "tcpSocket", "sleep")),
    (("spec.volumes",), _is_unique("name")),
    (("spec.volumes.*.configMap", "spec.volumes.*.projected.sources.*.configMap"), _has("name")),
    (("spec.volumes.*.secret",), _has("secretName")),
    (("spec.volumes.*",), _has_one_source),
    (("spec.tolerations.*",), _check_toleration),
    (_each((*_SELECTORS, *_NODE_TERMS), "matchExpressions.*"), _check_expression),
    (("spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",), _has_terms),
)
"""Paths and the relations that must hold there."""


class _Place:
    """A place in a template: the rules for what is there, by their order in the tables, and the places in it."""

    def __init__(self) -> None:
        self.rules: list[tuple[int, Relation]] = []
        self.inner: dict[str, _Place] = {}

    def add(self, path: str, order: int, rule: Relation) -> None:
        place = self
        for part in path.split("."):
            place = place.inner.setdefault(part, _Place())
        place.rules.append((order, rule))


def _as_relation(path: str, check: Format) -> Relation:
    may_be_empty = path.rpartition(".")[2] in _MAY_BE_EMPTY

    def relate(value: Any) -> Iterator[Violation]:
        if not (value == "" and may_be_empty) and (message := check(value)):
            yield (), f"{message}, got {value}"

    return relate


def _build_root() -> _Place:
    """All paths of the tables as one tree, so that a template is walked once."""
    formats_of = [(path, _as_relation(path, check)) for paths, check in FORMATS for path in paths]
    relations = [(path, relate) for paths, relate in RELATIONS for path in paths]
    root = _Place()
    for order, (path, rule) in enumerate([*formats_of, *relations]):
        is_of_container = path == "C" or path.startswith("C.")
        for start in _CONTAINER_LISTS if is_of_container else ("",):
            root.add(f"{start}{path[1:]}" if is_of_container else path, order, rule)
    return root


_ROOT = _build_root()


def find_rule_violations(template: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what the tables refuse, in their order. The types must be valid at the places that matter to the caller."""
    found = sorted(_walk(template, _ROOT, ()), key=lambda entry: entry[0])
    yield from (violation for _, violation in found)


def _walk(value: Any, place: _Place, location: Location) -> Iterator[tuple[int, Violation]]:
    for order, rule in place.rules:
        yield from ((order, ((*location, *inner), message)) for inner, message in rule(value))
    for part, inner in place.inner.items():
        if part == "~":
            for key in value or {}:
                yield from _walk(key, inner, (*location, key))
        elif part == "*":
            entries = value.items() if isinstance(value, dict) else enumerate(value or [])
            for key, entry in entries:
                if entry is not None:  # an empty entry of a list: the API server decides
                    yield from _walk(entry, inner, (*location, key))
        elif isinstance(value, dict) and part in value:
            yield from _walk(value[part], inner, (*location, part))
