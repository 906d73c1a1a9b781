"""From a job and its files to the objects of a cluster."""

from __future__ import annotations

import base64
import copy
from pathlib import Path

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_cli.options import ClaimOptions
from rljob_cli.submit.plan import build_owners_patch, plan_submission
from rljob_cli.submit.sources import MAX_SMALL_BYTES, File, Tree
from rljob_core.plan.job import render_children

TRAIN = b'{"prompt": "a", "answer": "b"}\n'


def file(name, content=None, num_bytes=None):
    return File(name, Path("/here") / name, len(content) if num_bytes is None else num_bytes, content)


def one(name, content):
    return Tree(name, False, (file(name, content),))


def folder(name, **sizes):
    return Tree(name, True, tuple(file(n.replace("_", "."), num_bytes=size) for n, size in sizes.items()))


TREES = {
    "train.jsonl": one("train.jsonl", TRAIN),
    "reward.py": one("reward.py", b"def compute_score(): pass\n"),
    "./model": folder("model", config_json=10, model_safetensors=3 * 2**30),
    "big": folder("big", a_jsonl=2**20),
}


def make_job(model="hf://org/model", train="train.jsonl", **spec):
    rewards = [{"name": "correct", "function": {"file": "reward.py", "entrypoint": "compute_score"}}]
    spec = {"model": {"source": model}, "data": {"train": {"source": train}}, "rewards": rewards} | spec
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": spec}


def plan(*manifests, trees=TREES, **options):
    return plan_submission(manifests, trees, "team", ClaimOptions(**options))


def test_functions_and_small_data_become_one_config_map():
    submission = plan(make_job())
    assert submission.config_map["data"] == {
        "train.train.jsonl": TRAIN.decode(),
        "correct.reward.py": "def compute_score(): pass\n",
    }
    assert submission.config_map["immutable"]
    name = submission.config_map["metadata"]["name"]
    spec = submission.job["spec"]
    reference = {"name": name, "key": "correct.reward.py"}
    assert spec["rewards"][0]["function"] == {"entrypoint": "compute_score", "configMapKeyRef": reference}
    assert spec["data"]["train"] == {"source": "/mnt/files/train/train.jsonl"}
    assert submission.uploads == []
    assert [m["kind"] for m in submission.objects] == ["ConfigMap", "RLJob"]


def test_head_of_the_planned_job_mounts_the_data_where_its_source_is():
    submission = plan(make_job(head={"template": {"spec": {"volumes": [{"name": "own", "emptyDir": {}}]}}}))
    children = render_children(RLJob.model_validate(submission.job), "token")
    pod = next(child for child in children if child["kind"] == "Job")["spec"]["template"]["spec"]
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "submitted-files"]
    [volume] = [v for v in pod["volumes"] if v["name"] == "submitted-files"]
    assert (mount["mountPath"], volume["configMap"]["items"]) == (
        "/mnt/files",
        [{"key": "train.train.jsonl", "path": "train/train.jsonl"}],
    )
    assert "own" in [v["name"] for v in pod["volumes"]], "the user's template stays"
    environment = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
    assert environment["RLJOB_TRAIN_DATA"] == "/mnt/files/train/train.jsonl"


def test_changed_file_changes_the_spec():
    first, second = plan(make_job()), plan(make_job(), trees=TREES | {"reward.py": one("reward.py", b"def f(): 1\n")})
    assert first.job != second.job
    assert plan(make_job()).job == first.job


def test_folder_of_data_and_binary_files_keep_their_names():
    rows = Tree("rows", True, (file("a.parquet", b"\xff\x00"), file("b/c.jsonl", TRAIN)))
    submission = plan(make_job(train="rows"), trees=TREES | {"rows": rows})
    assert submission.config_map["binaryData"] == {"train.a.parquet": base64.b64encode(b"\xff\x00").decode()}
    assert submission.job["spec"]["data"]["train"]["source"] == "/mnt/files/train/rows"
    items = submission.job["spec"]["head"]["template"]["spec"]["volumes"][0]["configMap"]["items"]
    assert items == [
        {"key": "train.a.parquet", "path": "train/rows/a.parquet"},
        {"key": "train.b-c.jsonl", "path": "train/rows/b/c.jsonl"},
    ]


