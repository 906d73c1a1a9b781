"""The environment of the trainer's image, which NVIDIA's container runtime and the operator read or set."""

import re
import tomllib

from rljob_core.children import build_children
from rljob_core.defaults import DEFAULTS
from tests.paths import ROOT
from tests.support.job_simulation import make_job

TEXT = (ROOT / "trainer_image" / "Dockerfile").read_text()
ENV = dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", TEXT, re.M))))


def build_containers():
    job = make_job(trainer={"gpusPerReplica": 8}, rollout={"gpusPerReplica": 1})
    specs = [
        child["spec"]["template"]["spec"] for child in build_children(job, "t", DEFAULTS) if "template" in str(child)
    ]
    return {container["name"]: container for spec in specs for container in spec["containers"]}


def test_image_gets_cuda_and_nvml_of_the_driver_and_no_gpu():
    assert ENV["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in ENV, "the head requests no GPU, and would get all of its node"


def test_operator_leaves_the_gpus_of_a_container_to_the_device_plugin():
    containers = build_containers()
    assert {"head", "trainer", "rollout"} <= containers.keys()
    for name, container in containers.items():
        variables = {entry["name"] for entry in container["env"]}
        assert not {variable for variable in variables if variable.startswith(("NVIDIA_", "CUDA_"))}, name
        has_gpus = "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
        assert has_gpus == (name in ("trainer", "rollout"))


def test_image_has_the_clients_of_all_trackers_and_the_types_of_tinker():
    package = tomllib.loads((ROOT / "trainer_image" / "pyproject.toml").read_text())["project"]
    found = set(re.findall(r"--extra (\w+)", TEXT))
    assert found == package["optional-dependencies"].keys() - {"cpu", "gpu"}


def test_pods_can_write_where_the_image_says_as_any_user():
    assert ENV["HOME"] == "/tmp"
    assert re.search(r"^USER 65532:65532$", TEXT, re.M)


def test_compiler_of_cuda_in_the_lock_belongs_to_the_headers_of_torch():
    lock = (ROOT / "uv.lock").read_text()
    versions = dict(
        re.findall(
            r'^name = "(nvidia-cuda-nvcc|nvidia-nvvm|nvidia-cuda-crt|nvidia-cuda-runtime)"\nversion = "(\d+\.\d+)',
            lock,
            re.M,
        )
    )
    assert len(versions) == 4
    assert len(set(versions.values())) == 1, "nvcc: CUDA compiler and CUDA toolkit headers are incompatible"
