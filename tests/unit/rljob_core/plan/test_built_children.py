"""What is built once, and what makes it built again."""

import json
from types import MappingProxyType

import pytest

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.status import AvoidedNode
from rljob_core.defaults import DEFAULTS
from rljob_core.plan import built_children
from rljob_core.plan.built_children import BuiltChildren, build_checked

NO_MODELS = MappingProxyType({})
REWARD = {"name": "r", "function": {"inline": "x"}}
SHARED = {"name": "s", "rewardModelRef": {"name": "shared"}}


def make_job(status=None, metadata=None, **spec):
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}, "rewards": [REWARD, SHARED]} | spec
    metadata = {"name": "n", "uid": "u", "generation": 1} | (metadata or {})
    return RLJob.model_validate({"metadata": metadata, "spec": spec, "status": status or {}})


def make_models(uid="m", status=None, **spec):
    model = {"metadata": {"name": "shared", "uid": uid}, "spec": {"function": {"inline": "y"}} | spec}
    return {"shared": RewardModel.model_validate(model | {"status": status or {}})}


@pytest.fixture
def built(monkeypatch):
    """The names of the jobs that were built."""
    names = []

    def count(job, *inputs):
        names.append(job.metadata.name)
        return build_checked(job, *inputs)

    monkeypatch.setattr(built_children, "build_checked", count)
    return names


def avoid(node):
    return {"avoidedNodes": [AvoidedNode(node=node, role="trainer", pod="p", message="m").to_manifest()]}


CHANGES = {
    "spec": (make_job(rollout={"replicas": 2}), "t", DEFAULTS, make_models()),
    "decided replicas": (
        make_job().model_copy(update={"spec": make_job().spec.with_replicas({"r": 5})}),
        "t",
        DEFAULTS,
        make_models(),
    ),
    "uid": (make_job(metadata={"uid": "v"}), "t", DEFAULTS, make_models()),
    "restart": (make_job(metadata={"annotations": {"rljob.dev/restart": "1"}}), "t", DEFAULTS, make_models()),
    "avoided nodes": (make_job(status=avoid("n1")), "t", DEFAULTS, make_models()),
    "token": (make_job(), "other", DEFAULTS, make_models()),
    "defaults": (make_job(), "t", DEFAULTS.model_copy(update={"labels": {"team": "a"}}), make_models()),
    "model": (make_job(), "t", DEFAULTS, make_models(slots=7)),
    "recreated model": (make_job(), "t", DEFAULTS, make_models(uid="n")),
    "missing model": (make_job(), "t", DEFAULTS, NO_MODELS),
    "problem": (make_job(model={"source": "./relative"}), "t", DEFAULTS, make_models()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_input_is_built_again_and_equal_ones_once(built, name):
    memory = BuiltChildren()
    first = (make_job(), "t", DEFAULTS, make_models())
    for inputs in (first, CHANGES[name], first, CHANGES[name]):
        children, problems = memory.build(*inputs)
        fresh = build_checked(*inputs)
        assert (children, problems) == tuple(json.loads(json.dumps(fresh)))
    assert len(built) == 2


def test_what_no_child_depends_on_builds_nothing_again(built):
    memory = BuiltChildren()
    memory.build(make_job(), "t", DEFAULTS, make_models())
    metadata = {"resourceVersion": "9", "generation": 3, "labels": {"a": "b"}}
    job = make_job(status={"phase": "Running", "observedGeneration": 1}, metadata=metadata)
    memory.build(job, "t", DEFAULTS, make_models(status={"observedGeneration": 4}) | {"other": make_models()["shared"]})
    assert len(built) == 1


def test_result_belongs_to_the_caller():
    memory = BuiltChildren()
    children, _ = memory.build(make_job(), "t", DEFAULTS, NO_MODELS)
    children[0]["metadata"]["name"] = "changed"
    assert memory.build(make_job(), "t", DEFAULTS, NO_MODELS)[0][0]["metadata"]["name"] != "changed"


def test_memory_is_bounded_and_keeps_what_was_used_last(built):
    memory, sizes = BuiltChildren(), []
    for name in ("m", "n", "o"):
        memory.build(make_job(metadata={"name": name}), "t", DEFAULTS, NO_MODELS)
        sizes.append(memory.num_bytes)
    memory = BuiltChildren(max_bytes=(sizes[1] + sizes[2]) // 2)
    for name in ("a", "b", "a", "c", "a", "b"):
        memory.build(make_job(metadata={"name": name}), "t", DEFAULTS, NO_MODELS)
    assert built == ["m", "n", "o", "a", "b", "c", "b"]
