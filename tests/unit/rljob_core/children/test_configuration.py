"""What counts as the user's configuration of a role: complete, minimal, and the same in every version."""

import itertools
import types
import typing
from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api.manifest.base import Spec, yaml_fields
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import LocalObjectReference
from rljob_api.manifest.roles import Toleration
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.reward import FunctionReward, Reward, RewardModel
from rljob_api.manifest.services.tool import Tool
from rljob_api.manifest.sources import Hub
from rljob_core.children import WORKLOAD_KINDS, pods
from rljob_core.children.common import ANNOTATION_CONFIG_HASH, to_yaml
from rljob_core.children.head import build_head
from rljob_core.children.keep import ANNOTATION_CONFIGURATION, ANNOTATION_READ_ONCE, ANNOTATION_SCHEDULING
from rljob_core.children.rollout import build_rollout
from rljob_core.children.service import build_server, find_services, service_of
from rljob_core.children.trainer import build_trainer
from rljob_core.defaults import DEFAULTS
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.job_simulation import make_agent_job, make_job, make_program_job

DATA = ROOT / "tests" / "data" / "configuration"
RESTARTS_ALL = (
    "the configuration of this role is not the one that earlier versions recorded: "
    "AN UPGRADE WOULD RESTART ALL RUNNING JOBS OF USERS. "
    "Leave new settings out of read_configuration while they have their default, "
    "and never change the default of an existing field without keeping the former one there"
)


def build_workloads(owner):
    """By name."""
    services = find_services(owner) if isinstance(owner, RLJob) else [service_of(owner)]
    children = [child for service in services for child in build_server(service, "token", DEFAULTS)]
    if isinstance(owner, RLJob):
        children += build_head(owner, "token", DEFAULTS, {})
        children += build_trainer(owner, "token", DEFAULTS) + build_rollout(owner, "token", DEFAULTS)
    return {child["metadata"]["name"]: child for child in children if child["kind"] in WORKLOAD_KINDS}


def load_stored():
    documents = fast_yaml.load_all((DATA / "stored.yaml").read_text())
    return [{"RLJob": RLJob, "RewardModel": RewardModel}[d["kind"]].model_validate(d) for d in documents]


def load_with_new_fields():
    """The same objects with further fields."""
    owners = load_stored()
    for owner in owners:
        owner.spec.priority_class_name = "high"
        owner.metadata.annotations["rljob.dev/restart"] = "2026-01-01T00:00:00+00:00"
        if isinstance(owner, RLJob):
            owner.spec.trainer.template["spec"].pop("priorityClassName")
            owner.spec.hub = Hub(endpoint="http://hub.example:8080", tokenSecretRef={"name": "hub", "key": "token"})
    return owners


def test_configuration_of_each_role_is_what_earlier_versions_recorded(monkeypatch, request):
    recorded = {}

    def record(workload, configuration, scheduling, parts):
        recorded[workload["metadata"]["name"]] = {"configuration": configuration, "scheduling": scheduling}
        return workload

    monkeypatch.setattr(pods, "record_configuration", record)
    for owner in load_with_new_fields():
        build_workloads(owner)
    file = DATA / "configurations.yaml"
    if request.config.getoption("--update-golden"):
        file.write_text(to_yaml(recorded))
    expected = fast_yaml.load(file.read_text())
    assert recorded.keys() == expected.keys()
    for name, value in recorded.items():
        assert value == expected[name], f"{name}: {RESTARTS_ALL}"


def test_templates_have_the_digests_of_earlier_versions(request):
    """What a program reads again is not in it: that of the head changes with what it reads again."""
    hashes = {
        name: read_config_hash(workload) for owner in load_stored() for name, workload in build_workloads(owner).items()
    }
    file = DATA / "config-hashes.yaml"
    if request.config.getoption("--update-golden"):
        file.write_text(to_yaml(hashes))
    assert hashes == fast_yaml.load(file.read_text()), RESTARTS_ALL


