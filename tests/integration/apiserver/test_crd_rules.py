"""Every rule of the CRDs, asked of a real API server and of rljob_api: both refuse, both with the remedy.

The tables name each rule by its type and message; a rule without a case fails a test. Bounds, enums and patterns are
not listed by hand: the cases are made from the generated schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml
from kubernetes import client
from manifests import INLINE, MISSING, put, put_all, smallest

from rljob_api.generate.crd import build_object_schema
from rljob_api.manifest.base import Spec
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.read.load import InvalidManifestError, load_manifests
from tests.paths import ROOT

GROUP, VERSION = "rljob.dev", "v1alpha1"
MODELS: dict[str, Any] = {"RLJob": RLJob, "RewardModel": RewardModel}
JUDGE = {"template": "x", "parser": {"regex": "(x)"}, "endpoint": {"url": "https://x", "model": "m"}}
EMPTY_FUNCTION = {"rewards.0.function": {"entrypoint": "f"}}


def judge(**changes: Any) -> dict[str, Any]:
    """The smallest reward of kind judge, with changes to its endpoint's limits or to itself."""
    limits = changes.pop("limits", None)
    endpoint = JUDGE["endpoint"] | ({"limits": limits} if limits else {})
    return JUDGE | {"endpoint": endpoint} | changes


LESS_THAN_LEAST = {"minReplicas": 3, "maxReplicas": 2}
ELSEWHERE: dict[str, Any] = {"http": {"url": "https://example.com"}, "autoscaling": {"maxReplicas": 2}}
WITHOUT_FUNCTION: dict[str, Any] = {"function": MISSING}
ENDPOINT: dict[str, Any] = {"http": {"url": "https://example.com"}}
ANOTHERS: dict[str, Any] = {"rewardModelRef": {"name": "math"}, "autoscaling": {"maxReplicas": 2}}

