"""What a change of a field does to a running job, in docs/reference.md and the chart's policy."""

import json

import pytest

from dev import on_change
from rljob_api.generate.crd import build_object_schema
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from tests.paths import ROOT

SPEC = build_object_schema(RLJob)["properties"]["spec"]
EFFECTS = {
    "rollout.backoffLimit": "none",
    "activeDeadlineSeconds": "none",
    "ttlSecondsAfterFinished": "none",
    "rollout.replicas": "none",
    "scheduling.gang": "none",
    "schedule.steps": "reloaded",
    "checkpoint.everySteps": "reloaded",
    "outageSeconds": "reloaded",
    "tracking.trajectoriesSize": "reloaded",
    "rollout.sampling.temperature": "reloaded",
    "head.env": "head",
    "evaluation.everySteps": "head",
    "hangDetection.minSeconds": "reloaded",
    "rollout.maxModelLen": "head, rollout",
    "rollout.env": "rollout",
    "trainer.resources.limits": "trainer",
    "rewards[].env": "reward",
    "rewards[].weight": "head",
    "agent.tools[].timeoutSeconds": "head, agent",
    "agent.runner.command": "agent",
    "agent.environment.id": "agent",
    "imagePullSecrets[].name": "all",
    "priorityClassName": "all",
    "suspend": "all are deleted",
    "model.source": "refused",
    "data.mix": "refused",
    "task": "refused",
    "trainer.replicas": "refused while it runs",
    "trainer.gpusPerReplica": "refused while it runs",
    "rewards[].model.placement": "refused while it runs",
}


@pytest.mark.parametrize(("path", "effect"), EFFECTS.items())
def test_effect_of_a_change_is_what_a_cluster_showed(path, effect):
    assert on_change.find_effect(SPEC, tuple(path.split("."))) == effect


def test_fields_that_start_the_run_again_are_as_few_paths_as_possible():
    effects = {
        "model.source": "refused",
        "data.train": "refused",
        "data.eval.source": "head",
        "head.env": "head",
        "head.backoffLimit": "none",
        "suspend": "all are deleted",
        "imagePullSecrets[].name": "all",
        "rewards[].weight": "head, reward",
        "rewards[].env": "reward",
        "checkpoint.storage.a": "head",
        "checkpoint.storage.b": "trainer",
        "checkpoint.keep": "reloaded",
    }
    expected = {"": "model data imagePullSecrets", "head": "env", "rewards[]": "weight", "checkpoint": "storage"}
    assert on_change.find_restarting({tuple(path.split(".")): effect for path, effect in effects.items()}) == expected


def test_roles_are_named_own_where_their_fields_are():
    effects = {
        "head.env": "head",
        "rewards[].env": "reward",
        "agent.user.slots": "head, agent",
        "model.source": "refused",
    }
    named = on_change.name_effects({tuple(path.split(".")): effect for path, effect in effects.items()})
    assert named == {
        "head.env": "head",
        "ROLE.env": "own",
        "rewards[].env": "own",
        "agent.user.slots": "head, own",
        "model.source": "refused",
    }


def test_fields_of_all_roles_replace_the_pods_of_their_own_role():
    for field in Role.model_fields.values():
        effects = {
            on_change.find_effect(SPEC, path)
            for path in on_change.find_fields(SPEC)
            if path[:2] in (("head", field.alias), ("trainer", field.alias))
        }
        assert effects in ({"head", "trainer"}, {"none"}), field.alias


def test_check_finds_drift_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_change, "find_fields", lambda schema: ())
    monkeypatch.setattr(on_change, "build_reference", lambda *schemas: "page\n")
    monkeypatch.setattr(on_change, "ROOT", tmp_path)
    for name in ("docs/reference.md", on_change.FILE):
        (tmp_path / name).parent.mkdir(parents=True)
    assert on_change.main(["--check"]) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "docs/reference.md is out of date; run `make generate`" in capsys.readouterr().err
    assert on_change.main([]) == 0
    assert on_change.main(["--check"]) == 0


def test_policy_of_the_chart_warns_of_fields_that_the_page_names():
    fields = json.loads((ROOT / on_change.FILE).read_text())
    assert {"env", "template"} <= set(fields["head"].split())
    assert {"everySteps", "keep"}.isdisjoint(fields["checkpoint"].split())