def test_model_and_large_data_are_copied_to_a_new_claim_that_fits_them():
    submission = plan(make_job(model="./model", train="big"), storage_class="fast")
    model, data = submission.uploads
    spec = submission.job["spec"]
    assert spec["model"]["source"] == f"pvc://sums-files/{model.folder}/model"
    assert spec["data"]["train"] == {"source": f"pvc://sums-files/{data.folder}/big"}
    assert model.folder == f"sums/{TREES['./model'].digest}"
    assert submission.claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "4Gi"}},
        "storageClassName": "fast",
    }
    assert [m["kind"] for m in submission.objects] == ["PersistentVolumeClaim", "ConfigMap", "RLJob"]
    assert list(submission.config_map["data"]) == ["correct.reward.py"], "functions are always in the ConfigMap"


def test_small_evaluation_stays_in_the_config_map_next_to_large_training_data():
    job = make_job(train="big")
    job["spec"]["data"]["eval"] = {"source": "train.jsonl"}
    submission = plan(job)
    assert [upload.path for upload in submission.uploads] == ["big"]
    assert submission.job["spec"]["data"]["eval"]["source"] == "/mnt/files/eval/train.jsonl"


def test_existing_claim_is_used_and_not_created():
    submission = plan(make_job(model="./model"), claim="shared")
    assert submission.claim is None
    assert submission.job["spec"]["model"]["source"].startswith("pvc://shared/sums/")


def test_files_that_two_fields_name_are_copied_once():
    rewards = [{"name": "judge", "judge": {"model": {"source": "./model"}, "template": "x"}}]
    submission = plan(make_job(model="./model", rewards=rewards))
    assert len(submission.uploads) == 1
    judge = submission.job["spec"]["rewards"][0]["judge"]["model"]["source"]
    assert judge == submission.job["spec"]["model"]["source"]


def test_job_without_local_files_is_only_applied():
    job = make_job(train="hf://org/data", rewards=[{"name": "r", "function": {"inline": "x = 1"}}])
    before = copy.deepcopy(job)
    submission = plan(job)
    assert submission.objects == [before | {"metadata": {"name": "sums", "namespace": "team"}}]
    assert job == before


