"""Generate the CustomResourceDefinitions: convert pydantic's JSON schema to Kubernetes' structural schema.

Invariant: the API server stores no defaults, except for the replicas that the subresource scale reads; the operator
applies the others. A stored default would be of the version that stored it, and part of each object.

A CRD is kept short enough for `kubectl apply`, which stores the whole manifest in an annotation. A structural schema
has no references: a type that ten fields have is ten times in it. Invariant: each description is whole once, where it
comes first, and elsewhere its first sentence; of the values of a list or a map, a description of one sentence is left
out elsewhere. docs/reference.md is complete.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from rljob_api import __version__
from rljob_api.generate.cel_defaults import fill_defaults
from rljob_api.manifest.base import PRESERVE, Spec
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import ANNOTATION_CRD_VERSION, API_GROUP, API_VERSION

Schema = dict[str, Any]
Kind = type[RLJob] | type[RewardModel] | type[RLJobPolicy]
KINDS: tuple[Kind, ...] = (RLJob, RewardModel, RLJobPolicy)
"""What has a CRD."""

_HEADER = "# Generated from api/rljob_api by `make generate`; edit the types there.\n"
_LIST_TYPE = "x-kubernetes-list-type"
_COPIED = (
    *("type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("maxProperties", "default", _LIST_TYPE, "x-kubernetes-list-map-keys", PRESERVE, "x-kubernetes-map-type"),
)
_RULES = "x-kubernetes-validations"
_INT_OR_STRING = "x-kubernetes-int-or-string"
_MAX_INT32 = 2**31 - 1


class _Generator(GenerateJsonSchema):
    """Writes null as `nullable` and the rules of a type as CEL."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return {**super().model_schema(schema), _RULES: _build_rules(schema["cls"])}

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value  # keep the order in which the types declare their fields


def _build_rules(part: type[Spec]) -> list[Schema]:
    """Return the rules of a type as CEL, with field paths, so that kubectl shows which field is invalid."""
    constraints = [(rule.fields[0], f"{rule.message}; {rule.remedy}", rule.cel) for rule in part.RULES if rule.cel]
    constraints += [(rule.field, rule.message, rule.cel) for rule in part.CLUSTER_RULES]
    return [
        {
            "rule": fill_defaults(cel, part),
            "message": f"{field} {message}".strip(),
            **({"fieldPath": f".{field}"} if field else {}),
        }
        for field, message, cel in constraints
    ]


def _convert(node: Schema, defs: dict[str, Schema]) -> Schema:
    """Convert one node. A field's description and default override those of its type."""
    if "$ref" in node:
        node = {**defs[node["$ref"].rpartition("/")[2]], **node}
    result: Schema = {}
    if "description" in node:
        result["description"] = " ".join(node["description"].split())
    if node.get(_INT_OR_STRING):
        copied = ("anyOf", "maxLength", "pattern", "default", _INT_OR_STRING)
        return result | {key: node[key] for key in copied if node.get(key) is not None}
    if "const" in node:
        node = {**node, "enum": [node["const"]]}
    result |= {key: node[key] for key in _COPIED if key in node and not (key == "default" and node[key] is None)}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            result |= {bound: node[exclusive], exclusive: True}
    if node.get("type") == "integer":
        result["format"] = "int32" if node.get("maximum", _MAX_INT32 + 1) <= _MAX_INT32 else "int64"
    elif node.get("type") == "array":
        result["items"] = _convert(node["items"], defs)
        result.setdefault(_LIST_TYPE, "atomic")
    elif "properties" in node:
        if "default" in result:
            result["default"] = {}  # the API server fills in the defaults of the fields
        result["properties"] = {key: _convert(value, defs) for key, value in node["properties"].items()}
        result |= {key: node[key] for key in ("required", _RULES) if node.get(key)}
    elif isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = _convert(node["additionalProperties"], defs)
    # An enum would have to list null. To set such a field to null, leave it out.
    return result | ({"nullable": True} if node.get("nullable") and "enum" not in node else {})


