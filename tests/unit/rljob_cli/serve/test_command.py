"""The job that `rljob serve` builds, what of it runs, and the keys of clients."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_cli.manifests import role_of
from rljob_cli.options import ServeOptions
from rljob_cli.serve import command
from rljob_cli.serve.command import build_job, build_service

MODEL = "hf://org/Some.Model"


def options(**changes: Any) -> ServeOptions:
    return ServeOptions(model=MODEL, **{"gpus": 0, **changes})


def test_on_cpus_there_are_ranks_with_adapters_and_one_rollout():
    job = build_job(MODEL, options(ranks=2, max_rank=8))
    assert job.metadata.name == "serve-org-some-model"
    trainer, lora = job.spec.trainer, job.spec.trainer.lora
    assert lora is not None
    assert (trainer.num_ranks, lora.rank, lora.publish) == (2, 8, "adapter")
    assert (job.spec.rollout.replicas, job.spec.rollout.gpus_per_replica) == (1, 0)


def test_gpus_are_divided_and_one_is_too_few():
    job = build_job(MODEL, options(gpus=4))
    assert (job.spec.trainer.gpus_per_replica, job.spec.num_rollout_replicas) == (2, 2)
    with pytest.raises(UserError, match="needs two GPUs"):
        build_job(MODEL, options(gpus=1))


def test_fields_of_the_job_can_be_set():
    assert build_job(MODEL, options(overrides=["spec.rollout.maxModelLen=512"])).spec.rollout.max_model_len == 512
    with pytest.raises(UserError, match=r"--set: spec.rollout.replicas: "):
        build_job(MODEL, options(overrides=["spec.rollout.replicas=many"]))


def test_the_service_takes_the_heads_place_and_there_are_no_rewards():
    children = build_service(build_job(MODEL, options()))
    workloads = {child["kind"]: child for child in children if child["kind"] in ("Job", "StatefulSet", "Deployment")}
    roles = sorted(role_of(child["spec"]["template"]) for child in workloads.values())
    assert roles == ["head", "rollout", "trainer"]
    [head] = workloads["Job"]["spec"]["template"]["spec"]["containers"]
    assert head["command"][:3] == ["python", "-m", "rljob_trainer.tinker"]


def test_a_part_that_ends_is_replaced_until_it_ends_too_often():
    state = {"terminated": {"exitCode": 137, "message": "joining the head"}}
    container: dict[str, Any] = {"name": "trainer", "state": state, "restartCount": 6}
    status = {"phase": "Failed", "containerStatuses": [container]}
    metadata = {"name": "s-trainer-0", "labels": {"rljob.dev/role": "trainer"}}
    pods = {"s-trainer-0": {"metadata": metadata, "spec": {}, "status": status}}
    cluster: Any = SimpleNamespace(
        check=lambda: None, store=SimpleNamespace(pods=pods), paths=SimpleNamespace(root=Path("/r"))
    )
    command._check(cluster)
    container["restartCount"] = 7
    with pytest.raises(TransientError, match="the service ended: trainer of s-trainer-0 ended with exit code 137"):
        command._check(cluster)
    container["restartCount"], state["terminated"]["exitCode"] = 0, 78
    with pytest.raises(TransientError, match="ended with exit code 78"):
        command._check(cluster)


def test_keys_stay_when_the_service_starts_again(tmp_path: Path):
    settings = tmp_path / "service.json"
    first = command._find_keys(settings, ["ann"])
    assert first["ann"].startswith("tml-")
    settings.write_text(json.dumps({"keys": first}))
    again = command._find_keys(settings, ["ann", "bob"])
    assert again["ann"] == first["ann"] != again["bob"]
    with pytest.raises(UserError, match="--client A/b: must be lower-case letters"):
        command._find_keys(settings, ["A/b"])


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no config.json; pass hf://org/name, or a folder"):
        command._find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert command._find_model(str(tmp_path)) == str(tmp_path)
    assert command._find_model("hf://org/name") == "hf://org/name"


def test_a_port_that_is_in_use_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .*; pass another --port"):
            command._check_port("127.0.0.1", port)
