"""What the head's Pod gets of several sources of prompts, and what it is in a training service."""

import base64
import json

from rljob_core.backend import key_of
from rljob_core.children import build_children, keep
from rljob_core.defaults import DEFAULTS
from tests.support.job_simulation import make_job, make_service_job


def build_pod(**data):
    train = {"train": {"source": "pvc://sums/train.jsonl"}}
    children = build_children(make_job(data=train | data), "token", DEFAULTS)
    [head] = [child for child in children if child["kind"] == "Job"]
    return head["spec"]["template"]["spec"]


def read_env(pod):
    return {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}


def test_head_finds_and_mounts_each_source():
    mix = [{"name": "code", "source": "pvc://code/a.jsonl"}, {"name": "hub", "source": "hf://org/data"}]
    pod = build_pod(mix=mix)
    first = read_env(pod)["RLJOB_TRAIN_DATA"]
    code, hub = json.loads(read_env(pod)["RLJOB_MIX_DATA"])
    assert (first.rpartition("/")[2], code.rpartition("/")[2], hub) == ("train.jsonl", "a.jsonl", "hf://org/data")
    claims = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each}
    assert {"sums", "code"} <= claims


def test_head_finds_the_rows_of_a_warm_start_last():
    mix = [{"name": "code", "source": "pvc://code/a.jsonl"}]
    job = make_job(
        data={"train": {"source": "pvc://sums/t.jsonl"}, "mix": mix, "warmStart": {"source": "pvc://given/w.jsonl"}},
        schedule={"warmStart": {"steps": 1}},
    )
    [head] = [child for child in build_children(job, "token", DEFAULTS) if child["kind"] == "Job"]
    pod = head["spec"]["template"]["spec"]
    assert [path.rpartition("/")[2] for path in json.loads(read_env(pod)["RLJOB_MIX_DATA"])] == ["a.jsonl", "w.jsonl"]
    assert "given" in {each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}


def test_head_of_one_source_has_no_variable_of_others():
    assert "RLJOB_MIX_DATA" not in read_env(build_pod())


def list_children(token="token", **service):
    built = build_children(make_service_job(service), token, DEFAULTS)
    return {(child["kind"], child["metadata"]["name"].removeprefix("gsm8k-")): child for child in built}


def test_head_of_a_service_runs_it_and_its_service_has_the_port_of_clients():
    found = list_children()
    assert {name for kind, name in found if kind in ("Job", "StatefulSet", "Deployment")} == {
        *("head", "trainer", "rollout")
    }
    [container] = found["Job", "head"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "rljob_trainer.tinker"]
    assert "RLJOB_TRAIN_DATA" not in {each["name"] for each in container["env"]}
    assert {"name": "clients", "containerPort": 8700, "protocol": "TCP"} in container["ports"]
    [port] = [each for each in found["Service", "head"]["spec"]["ports"] if each["name"] == "clients"]
    assert port["port"] == 8700


def test_each_client_has_a_key_that_follows_from_the_token():
    def read_keys(**changes):
        data = list_children(**changes)["Secret", "clients"]["data"]
        return {client: base64.b64decode(key).decode() for client, key in data.items()}

    first = read_keys(clients=["ann", "bob"])
    assert all(key.startswith("tml-") for key in first.values())
    assert first["ann"] != first["bob"]
    assert read_keys(clients=["ann", "eve"])["ann"] == first["ann"], "a key stays over an edit"
    assert read_keys(clients=["ann"], token="other")["ann"] != first["ann"]


def test_other_clients_restart_nothing_and_other_limits_the_head_alone():
    def read_annotations(kind, name, **changes):
        return list_children(**changes)[kind, name]["spec"]["template"]["metadata"]["annotations"]

    for kind, name in (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout")):
        before = read_annotations(kind, name)
        assert read_annotations(kind, name, clients=["ann"]) == before
        assert (read_annotations(kind, name, maxAdapters=2) == before) is (name != "head")
    children = build_children(make_service_job(), "token", DEFAULTS)
    later = build_children(make_service_job(outageSeconds=60), "token", DEFAULTS)
    old, new = ({key_of(child): child for child in each if child["kind"] == "Job"} for each in (children, later))
    assert not keep.find_unchanged(new, old), "it does not read the file again, as a driver does"
