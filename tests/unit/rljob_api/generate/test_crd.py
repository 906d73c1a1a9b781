from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rljob_api.generate import crd
from rljob_api.manifest.base import Spec
from rljob_api.manifest.job import RLJob
from rljob_api.read.load import InvalidManifestError, load_manifests
from tests.paths import ROOT

Schema = dict[str, Any]

KINDS = crd.KINDS
VALIDATIONS = "x-kubernetes-validations"
KEYWORDS = {
    *("type", "format", "description", "properties", "required", "additionalProperties", "items", "enum", "default"),
    *("nullable", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "maxProperties", "anyOf", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    *("x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
    "x-kubernetes-map-type",
}


@functools.cache
def root_schema(model: Any) -> Schema:
    version = crd.build_crd(model)["spec"]["versions"][0]
    return version["schema"]["openAPIV3Schema"]


def nodes(node: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


def structural_problems(root: Schema) -> Iterator[str]:
    """Yield violations of the rules for structural schemas in Kubernetes' documentation."""
    for path, node in nodes(root, ""):
        int_or_string = node.get("x-kubernetes-int-or-string")
        if int_or_string:
            if node.get("anyOf") != [{"type": "integer"}, {"type": "string"}] or "type" in node:
                yield f"{path}: int-or-string must have only the two alternatives"
        elif "anyOf" in node:
            yield f"{path}: alternatives"
        elif node == {"description": node.get("description"), "x-kubernetes-preserve-unknown-fields": True}:
            continue  # any value
        elif node.get("type") not in ("object", "array", "string", "integer", "number", "boolean"):
            yield f"{path}: type {node.get('type')}"
        if not set(node) <= KEYWORDS:
            yield f"{path}: unknown keywords {set(node) - KEYWORDS}"
        if "properties" in node and "additionalProperties" in node:
            yield f"{path}: properties and additionalProperties exclude each other"
        if not isinstance(node.get("exclusiveMinimum", True), bool):
            yield f"{path}: exclusiveMinimum must be a boolean in OpenAPI 3.0"
        if node.get("type") == "array":
            yield from list_problems(path, node)


def list_problems(path: str, node: Schema) -> Iterator[str]:
    if "items" not in node:
        yield f"{path}: a list without items"
    if node.get("x-kubernetes-list-type") == "map":
        item = node["items"]
        for key in node["x-kubernetes-list-map-keys"]:
            if key not in item.get("required", []) and "default" not in item["properties"][key]:
                yield f"{path}: the map key {key} must be required or have a default"
            if item["properties"][key]["type"] == "object":
                yield f"{path}: the map key {key} must be a scalar"


def strict(node: Schema) -> Schema:
    """Convert to JSON Schema; reject unknown fields, as kubectl's strict validation does."""
    result = {key: value for key, value in node.items() if not key.startswith("x-") and key != "nullable"}
    if "properties" in node:
        result["properties"] = {name: strict(inner) for name, inner in node["properties"].items()}
        result["additionalProperties"] = node["properties"].keys() == {"name"}  # metadata
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            result[key] = strict(node[key])
    if node.get("nullable"):
        result["type"] = [node["type"], "null"]
    return result


@functools.cache
def validator(kind: str) -> jsonschema.Draft4Validator:
    return jsonschema.Draft4Validator(strict(root_schema(next(model for model in KINDS if model.__name__ == kind))))


def schema_accepts(manifest: Schema) -> bool:
    return validator(manifest["kind"]).is_valid(manifest)  # type: ignore[no-any-return]


def python_accepts(manifest: Schema) -> bool:
    try:
        load_manifests(yaml.safe_dump(manifest), "x")
    except InvalidManifestError:
        return False
    return True


@pytest.mark.parametrize("model", KINDS)
def test_schemas_are_structural(model: Any) -> None:
    assert list(structural_problems(root_schema(model))) == []


@pytest.mark.parametrize(
    "node",
    [
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {"$ref": "#/x"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string"}},
        {"type": "array"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "number", "exclusiveMinimum": 0},
    ],
)
def test_structural_check_reports_violations(node: Schema) -> None:
    assert list(structural_problems(node))


@pytest.mark.parametrize("model", KINDS)
def test_all_user_fields_are_bounded(model: Any) -> None:
    # The API server estimates the cost of rules from the bounds, and rejects a CRD without them.
    bounds = {"string": "maxLength", "array": "maxItems"}
    for path, node in nodes(root_schema(model)["properties"]["spec"], "spec"):
        bound = "maxProperties" if "additionalProperties" in node else bounds.get(node.get("type", ""))
        assert bound is None or bound in node or "enum" in node, f"{path} has no {bound}"


@pytest.mark.parametrize("model", KINDS)
def test_all_fields_have_a_description(model: Any) -> None:
    for path, node in nodes(root_schema(model)["properties"]["spec"], "spec"):
        assert node.get("description") or path.endswith(("[]", "{}")), path


FOREIGN = {
    *("Exists", "Equal", "NoSchedule", "PreferNoSchedule", "NoExecute"),  # Kubernetes
    *("Always", "IfNotPresent", "Never"),  # Kubernetes
    *("3.11", "3.12", "3.13"),
    "flash_attention_2",  # transformers
    *("max_tokens", "max_completion_tokens", "json_schema", "json_object"),  # OpenAI
}
"""Values that are spelled as by the project that they belong to."""


@pytest.mark.parametrize("model", KINDS)
def test_values_of_enumerations_are_lower_camel(model: Any) -> None:
    for path, node in nodes(root_schema(model)["properties"]["spec"], "spec"):
        for value in {*node.get("enum", [])} - FOREIGN:
            assert re.fullmatch("[a-z][A-Za-z0-9]*", value), f"{path}: {value}"


@pytest.mark.parametrize("model", KINDS)
def test_only_what_scale_reads_is_stored_with_a_default(model: Any) -> None:
    found = {path: node["default"] for path, node in nodes(root_schema(model), "") if "default" in node}
    scaled: Schema = {"RLJob": {".spec.rollout": {}, ".spec.rollout.replicas": 1}, "RewardModel": {".spec.replicas": 1}}
    assert found == scaled.get(model.__name__, {})


@pytest.mark.parametrize("model", KINDS)
def test_descriptions_name_the_other_defaults(model: Any) -> None:
    described = dict(nodes(root_schema(model)["properties"]["spec"], "spec"))
    for path, node in nodes(crd.build_object_schema(model)["properties"]["spec"], "spec"):
        if node.get("default", {}) != {} and "default" not in described[path]:
            jsonschema.Draft4Validator(strict(node)).validate(node["default"])
            text = described[path]["description"]
            assert text.endswith(f"Default: {json.dumps(node['default'], ensure_ascii=False)}."), path


@pytest.mark.parametrize("model", KINDS)
def test_rules_have_a_remedy_and_an_existing_field_path(model: Any) -> None:
    for path, node in nodes(root_schema(model), ""):
        for rule in node.get(VALIDATIONS, []):
            assert ";" in rule["message"], f"{path}: {rule['message']}"
            field = node
            for name in rule.get("fieldPath", "").split(".")[1:]:
                field = field["properties"][name]


def test_schemas_contain_all_python_rules() -> None:
    all_nodes = [node for model in KINDS for _, node in nodes(root_schema(model), "")]
    messages = {rule["message"] for node in all_nodes for rule in node.get(VALIDATIONS, [])}
    parts = [Spec]
    for part in parts:
        parts += [inner for inner in part.__subclasses__() if inner.__module__.startswith("rljob_api.")]
        assert {
            f"{rule.fields[0]} {rule.message}; {rule.remedy}".strip() for rule in part.RULES if rule.cel
        } <= messages


def test_fields_that_a_running_job_depends_on_are_immutable() -> None:
    rules = root_schema(RLJob)["properties"]["spec"][VALIDATIONS]
    fixed = {rule["fieldPath"] for rule in rules if "oldSelf" in rule["rule"]}
    assert {".model", ".data.train", ".algorithm.type", ".trainer.replicas", ".schedule.seed", ".managedBy"} <= fixed
    assert not {".algorithm", ".schedule.promptsPerStep", ".rollout.sampling"} & fixed, "a resume may change these"


def test_named_lists_merge_by_key() -> None:
    found = dict(nodes(root_schema(RLJob), ""))
    for path, key in ((".spec.rewards", "name"), (".status.conditions", "type"), (".status.roles", "name")):
        assert found[path]["x-kubernetes-list-type"] == "map"
        assert found[path]["x-kubernetes-list-map-keys"] == [key]
    assert found[".spec.trainer.nodePool.tolerations"]["x-kubernetes-list-type"] == "atomic"


def test_columns_and_subresources_refer_to_existing_fields() -> None:
    job, reward_model, policy = (crd.build_crd(model)["spec"]["versions"][0] for model in KINDS)
    assert [column["name"] for column in job["additionalPrinterColumns"]] == [
        *("Phase", "Step", "Last Step", "Reward", "Rollouts", "Rewards"),
        *("Schedule", "Staleness", "Busy", "Progress", "Waits For", "Age"),
    ]
    assert "subresources" not in policy, "a policy has no status"
    for version in (job, reward_model, policy):
        paths = dict(nodes(version["schema"]["openAPIV3Schema"], ""))
        assert set(version.get("subresources", {"scale": {}})["scale"].values()) <= set(paths)
        columns = {
            column["jsonPath"] for column in version["additionalPrinterColumns"] if "[" not in column["jsonPath"]
        }
        assert columns <= {*paths, ".metadata.creationTimestamp"}


GOOD: Schema = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sums", "labels": {"team": "a"}},
    "spec": {
        "model": {"source": "hf://org/name"},
        "data": {"train": {"source": "/data/train.jsonl"}},
        "rewards": [{"name": "correct", "function": {"inline": "def reward(completions): ..."}}],
        "trainer": {},
        "rollout": {},
        "schedule": {},
    },
}

ACCEPTED = [
    ("spec.suspend", False),
    ("spec.data.maxPromptTokens", None),
    ("spec.algorithm", {"optimizer": {"maxGradNorm": None, "learningRate": 1e-6}}),
    ("spec.algorithm", {"type": "dapo", "loss": {"clipHigh": 0.3}}),
    ("spec.trainer.resources", {"limits": {"cpu": 2, "memory": "16Gi", "nvidia.com/gpu": 1}}),
    ("spec.trainer.template", {"spec": {"containers": [{"name": "trainer", "securityContext": {"x": [1]}}]}}),
    ("spec.trainer.nodePool", {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"pool": "a"}}),
    ("spec.rewards.0.function.kwargs", {"tolerance": 0.1, "deep": {"er": [1, "x"]}}),
    ("spec.rewards.0.function.maxMemory", "1.5Gi"),
    ("spec.rewards.0.function.maxFileSize", 1048576),
    ("spec.rewards.0.weight", -0.5),
    ("spec.schedule.seed", -1),
]
REJECTED = [
    ("metadata.name", "Upper"),
    ("metadata.name", "1st"),
    ("metadata.name", "a" * 41),
    ("spec.modle", {}),
    ("spec.model.source", ""),
    ("spec.model.source", 3),
    ("spec.model", {}),
    ("spec.rewards", {}),
    ("spec.rewards.0.name", "Bad Name"),
    ("spec.rewards.0.name", "a" * 41),
    ("spec.rewards.0.name", "_a"),
    ("spec.rewards.0.function.entrypoints", ["a b"]),
    ("spec.rewards.0.function.signature", "a b"),
    ("spec.rewards.0.function.max_memory", 4096),
    ("spec.rewards.0.function.maxMemory", "2GB"),
    ("spec.rewards.0.function.maxMemory", 0.5),
    ("spec.rewards.0.function.maxMemoryMiB", 2048),
    ("spec.rewards.0.slots", 0),
    ("spec.rewards.0.timeoutSeconds", 0),
    ("spec.rewards.0.timeoutSeconds", 0.5),
    ("spec.schedule.steps", 0),
    ("spec.schedule.steps", "4"),
    ("spec.schedule.steps", 1.5),
    ("spec.schedule.maxStaleness", 9),
    ("spec.algorithm", {"groupSize": 1}),
    ("spec.algorithm", {"clipHigh": 0.3}),
    ("spec.algorithm", {"type": "grpo2"}),
    ("spec.algorithm", {"optimizer": {"beta2": 1.0}}),
    ("spec.algorithm", {"optimizer": {"learningRate": 0}}),
    ("spec.trainer.replicas", 0),
    ("spec.trainer.dtype", "fp8"),
    ("spec.trainer.env", {"A": 1}),
    ("spec.trainer.env", {f"A{n}": "" for n in range(129)}),
    ("spec.trainer.resources", {"limits": {"cpu": "1x"}}),
    ("spec.trainer.resources", {"limits": {"cpu": 0.5}}),
    ("spec.trainer.template", []),
    ("spec.rollout.sampling", {"topP": 0}),
    ("spec.rollout.sampling", {"stop": [""]}),
    ("spec.rollout.gpuMemoryUtilization", 1.1),
    ("spec.rollout.kvCacheGib", 1),
    ("spec.suspend", "yes"),
]


def edited(path: str, value: Any) -> Schema:
    manifest = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    holder: Any = manifest
    for part in way:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    holder[last] = value
    return manifest


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_python_and_the_schema_accept_the_same(path: str, value: Any) -> None:
    manifest = edited(path, value)
    assert (python_accepts(manifest), schema_accepts(manifest)) == (True, True)


@pytest.mark.parametrize(("path", "value"), REJECTED)
def test_python_and_the_schema_reject_the_same(path: str, value: Any) -> None:
    manifest = edited(path, value)
    assert (python_accepts(manifest), schema_accepts(manifest)) == (False, False)


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*/rljob.yaml")), ids=lambda file: file.parent.name)
def test_examples_conform_to_the_schema(file: Path) -> None:
    assert schema_accepts(yaml.safe_load(file.read_text()))


def test_to_manifest_conforms_to_the_schema() -> None:
    (job,) = load_manifests(yaml.safe_dump(GOOD), "x")
    manifest = job.to_manifest()
    manifest.pop("status")
    assert schema_accepts(manifest)
    assert python_accepts(manifest)
