"""The objects of a replay: a head with another program, and trainers."""

from __future__ import annotations

from rljob_api.manifest.job import RLJobSpec
from rljob_cli.manifests import labels_of
from rljob_cli.replay.command import list_objects, separate
from rljob_core.plan.observed_job import name_of
from tests.support.driver_harness import make_job


def test_only_head_and_trainers_start() -> None:
    objects = list_objects(make_job(trainer={"replicas": 2}))
    workloads = {name_of(each): each for each in objects if each["kind"] in ("Job", "StatefulSet", "Deployment")}
    assert set(workloads) == {"t-head", "t-trainer"}
    assert {labels_of(each).get("rljob.dev/role") for each in objects} <= {None, "head", "trainer"}
    [head] = workloads["t-head"]["spec"]["template"]["spec"]["containers"]
    assert head["command"] == ["python", "-m", "rljob_trainer.replay", "/var/lib/rljob/replay.json"]


def test_engines_do_not_share_the_pods_of_trainers() -> None:
    rollout = {"placement": "trainer", "weightTransfer": "device"}
    spec = make_job(rollout=rollout, trainer={"replicas": 2}, schedule={"type": "synchronous"}).spec
    assert spec.shares_trainer
    found = RLJobSpec.model_validate(separate(spec).to_manifest())  # as the head reads it
    assert (found.shares_trainer, found.rollout.weight_transfer) == (False, "file")
    assert spec.shares_trainer, "the job is as it was"
