"""The files of Pods can be read by the images that running roles keep over an upgrade."""

import json

import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Topology
from rljob_operator.children.config import build_job_config, build_reward_config
from rljob_operator.children.reward import find_services
from tests.paths import ROOT

STORED = next(yaml.safe_load_all((ROOT / "tests" / "data" / "configuration" / "stored.yaml").read_text()))


def find_unknown(data, known, path="spec"):
    """Fields of `data` that `known` lacks."""
    if isinstance(data, list):
        return [field for i, each in enumerate(data) for field in find_unknown(each, known[i], f"{path}[{i}]")]
    if not isinstance(data, dict):
        return []
    missing = [f"{path}.{name}" for name in data if name not in known]
    return missing + [f for name in data.keys() & known.keys() for f in find_unknown(data[name], known[name], name)]


def test_files_have_no_field_that_version_0_1_0_does_not_know():
    job = RLJob.model_validate(STORED)
    job.spec.priority_class_name = "high"
    job.spec.scheduling.force_delete_after_seconds = 600
    for role in (job.spec.head, job.spec.trainer, job.spec.rollout, *job.spec.rewards):
        role.backoff_window_seconds = 60
        role.node_pool.gpu_resource = "amd.com/gpu"
        role.node_pool.topology = Topology(key="rack")
    for slow in (job.spec.rollout, *job.spec.served_models.values()):
        slow.startup_timeout_seconds = 3000
    file = yaml.safe_load(build_job_config(job)["data"]["job.yaml"])
    assert find_unknown(file["spec"], STORED["spec"]) == []
    services = find_services(job)
    assert len(services) == 3
    for service in services:
        reward = yaml.safe_load(build_reward_config(service)["data"]["reward.yaml"])
        stored = next(each for each in STORED["spec"]["rewards"] if each["name"] == reward["name"])
        assert find_unknown(reward, stored) == []


def fill_defaults(data, schema):
    """The data with the defaults of a CRD's schema, as the API server fills them in."""
    if isinstance(data, list):
        return [fill_defaults(each, schema["items"]) for each in data]
    properties = schema.get("properties")
    if not isinstance(data, dict) or not properties:
        return data
    filled = {name: field["default"] for name, field in properties.items() if "default" in field} | data
    return {name: fill_defaults(value, properties.get(name, {})) for name, value in filled.items()}


def test_version_0_1_0_reads_the_same_values_from_the_file():
    """Its defaults are those that the file leaves out: no default has changed since."""
    crds = json.loads((ROOT / "tests" / "data" / "crds" / "0.1.0.json").read_text())
    crd = next(crd for crd in crds if crd["spec"]["names"]["kind"] == "RLJob")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    file = yaml.safe_load(build_job_config(RLJob.model_validate(STORED))["data"]["job.yaml"])
    assert fill_defaults(file["spec"], schema) == STORED["spec"]


def test_file_has_all_that_programs_read():
    job = RLJob.model_validate(STORED)
    file = yaml.safe_load(build_job_config(job)["data"]["job.yaml"])
    assert RLJob.model_validate(file).spec == job.spec