def build_object_schema(model: Kind) -> Schema:
    """Return the structural schema of a kind. Of metadata, only the name is constrained."""
    schema = model.model_json_schema(by_alias=True, schema_generator=_Generator)
    converted = _convert(schema, schema["$defs"])
    properties = converted["properties"]
    name = properties["metadata"]["properties"]["name"]
    return {
        "description": converted["description"],
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {key: name[key] for key in ("type", "maxLength", "pattern")}},
            },
            "spec": properties["spec"],
            **({"status": _without_defaults(properties["status"])} if "status" in properties else {}),
        },
        **({_RULES: converted[_RULES]} if _RULES in converted else {}),
    }


def _without_defaults(node: Schema) -> Schema:
    """Remove defaults: a status must contain only observed values."""
    result = {key: value for key, value in node.items() if key != "default"}
    if "properties" in result:
        result["properties"] = {key: _without_defaults(value) for key, value in result["properties"].items()}
    if "items" in result:
        result["items"] = _without_defaults(result["items"])
    return result


def _describe_defaults(node: Schema, stored: tuple[str, ...]) -> Schema:
    """Name the defaults in the descriptions instead. `stored`: the path of the field whose default stays."""
    result = dict(node)
    if "properties" in node:
        fields = node["properties"].items()
        result["properties"] = {name: _describe_default(field, name, stored) for name, field in fields}
    if "items" in node:
        result["items"] = _describe_defaults(node["items"], ())
    return result


def _describe_default(node: Schema, name: str, stored: tuple[str, ...]) -> Schema:
    is_stored = stored[:1] == (name,)
    result = _describe_defaults(node, stored[1:] if is_stored else ())
    if is_stored or "default" not in node:
        return result
    default = result.pop("default")
    if default != {}:
        text = f"Default: {json.dumps(default, ensure_ascii=False)}."
        result["description"] = f"{result.get('description', '')} {text}".strip()
    return result


def _column(name: str, kind: str, path: str, description: str = "", *, is_wide: bool = False) -> Schema:
    """Return a printer column. With `is_wide`, only `kubectl get -o wide` shows it."""
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"description": description} if description else {}) | ({"priority": 1} if is_wide else {})


_AGE = _column("Age", "date", ".metadata.creationTimestamp")
_STALENESS_MEANING = "Of the oldest token that is not trained yet, in steps"
_BUSY_MEANING = "Share of the last step in which each role worked"
_PROGRESS_REASON = '.status.conditions[?(@.type=="Progressing")].reason'
_JOB_COLUMNS = [
    _column("Phase", "string", ".status.phase"),
    _column("Step", "integer", ".status.progress.step", "Completed optimizer steps"),
    _column("Last Step", "date", ".status.progress.lastStepTime", "Age of the last step"),
    _column("Reward", "number", ".status.progress.reward", "Mean score of the last step"),
    _column("Rollouts", "string", ".status.rollouts", "Rollout replicas, ready/desired"),
    _column("Rewards", "string", ".status.rewards", "Reward Pods, ready/desired"),
    _column("Schedule", "string", ".status.progress.schedule.type", is_wide=True),
    _column("Staleness", "integer", ".status.progress.schedule.staleness", _STALENESS_MEANING, is_wide=True),
    _column("Busy", "string", ".status.progress.schedule.busy", _BUSY_MEANING, is_wide=True),
    _column("Progress", "string", _PROGRESS_REASON, "Why steps finish, or do not", is_wide=True),
    _column("Waits For", "string", ".status.progress.waitsFor", is_wide=True),
    _AGE,
]
_CONDITION = '.status.conditions[?(@.type=="%s")].status'
_P95_MEANING = "95th percentile of the execution time of recent samples, in seconds"
_REWARD_COLUMNS = [
    _column("Ready", "string", _CONDITION % "Ready"),
    _column("Replicas", "integer", ".status.replicas"),
    _column("P95", "number", ".status.latencyP95Seconds", _P95_MEANING),
    _column("Updating", "string", _CONDITION % "Updating", "Whether Pods run different versions", is_wide=True),
    _column("Endpoint", "string", ".status.endpoints[0]", "Address of the service", is_wide=True),
    _column("Scaled", "string", ".status.scaling.message", "Reason for the current number of replicas", is_wide=True),
    _AGE,
]
_JOB_SCALE = {
    "specReplicasPath": ".spec.rollout.replicas",
    "statusReplicasPath": ".status.rolloutReplicas",
    "labelSelectorPath": ".status.rolloutSelector",
}
"""Rollouts are the role that scales live. `kubectl scale` and autoscalers change their number."""
_REWARD_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


