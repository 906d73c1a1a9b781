"""What the head's Pod gets of several sources of prompts."""

import json

from rljob_core.children import build_children
from rljob_core.defaults import DEFAULTS
from tests.support.job_simulation import make_job


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