def other_value(name: str, annotation: Any, value: Any) -> Any:
    """A value that differs from `value`; None if the type is a union of sections."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case dict() if name == "template":
            return value | {"metadata": {"annotations": {"mine": "1"}}}
        case dict():
            return value | {"OTHER": 1.0 if "float" in str(annotation) else "1"}
        case list():
            item = {
                "tolerations": Toleration(operator="Exists"),
                "image_pull_secrets": LocalObjectReference(name="x"),
                "tools": Tool(name="other", function=PythonFunction(inline="x = 1")),
                "rewards": Reward(name="other", function=FunctionReward(inline="x = 1")),
            }
            return [*value, item.get(name, "other")]
        case str():
            choices = [c for c in typing.get_args(annotation) if isinstance(c, str)]
            return next((choice for choice in choices if choice != value), f"{value}x")
        case None:
            types_ = [t for t in flatten(annotation) if t is not type(None)]
            return {int: 7, float: 7.5, str: "other"}.get(types_[0]) if types_ else None
    return None


def flatten(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return flatten(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(annotation) for each in flatten(part)]
    return [annotation]


def find_changes(part: Spec, path: tuple[Any, ...] = ()) -> list[tuple[str, Any]]:
    """The path and another value of each field that has one."""
    found: list[tuple[str, Any]] = []
    for alias, (name, field) in yaml_fields(type(part)).items():
        value, here = getattr(part, name), (*path, alias)
        if isinstance(value, Spec):
            found += find_changes(value, here)
        elif name in ("rewards", "tools", "models", "sets", "mix"):
            found += [change for i, each in enumerate(value) for change in find_changes(each, (*here, str(i)))]
        elif (changed := other_value(name, field.annotation, value)) is not None:
            found.append((".".join(here), changed))
    return found


def changed_spec(owner, path: str, value: Any):
    """The owner with another value, whether it is valid or not."""
    changed = owner.model_copy(deep=True)
    holder: Any = changed.spec
    *parents, last = path.split(".")
    for part in parents:
        holder = holder[int(part)] if part.isdigit() else getattr(holder, yaml_fields(type(holder))[part][0])
    setattr(holder, yaml_fields(type(holder))[last][0], value)
    return changed


def test_change_of_a_template_is_a_change_of_its_configuration_and_the_reverse():
    paths = set()
    environment = {"type": "environment", "environment": {"framework": "trl", "id": "a:B"}}
    key = {"name": "keys", "key": "A"}
    program = make_program_job(models=[{"name": "judge", "url": "http://a", "apiKeySecretRef": key}])
    for owner in [*load_with_new_fields(), make_agent_job(), program, make_program_job(agent=environment)]:
        before = build_workloads(owner)
        for path, value in find_changes(owner.spec):
            if "scheduling." in path or path.endswith((".source", ".name", ".gpuResource")):
                continue  # recorded apart, not valid, another role, or for GPUs alone
            try:
                after = build_workloads(changed_spec(owner, path, value))
            except ValidationError:
                continue  # not a RewardModel
            templates = changed_names(before, after, read_template)
            assert changed_names(before, after, read_configuration) == templates, f"{owner.kind} {path}: {value}"
            paths.add(path)
    assert {
        "trainer.image",
        "hub.endpoint",
        "objectStorage.region",
        "checkpoint.persistentVolumeClaim.claimName",
        "priorityClassName",
    } <= paths
    assert {"agent.maxUserTurns", "agent.user.function.inline", "agent.tools.0.env", "agent.tools.0.onError"} <= paths
    assert {"agent.runner.function.inline", "agent.runner.slots", "agent.environment.framework"} <= paths
    assert {"agent.models.0.url", "agent.models.0.apiKeySecretRef.key"} <= paths
    assert len(paths) > 150


@pytest.mark.parametrize("pool", [{"gpuResource": "amd.com/gpu"}, {"topology": {"key": "rack"}}])
@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_new_field_of_a_node_pool_rolls_its_role_alone(role, pool):
    """No program reads it, so the head and the other roles continue."""
    before, after = (build_workloads(make_job(**{role: {"gpusPerReplica": 4, "nodePool": p}})) for p in ({}, pool))
    assert changed_names(before, after, read_template) == {f"gsm8k-{role}"}
    assert changed_names(before, after, read_configuration) == {f"gsm8k-{role}"}
    assert changed_names(before, after, read_config_hash) == set()


def test_variables_of_the_chat_template_restart_what_renders_prompts():
    data = make_job().spec.data.to_manifest()
    changed = make_job(data=data | {"chatTemplateArguments": {"enable_thinking": False}})
    before, after = build_workloads(make_job()), build_workloads(changed)
    assert changed_names(before, after, read_configuration) == {"gsm8k-head", "gsm8k-rollout"}
    assert changed_names(before, after, read_config_hash) == {"gsm8k-head", "gsm8k-rollout"}


@pytest.mark.parametrize("place", ["rollout", "evaluation"])
def test_length_that_the_model_decides_differs_from_the_former_default(place):
    """A change in either direction restarts the head, and nothing else."""
    jobs = [make_job(**{place: {"sampling": sampling}}) for sampling in ({}, {"maxTokens": 512}, {"maxTokens": 64})]
    workloads = [build_workloads(job) for job in jobs]
    for before, after in itertools.combinations(workloads, 2):
        assert changed_names(before, after, read_configuration) == {"gsm8k-head"}


def changed_names(before, after, read):
    return {name for name in before if name not in after or read(before[name]) != read(after[name])}


def read_template(workload):
    return workload["spec"]["template"]


def read_configuration(workload):
    annotations = workload["metadata"]["annotations"]
    return annotations.get(ANNOTATION_READ_ONCE, annotations[ANNOTATION_CONFIGURATION])


def read_scheduling(workload):
    return workload["metadata"]["annotations"][ANNOTATION_SCHEDULING]


def read_config_hash(workload):
    return workload["spec"]["template"]["metadata"]["annotations"][ANNOTATION_CONFIG_HASH]


@pytest.mark.parametrize(
    ("scheduling", "spec", "differs"),
    [
        ({"gang": "kueue", "queue": "a"}, {"scheduling": {"gang": "kueue", "queue": "b"}}, True),
        ({"gang": "kueue", "queue": "a"}, {"rollout": {"replicas": 3}}, True),
        ({"gang": "gates"}, {"rollout": {"replicas": 3}}, False),
        ({"gang": "gates"}, {"scheduling": {"gang": "gates", "timeoutSeconds": 5}}, False),
        ({}, {"scheduling": {"schedulerName": "other"}}, True),
    ],
)
def test_scheduling_is_recorded_apart(scheduling, spec, differs):
    before, after = (build_workloads(make_job(**{"scheduling": scheduling} | more)) for more in ({}, spec))
    assert changed_names(before, after, read_scheduling) == (set(before) if differs else set())
    assert changed_names(before, after, read_configuration) == set()


@pytest.mark.parametrize(
    ("annotation", "rolls"),
    [
        ("rljob.dev/restart", {"gsm8k-head", "gsm8k-trainer", "gsm8k-rollout", "gsm8k-reward-correct"}),
        ("rljob.dev/restart-trainer", {"gsm8k-trainer"}),
        ("rljob.dev/restart-reward-correct", {"gsm8k-reward-correct"}),
        ("rljob.dev/restart-reward-other", set()),
        ("rljob.dev/other", set()),
    ],
)
def test_request_changes_template_and_configuration_of_its_roles_only(annotation, rolls):
    job = make_job()
    before = build_workloads(job)
    job.metadata.annotations[annotation] = "now"
    after = build_workloads(job)
    assert changed_names(before, after, read_template) == rolls
    assert changed_names(before, after, read_configuration) == rolls
    assert changed_names(before, after, read_config_hash) == set(), "the version of a reward stays"
