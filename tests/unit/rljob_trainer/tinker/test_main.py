"""What a training service reads of its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_trainer.head.environment import Environment
from rljob_trainer.tinker.main import read_settings
from tests.support.job_simulation import make_job, make_service_job

VARIABLES = {"RLJOB_TOKEN": "secret"}


def write(folder: Path, job: RLJob) -> Environment:
    spec = {"spec": job.spec.to_manifest(exclude_defaults=True)}
    document: dict[str, Any] = {"apiVersion": job.api_version, "kind": job.kind, "metadata": {"name": "gsm8k"}} | spec
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    return Environment(job, folder / "job.yaml", folder, "127.0.0.1", "/m", (), {})


def test_keys_follow_the_file_of_the_job(tmp_path):
    job = make_service_job({"clients": ["ann"]})
    settings = read_settings(write(tmp_path, job), VARIABLES)
    assert (settings.name, settings.host, settings.port, settings.max_adapters) == ("tiny", "", 8700, 16)
    first = settings.keys()
    assert first.keys() == {"ann"}
    write(tmp_path, make_service_job({"clients": ["ann", "bob"]}))
    assert settings.keys().keys() == {"ann", "bob"}
    assert settings.keys()["ann"] == first["ann"]


def test_address_and_name_can_be_given(tmp_path):
    environment = write(tmp_path, make_service_job({"modelName": "org/m"}))
    settings = read_settings(environment, VARIABLES | {"RLJOB_CLIENTS_ADDRESS": "127.0.0.1:80"})
    assert (settings.name, settings.host, settings.port) == ("org/m", "127.0.0.1", 80)
    with pytest.raises(UserError, match=r"spec.service is not set"):
        read_settings(write(tmp_path, make_job()), VARIABLES)
