"""The files of Pods have all that programs read, and nothing else."""

import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Topology
from rljob_core.children.config import build_job_config, build_service_config
from rljob_core.children.service import find_services
from tests.paths import ROOT
from tests.support import job_simulation

STORED = next(yaml.safe_load_all((ROOT / "tests" / "data" / "configuration" / "stored.yaml").read_text()))


def test_files_have_no_field_that_no_program_reads():
    job = RLJob.model_validate(STORED)
    job.spec.scheduling.force_delete_after_seconds = 600
    for role in (job.spec.head, job.spec.trainer, job.spec.rollout, *job.spec.rewards):
        role.backoff_window_seconds = 6000
        role.node_pool.gpu_resource = "amd.com/gpu"
        role.node_pool.topology = Topology(key="rack")
    for slow in (job.spec.rollout, *job.spec.served_models.values()):
        slow.startup_timeout_seconds = 3000
    files = [build_job_config(job), *map(build_service_config, find_services(job))]
    assert len(files) == 4
    for name in ("scheduling", "forceDelete", "backoffWindow", "gpuResource", "topology", "startupTimeout"):
        assert name not in str([file["data"] for file in files])


def test_file_has_all_that_programs_read():
    job = RLJob.model_validate(STORED)
    file = yaml.safe_load(build_job_config(job)["data"]["job.yaml"])
    assert RLJob.model_validate(file).spec == job.spec


def test_file_of_a_tool_has_only_what_its_server_reads():
    fields = {"timeoutSeconds": 7, "retries": 5, "deadlineSeconds": 90, "onError": "invalid"}
    services = find_services(job_simulation.make_agent_job(tool=fields))
    (service,) = (each for each in services if each.settings.name == "calculator")
    data, function = build_service_config(service)["data"], {"inline": "def add(): ..."}
    expected = {"name": "calculator", "function": function, "timeoutSeconds": 7}
    assert yaml.safe_load(data["service.yaml"]) == expected
    assert data["function.py"] == function["inline"]
