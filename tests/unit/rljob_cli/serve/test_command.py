"""The job that `rljob serve` builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_cli.options import ServeOptions
from rljob_cli.serve import command
from rljob_cli.serve.command import build_job

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
    with pytest.raises(UserError, match=r"spec.rollout.replicas: "):
        build_job(MODEL, options(overrides=["spec.rollout.replicas=many"]))


def test_options_are_fields_of_the_service():
    service = build_job(MODEL, options(name="m", clients=["ann", "bob"], max_adapters=2, max_rank=8)).spec.service
    assert service is not None
    assert (service.model_name, service.clients, service.max_adapters, service.max_rank) == ("m", ["ann", "bob"], 2, 8)
    with pytest.raises(UserError, match=r"spec.service.clients.0: String should match pattern"):
        build_job(MODEL, options(clients=["A/b"]))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no config.json; pass hf://org/name, or a folder"):
        command._find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert command._find_model(str(tmp_path)) == str(tmp_path)
    assert command._find_model("hf://org/name") == "hf://org/name"