# (type, beginning of the message, kind of object, changes to the smallest one that break the rule)
BROKEN: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Model", "must be hf://org/name, pvc://", "RLJob", {"model.source": "ftp://host/model"}),
    ("DataSource", "must be hf://org/name, pvc://", "RLJob", {"data.train.source": "hf://"}),
    ("Data", "must hold at least one column", "RLJob", {"data.template": "Answer this: prompt"}),
    ("Toleration", "must be set unless operator", "RLJob", {"trainer.nodePool.tolerations": [{"value": "a"}]}),
    (
        "Toleration",
        "must be unset when operator",
        "RLJob",
        {"head.nodePool.tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
    ),
    *(
        (f"{role.capitalize()}Role", "must not set names", "RLJob", {f"{role}.env": {"RLJOB_TOKEN": "x"}})
        for role in ("head", "trainer", "rollout")
    ),
    ("Reward", "must not set names", "RLJob", {"rewards.0.env": {"RLJOB_TOKEN": "x"}}),
    ("RewardModelSpec", "must not set names", "RewardModel", {"env": {"RLJOB_TOKEN": "x"}}),
    ("FunctionReward", "must have exactly one of inline", "RLJob", EMPTY_FUNCTION),
    ("Reward", "must have exactly one of function", "RLJob", {"rewards.0.http": {"url": "https://example.com"}}),
    ("RewardModelSpec", "must have exactly one of function", "RewardModel", {"function": MISSING}),
    ("ModelReward", "must be hf://org/name, pvc://", "RewardModel", {"model": {"source": "ftp://host/model"}}),
    ("ServedModel", "must be hf://org/name, pvc://", "RewardModel", {"judge": judge(model={"source": "ftp://h/m"})}),
    ("JudgeReward", "must have exactly one of model", "RewardModel", {"judge": judge(model={"source": "/m"})}),
    ("JudgeReward", "must be 1 at temperature 0", "RewardModel", {"judge": judge(votes=3)}),
    ("JudgeParser", "must have exactly one of regex", "RewardModel", {"judge": judge(parser={"scorePath": "x"})}),
    *(
        (type_name, message, kind, {f"{path}function": MISSING, f"{path}judge": judge(limits=limits), **more})
        for type_name, kind, path in (("Reward", "RLJob", "rewards.0."), ("RewardModelSpec", "RewardModel", ""))
        for message, limits, more in (
            ("must be at least votes x replicas", {"concurrency": 3}, {f"{path}replicas": 4}),
            ("must be at least 2 x votes x replicas", {"requestsPerMinute": 7.5}, {f"{path}replicas": 4}),
        )
    ),
    ("JudgeReward", "must have jsonSchema for ranking", "RewardModel", {"judge": judge(compare="ranking")}),
    *(
        (type_name, message, kind, {f"{path}{name}": value for name, value in changes.items()})
        for type_name, kind, path in (("Reward", "RLJob", "rewards.0."), ("RewardModelSpec", "RewardModel", ""))
        for message, changes in (
            ("must be sample for a model", {**WITHOUT_FUNCTION, "model": {"source": "/m"}, "scope": "group"}),
            ("must be group exactly when", {**WITHOUT_FUNCTION, "judge": judge(compare="pairwise")}),
            ("must be sample or group", {**WITHOUT_FUNCTION, **ENDPOINT, "scope": "sampleThenGroup"}),
            ("must be false with scope group", {"cache": True, "scope": "group"}),
        )
    ),
    ("Autoscaling", "must be at least minReplicas", "RLJob", {"rewards.0.autoscaling": LESS_THAN_LEAST}),
    ("Reward", "must not be set beside http", "RLJob", {"rewards.0": ELSEWHERE | {"name": "r"}}),
    ("RewardModelSpec", "must not be set beside http", "RewardModel", {"function": MISSING, **ELSEWHERE}),
    ("Reward", "must not be set beside rewardModelRef", "RLJob", {"rewards.0": ANOTHERS | {"name": "r"}}),
    (
        "RLJobSpec",
        "must divide schedule.promptsPerStep",
        "RLJob",
        {"schedule": {"promptsPerStep": 8, "miniBatches": 3}},
    ),
    ("RLJobSpec", "x algorithm.groupSize", "RLJob", {"trainer.replicas": 5}),
    (
        "RLJobSpec",
        "must have different names",
        "RLJob",
        {"rewards": [{"name": "a", "function": {"inline": INLINE}}] * 2},
    ),
    ("RLJobSpec", "must be at least 1 unless", "RLJob", {"rollout.replicas": 0}),
    ("RLJobSpec", "must have at least 1 replica each", "RLJob", {"rewards.0.replicas": 0}),
    ("RLJobSpec", "must leave room", "RLJob", {"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 64}}}),
    (
        "RLJobSpec",
        "must leave room",
        "RLJob",
        {
            "rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 16}},
            "evaluation": {"sampling": {"maxTokens": 64}},
        },
    ),
    ("RLJobSpec", "must be more than 0 for training", "RLJob", {"rollout.sampling.temperature": 0}),
    ("RLJobSpec", "must be 0 without data.eval", "RLJob", {"evaluation.everySteps": 5}),
]

# (type, field, changes to the smallest job, further changes that its update must be refused)
UNCHANGEABLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {}, {"model.source": "hf://org/other"}),
    ("data.train", {}, {"data.train.limit": 5}),
    ("algorithm", {}, {"algorithm.groupSize": 4}),
    ("schedule.promptsPerStep", {}, {"schedule.promptsPerStep": 128}),
    ("schedule.miniBatches", {}, {"schedule.miniBatches": 2}),
    # maxStaleness has one value today: its enum refuses before the rule can be asked.
    ("schedule.maxStaleness", {}, {"schedule.maxStaleness": 1}),
    ("schedule.seed", {}, {"schedule.seed": 1}),
    ("managedBy", {}, {"managedBy": "kueue.x-k8s.io/multikueue"}),
    ("trainer.replicas", {}, {"trainer.replicas": 2}),
    ("trainer.gpusPerReplica", {}, {"trainer.gpusPerReplica": 2}),
]


def specs_below(annotation: Any, seen: dict[type[Spec], None]) -> dict[type[Spec], None]:
    """Every type that an object is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        if annotation not in seen:
            seen[annotation] = None
            for field in annotation.model_fields.values():
                specs_below(field.annotation, seen)
    else:
        for argument in get_args(annotation):
            specs_below(argument, seen)
    return seen


ALL_SPECS = list(specs_below(RLJob, specs_below(RewardModel, {})))


def rules_for(type_name: str, beginning: str) -> list[Any]:
    part = next(spec for spec in ALL_SPECS if spec.__name__ == type_name)
    return [rule for rule in part.RULES if rule.message.startswith(beginning)]


def offline(manifest: dict[str, Any]) -> str:
    """What rljob_api says of a manifest; empty when it is valid."""
    try:
        load_manifests(json.dumps(manifest), "job.yaml")
    except InvalidManifestError as error:
        return str(error)
    return ""


class Server:
    """The API server, asked what it would say: nothing is stored but by `create`."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.objects, self.namespace = client.CustomObjectsApi(api), namespace

    def verdict(self, manifest: dict[str, Any]) -> str:
        return self._ask(lambda: self.create(manifest, dry_run="All"))

    def create(self, manifest: dict[str, Any], **options: Any) -> dict[str, Any]:
        plural = f"{manifest['kind'].lower()}s"
        return self.objects.create_namespaced_custom_object(  # type: ignore[no-any-return]
            GROUP, VERSION, self.namespace, plural, manifest, field_validation="Strict", **options
        )

    def update_verdict(self, manifest: dict[str, Any]) -> str:
        def replace() -> Any:
            return self.objects.replace_namespaced_custom_object(
                GROUP, VERSION, self.namespace, "rljobs", manifest["metadata"]["name"], manifest, dry_run="All"
            )

        return self._ask(replace)

    @staticmethod
    def _ask(call: Any) -> str:
        try:
            call()
        except client.ApiException as error:
            if error.status not in (400, 422):
                raise  # no verdict on the manifest
            return str(json.loads(error.body)["message"])
        return ""


