"""The chart's policy warns of a change that starts a run again, in the API server's own words and CEL."""

import json
import subprocess

import pytest
from kubernetes import client

from rljob_cluster.host.go_programs import find_or_build
from tests.integration.apiserver.manifests import smallest
from tests.paths import CHART
from tests.support.waiting import wait_for

PLACE = ("rljob.dev", "v1alpha1", "default", "rljobs")
AGAIN = "Validation failed for ValidatingAdmissionPolicy"


@pytest.fixture(scope="module")
def patch(control_plane, api_client, crds):
    """A function that patches a running job in a dry run, and returns the warnings of the API server."""
    command = [find_or_build("helm") / "helm", "template", "x", CHART, "-s", "templates/restartwarning.yaml"]
    manifest = subprocess.run([*command, "--kube-version", "1.35.0"], capture_output=True, text=True, check=True).stdout
    control_plane.kubectl("apply", "-f", "-", input=manifest.replace("failurePolicy: Ignore", "failurePolicy: Fail"))
    custom = client.CustomObjectsApi(api_client)
    custom.create_namespaced_custom_object(*PLACE, build_job("runs"))
    custom.create_namespaced_custom_object(*PLACE, build_job("waits"))
    custom.create_namespaced_custom_object(
        *PLACE, build_job("stored", checkpoint={"persistentVolumeClaim": {"claimName": "runs"}})
    )
    for name in ("runs", "stored"):
        set_status(custom, name, "Running")

    def run(spec, name="runs"):
        headers = custom.patch_namespaced_custom_object_with_http_info(*PLACE, name, {"spec": spec}, dry_run="All")[2]
        return headers.get("Warning", "")

    wait_for(lambda: AGAIN in run({"head": {"env": {"A": "b"}}}), "the policy is in force")
    return run


def build_job(name, **spec):
    job = smallest("RLJob")
    rewards = [{"name": each, "function": {"inline": "x = 1"}} for each in ("a", "b")]
    return job | {"metadata": {"name": name}, "spec": job["spec"] | {"rewards": rewards} | spec}


def set_status(custom, name, phase):
    status = {"phase": phase, "startTime": "2026-01-01T00:00:00Z"}
    custom.patch_namespaced_custom_object_status(*PLACE, name, {"status": status})


REWARDS = build_job("a")["spec"]["rewards"]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"head": {"env": {"A": "b"}}}, "spec.head.env"),
        (
            {"trainer": {"env": {"A": "b"}}, "rollout": {"maxModelLen": 64}},
            "spec.rollout.maxModelLen, spec.trainer.env",
        ),
        ({"rollout": {"sampling": {"maxTokens": 9}}}, "spec.rollout.sampling.maxTokens"),
        ({"rewards": [REWARDS[0] | {"weight": 2}, REWARDS[1]]}, "spec.rewards[].weight"),
        ({"rewards": REWARDS[:1]}, "spec.rewards[].name"),
        ({"checkpoint": {"asynchronous": "never"}}, "spec.checkpoint.asynchronous"),
        ({"priorityClassName": "high"}, "spec.priorityClassName"),
    ],
    ids=json.dumps,
)
def test_a_change_that_starts_the_run_again_is_named_and_stored(patch, spec, named):
    warning = patch(spec)
    assert f"a change of {named}" in warning
    assert "starts the run again from step 0: it has neither checkpoint.persistentVolumeClaim nor" in warning


@pytest.mark.parametrize(
    "spec",
    [
        {"checkpoint": {"everySteps": 5, "keep": 5}, "outageSeconds": 7000},
        {"schedule": {"steps": 500}},
        {"rollout": {"replicas": 3, "env": {"A": "b"}}},
        {"rewards": [REWARDS[0] | {"env": {"A": "b"}, "replicas": 3}, REWARDS[1]]},
        {"activeDeadlineSeconds": 70, "ttlSecondsAfterFinished": 7},
        {"suspend": True, "head": {"env": {"A": "b"}}},
    ],
    ids=json.dumps,
)
def test_other_changes_have_no_warning(patch, spec):
    assert AGAIN not in patch(spec)


def test_a_job_without_pods_has_no_warning(patch):
    assert AGAIN not in patch({"head": {"env": {"A": "b"}}}, "waits")


def test_a_job_with_a_claim_loses_the_steps_since_its_last_checkpoint(patch):
    assert "a change of spec.head.env starts the run again from its last checkpoint" in patch(
        {"head": {"env": {"A": "b"}}}, "stored"
    )


def test_a_job_that_has_ended_has_no_warning(patch, api_client):
    custom = client.CustomObjectsApi(api_client)
    custom.create_namespaced_custom_object(*PLACE, build_job("ended"))
    set_status(custom, "ended", "Succeeded")
    assert AGAIN not in patch({"head": {"env": {"A": "b"}}}, "ended")