def test_functions_of_reward_models_are_in_the_same_config_map():
    model = {"kind": "RewardModel", "metadata": {"name": "rm"}, "spec": {"function": {"file": "reward.py"}}}
    submission = plan(make_job(), model)
    name = submission.config_map["metadata"]["name"]
    assert submission.others[0]["spec"]["function"] == {"configMapKeyRef": {"name": name, "key": "rm.reward.py"}}
    assert submission.others[0]["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("is_model", [False, True])
def test_function_of_several_files_is_mounted_with_its_folder(is_model):
    files = (file("reward.py", b"import parsing.numbers"), file("parsing/numbers.py", b"x = 1"))
    trees = TREES | {"reward.py": Tree("reward.py", False, files)}
    model = {"kind": "RewardModel", "metadata": {"name": "correct"}, "spec": {"function": {"file": "reward.py"}}}
    inline = [{"name": "r", "function": {"inline": "x"}}]
    submission = plan(make_job(rewards=inline), model, trees=trees) if is_model else plan(make_job(), trees=trees)
    reward = submission.others[0]["spec"] if is_model else submission.job["spec"]["rewards"][0]
    assert reward["function"]["file"] == "/mnt/files/correct/reward.py"
    assert "configMapKeyRef" not in reward["function"]
    spec = reward["template"]["spec"]
    assert spec["containers"] == [
        {
            "name": "reward",
            "volumeMounts": [{"name": "submitted-files", "mountPath": "/mnt/files", "readOnly": True}],
        }
    ]
    assert spec["volumes"][0]["configMap"]["items"] == [
        {"key": "correct.reward.py", "path": "correct/reward.py"},
        {"key": "correct.parsing-numbers.py", "path": "correct/parsing/numbers.py"},
    ]


def test_function_of_an_agent_is_mounted_into_its_own_container():
    files = (file("tools.py", b"import parsing"), file("parsing.py", b"x = 1"))
    trees = TREES | {"tools.py": Tree("tools.py", False, files), "user.py": one("user.py", b"def respond(): ...")}
    tools = [{"name": "calc", "function": {"file": "tools.py"}}]
    data = {"train": {"source": "train.jsonl"}, "format": "chat"}
    agent = {"type": "loop", "user": {"function": {"file": "user.py"}}, "tools": tools}
    submission = plan(make_job(data=data, agent=agent), trees=trees)
    spec = submission.job["spec"]["agent"]
    name = submission.config_map["metadata"]["name"]
    assert spec["user"]["function"] == {"configMapKeyRef": {"name": name, "key": "user.user.py"}}
    assert spec["tools"][0]["function"] == {"file": "/mnt/files/calc/tools.py"}
    children = render_children(RLJob.model_validate(submission.job), "t")
    (pod,) = (
        child["spec"]["template"]["spec"]
        for child in children
        if (child["kind"], child["metadata"]["name"]) == ("Deployment", "sums-agent-calc")
    )
    (container,) = pod["containers"]
    assert "/mnt/files" in [mount["mountPath"] for mount in container["volumeMounts"]]


def make_command_job(working_dir="app"):
    data = {"train": {"source": "train.jsonl"}, "format": "chat"}
    runner = {"command": ["./agent.sh"], "workingDir": working_dir}
    return make_job(data=data, agent={"type": "program", "runner": runner}, rewards=[])


def test_folder_of_a_command_is_mounted_and_its_files_can_be_executed():
    trees = TREES | {"app": Tree("app", True, (file("agent.sh", b"#!/bin/sh"), file("lib/tool.py", b"x = 1")))}
    submission = plan(make_command_job(), trees=trees)
    runner = submission.job["spec"]["agent"]["runner"]
    assert runner["workingDir"] == "/mnt/files/runner"
    assert runner["template"]["spec"]["volumes"][0]["configMap"]["items"] == [
        {"key": "runner.agent.sh", "path": "runner/agent.sh", "mode": 0o755},
        {"key": "runner.lib-tool.py", "path": "runner/lib/tool.py", "mode": 0o755},
    ]
    children = render_children(RLJob.model_validate(submission.job), "t")
    (pod,) = (
        child["spec"]["template"]["spec"]
        for child in children
        if (child["kind"], child["metadata"]["name"]) == ("Deployment", "sums-agent-runner")
    )
    (container,) = pod["containers"]
    assert "/mnt/files" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_folder_of_a_command_that_is_too_large_is_refused_with_what_to_do():
    trees = TREES | {"app": folder("app", agent_py=10, data_bin=MAX_SMALL_BYTES)}
    with pytest.raises(UserError, match=r"spec\.agent\.runner\.workingDir: app is too large: .* runner\.image"):
        plan(make_command_job(), trees=trees)


def test_data_source_that_the_user_set_stays():
    job = make_job()
    job["spec"]["data"]["train"]["dataSource"] = "openai/gsm8k"
    assert plan(job).job["spec"]["data"]["train"]["dataSource"] == "openai/gsm8k"


def test_object_in_another_namespace_is_refused():
    job = make_job()
    job["metadata"]["namespace"] = "other"
    with pytest.raises(UserError, match=r"metadata.namespace is other.*pass -n other"):
        plan(job)


def test_functions_that_are_too_large_are_refused():
    trees = TREES | {"reward.py": Tree("reward.py", False, (file("reward.py", num_bytes=MAX_SMALL_BYTES + 1),))}
    with pytest.raises(UserError, match=r"spec.rewards\[0\].function.file: reward.py is too large.*900 KiB"):
        plan(make_job(), trees=trees)


def test_files_whose_keys_would_be_the_same_are_refused():
    rows = Tree("rows", True, (file("a b.jsonl", TRAIN), file("a-b.jsonl", TRAIN)))
    with pytest.raises(UserError, match=r"spec.data.train.source: the files of rows would have equal keys"):
        plan(make_job(train="rows"), trees=TREES | {"rows": rows})


def test_owners_patch_names_all_owners_by_uid():
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums", "uid": "1"}}
    owner = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "name": "sums", "uid": "1"}
    assert build_owners_patch([job]) == {"metadata": {"ownerReferences": [owner]}}