@pytest.fixture
def server(api_client, namespace):
    return Server(api_client, namespace)


def test_every_rule_of_the_types_has_a_case():
    rules = {(spec.__name__, rule.message, rule.fields) for spec in ALL_SPECS for rule in spec.RULES}
    cases = {
        (type_name, rule.message, rule.fields)
        for type_name, beginning, _, _ in BROKEN
        for rule in rules_for(type_name, beginning)
    }
    assert rules == cases, "add a case to BROKEN, or remove one whose rule is gone"
    per_rule = [(type_name, beginning) for type_name, beginning, _, _ in BROKEN]
    shared = {key for key in per_rule if len(rules_for(*key)) != per_rule.count(key)}
    assert not shared, "rules with the same beginning need a case each"
    immutable = {(spec.__name__, rule.field) for spec in ALL_SPECS for rule in spec.CLUSTER_RULES}
    covered = {("RLJobSpec", field) for field, _, _ in UNCHANGEABLE} | {
        (name, "source") for name in ("Model", "DataSource", "ServedModel", "ModelReward")
    }
    assert immutable == covered, "add a case to UNCHANGEABLE or to the test of relative paths"


@pytest.mark.parametrize(
    ("type_name", "beginning", "kind", "changes"), BROKEN, ids=[f"{case[0]} {case[1]}" for case in BROKEN]
)
def test_both_refuse_what_breaks_a_rule_and_say_the_remedy(server, type_name, beginning, kind, changes):
    manifest = put_all(smallest(kind), changes)
    said, said_offline = server.verdict(manifest), offline(manifest)
    rules = rules_for(type_name, beginning)
    assert any(rule.message in said_offline and rule.remedy in said_offline for rule in rules), said_offline
    if any(rule.cel for rule in rules):
        assert any(f"{rule.message}; {rule.remedy}" in said for rule in rules), said or "the API server accepted it"
    else:
        assert "Duplicate value" in said, said or "the API server accepted it"


@pytest.mark.parametrize("path", ["model.source", "data.train.source", "data.eval.source"])
def test_a_relative_path_is_refused_by_a_cluster_and_by_the_operators_own_check(server, path):
    from rljob_operator.plan.validate import find_problems

    manifest = put(smallest(), path, "./beside")
    assert "works with `rljob run` alone" in server.verdict(manifest)
    assert offline(manifest) == "", "`rljob run` takes it"
    assert f"spec.{path}" in " ".join(find_problems(RLJob.model_validate(manifest)))


@pytest.mark.parametrize(("field", "before", "after"), UNCHANGEABLE, ids=[case[0] for case in UNCHANGEABLE])
def test_what_cannot_change_is_refused_on_update_and_says_what_to_do(server, field, before, after):
    stored = server.create(put_all(smallest(), before))
    said = server.update_verdict(put_all(stored, after))
    if field == "schedule.maxStaleness":
        assert "Unsupported value" in said, said
        return
    suspendable = field.startswith("trainer.")
    remedy = "set suspend: true first" if suspendable else "create a new RLJob instead"
    assert f"{field} is immutable" in said, said or "the API server accepted the change"
    assert remedy in said