_POLICY_COLUMNS = [
    _column("GPUs", "integer", ".spec.limits.gpus", "Most GPUs of one job"),
    _column("Queue", "string", ".spec.defaults.queue", "Queue of jobs that name none"),
    _AGE,
]


@dataclass(frozen=True)
class _Served:
    """How a kind is served."""

    plural: str
    short_name: str
    columns: list[Schema]
    scale: Schema | None = None
    """The subresource scale of a kind with a status; None: a kind without both."""


_SERVED: dict[Kind, _Served] = {
    RLJob: _Served("rljobs", "rlj", _JOB_COLUMNS, _JOB_SCALE),
    RewardModel: _Served("rewardmodels", "rwm", _REWARD_COLUMNS, _REWARD_SCALE),
    RLJobPolicy: _Served("rljobpolicies", "rljpol", _POLICY_COLUMNS),
}


def build_crd(model: Kind) -> Schema:
    kind, served = model.__name__, _SERVED[model]
    stored = served.scale["specReplicasPath"].strip(".").split(".") if served.scale else []
    schema = _describe_defaults(shorten_repeated(build_object_schema(model)), tuple(stored))
    version = {
        "name": API_VERSION.rpartition("/")[2],
        "served": True,
        "storage": True,
        **({"subresources": {"status": {}, "scale": served.scale}} if served.scale else {}),
        "additionalPrinterColumns": served.columns,
        "schema": {"openAPIV3Schema": schema},
    }
    names: Schema = {"kind": kind, "listKind": f"{kind}List", "plural": served.plural, "singular": kind.lower()}
    names["shortNames"] = [served.short_name]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{served.plural}.{API_GROUP}", "annotations": {ANNOTATION_CRD_VERSION: __version__}},
        "spec": {"group": API_GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def build_manifest(crd: Schema) -> str:
    return _HEADER + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120)


def build_chart_template(crd: Schema) -> str:
    """Return the CRD as a Helm template, so that Helm upgrades it (Helm never upgrades a chart's crds/ folder)."""
    annotations = crd["metadata"].get("annotations", {}) | {"helm.sh/resource-policy": "keep"}
    kept = {**crd["metadata"], "annotations": annotations}
    text = build_manifest({**crd, "metadata": kept}).removeprefix(_HEADER)
    # Escape braces in descriptions and rules, which Helm would interpret.
    text = text.replace("{{", '{{ "{{" }}')
    return f"{_HEADER}{{{{- if .Values.crds.install }}}}\n{text}{{{{- end }}}}\n"


_FIRST_SENTENCE = re.compile(r".+?\.(?=\s+([A-Z`]|[a-z]\w*:))")
"""A sentence begins with a capital letter, or with a value that it explains."""


def shorten_repeated(node: Schema, seen: set[str] | None = None) -> Schema:
    """Return the schema with repeated descriptions shortened. `seen` is of one schema."""
    seen = set() if seen is None else seen
    result = dict(node)
    if "description" in node:
        result["description"] = _shorten(node["description"], seen)
    if "properties" in node:
        result["properties"] = {name: shorten_repeated(field, seen) for name, field in node["properties"].items()}
    result |= {key: _shorten_values(node[key], seen) for key in ("items", "additionalProperties") if key in node}
    return result


def _shorten_values(node: Schema, seen: set[str]) -> Schema:
    """The same for the values of a list or a map, whose field has a description of its own."""
    description = node.get("description")
    is_known = description is not None and description in seen and not _FIRST_SENTENCE.match(description)
    return shorten_repeated({k: v for k, v in node.items() if not (is_known and k == "description")}, seen)


def _shorten(description: str, seen: set[str]) -> str:
    if description not in seen:
        seen.add(description)
        return description
    first = _FIRST_SENTENCE.match(description)
    return first[0] if first else description