@pytest.mark.parametrize("field", ["trainer.replicas", "trainer.gpusPerReplica"])
def test_a_suspended_jobs_trainer_may_be_resized(server, field):
    stored = server.create(put(smallest(), "suspend", True))
    assert server.update_verdict(put(stored, field, 2)) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"schedule.steps": 500},
        {"rollout.replicas": 3},
        {"rewards.0.replicas": 2},
        {"suspend": True},
        {"trainer.resources": {"requests": {"cpu": "2"}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_may_change_while_a_job_runs_is_accepted(server, change):
    stored = server.create(smallest())
    assert server.update_verdict(put_all(stored, change)) == ""


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", MODELS)
def test_the_api_server_fills_in_the_defaults_that_the_types_have(server, kind):
    stored = server.create(smallest(kind), dry_run="All")
    wanted = MODELS[kind].model_validate(smallest(kind)).to_manifest()
    assert without_nulls(stored["spec"]) == without_nulls(wanted["spec"])


@pytest.mark.parametrize("path", ["data.train.answer", "algorithm.optimizer.maxGradNorm"])
def test_a_null_that_means_off_survives_the_api_server(server, path):
    stored = server.create(put(smallest(), path, None), dry_run="All")
    *way, last = path.split(".")
    holder = stored["spec"]
    for part in way:
        holder = holder[part]
    assert holder.get(last, "a default came back") is None


@pytest.mark.parametrize("path", ["rolout", "trainer.gpuPerReplica", "rewards.0.function.inlin", "data.train.promt"])
def test_an_unknown_field_is_refused_by_both(server, path):
    manifest = put(smallest(), path, 1)
    assert f'unknown field "spec.{path.replace(".0.", "[0].")}"' in server.verdict(manifest)
    assert "is unknown; did you mean" in offline(manifest)


@pytest.mark.parametrize("name", ["A", "1st", "a" * 41, "a_b", "a."])
def test_a_name_that_leaves_no_room_for_children_is_refused_by_both(server, name):
    manifest = smallest(name=name)
    assert "metadata.name" in server.verdict(manifest)
    assert "metadata.name" in offline(manifest)


def bounds_of(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, keyword, a value just outside it) for every bound of a schema."""
    for key, inner in schema.get("properties", {}).items():
        yield from bounds_of(inner, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        yield from bounds_of(schema["items"], f"{path}.0")
    for keyword, step in (("minimum", -1), ("maximum", 1)):
        if keyword in schema:
            bound = schema[keyword]
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")
            yield path, keyword, bound if exclusive else bound + step
    if "enum" in schema:
        yield path, "enum", max(schema["enum"]) + 1 if schema["type"] == "integer" else "nonsense"
    if "pattern" in schema:
        yield path, "pattern", "-?"
    if schema.get("minLength"):
        yield path, "minLength", ""
    if "maxLength" in schema:
        yield path, "maxLength", "a" * (schema["maxLength"] + 1)
    if schema.get("minItems"):
        yield path, "minItems", []
    if "maxItems" in schema:
        yield path, "maxItems", [example(schema["items"])] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        yield path, "maxProperties", {f"k{i}": "1" for i in range(schema["maxProperties"] + 1)}


def example(schema: dict[str, Any]) -> Any:
    """Some value of a schema; what has no default is filled in."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {key: example(schema["properties"][key]) for key in schema.get("required", [])}
        case "array":
            return []
        case "integer" | "number":
            return schema.get("minimum", 0) + 1
        case "boolean":
            return False
    return "https://x" if "http" in schema.get("pattern", "") else "x"


SPEC_SCHEMAS = {kind: build_object_schema(model)["properties"]["spec"] for kind, model in MODELS.items()}
BOUNDS = [(kind, *bound) for kind, schema in SPEC_SCHEMAS.items() for bound in bounds_of(schema)]


def put_with_neighbours(kind: str, path: str, value: Any) -> dict[str, Any]:
    """The smallest manifest with a value deep inside, and what must stand beside it."""
    manifest, schema, way = smallest(kind), SPEC_SCHEMAS[kind], ""
    for part in path.split(".")[:-1]:
        schema = schema["items"] if part == "0" else schema["properties"][part]
        way = f"{way}.{part}".lstrip(".")
        for key in schema.get("required", []):
            if not has(manifest["spec"], f"{way}.{key}"):
                manifest = put(manifest, f"{way}.{key}", example(schema["properties"][key]))
    return put(manifest, path, value)


def has(holder: Any, path: str) -> bool:
    for part in path.split("."):
        if part == "0":
            if not holder:
                return False
            holder = holder[0]
        elif part in holder:
            holder = holder[part]
        else:
            return False
    return True


@pytest.mark.parametrize(
    ("kind", "path", "keyword", "value"), BOUNDS, ids=[f"{kind}-{path}-{keyword}" for kind, path, keyword, _ in BOUNDS]
)
def test_a_value_past_its_bound_is_refused_by_both_and_the_field_is_named(server_shared, kind, path, keyword, value):
    manifest = put_with_neighbours(kind, path, value)
    named = f"spec.{path}".replace(".0", "[0]")
    said, said_offline = server_shared.verdict(manifest), offline(manifest)
    assert named in said, said or "the API server accepted it"
    assert named in said_offline, said_offline or "rljob validate accepted it"


@pytest.fixture(scope="module")
def server_shared(api_client, crds):
    """Nothing is stored by these tests, so one namespace serves them all."""
    return Server(api_client, "default")


EXAMPLES = sorted((ROOT / "examples").glob("*/rljob.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_an_example_is_refused_for_its_relative_paths_at_most(server_shared, path):
    for manifest in yaml.safe_load_all(path.read_text()):
        said = server_shared.verdict(manifest)
        assert said == "" or "works with `rljob run` alone" in said, said
