"""GPUs of a Pod."""

from __future__ import annotations

from rljob_cli.local.node.gpus import GpuPool, count_gpus, find_resources
from tests.support.job_simulation import FUNCTION, make_job

NVIDIA = frozenset({"nvidia.com/gpu"})


def test_count_gpus_includes_sidecars_and_no_other_init_containers():
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    pod = {"spec": {"containers": [{}], "initContainers": [gpu | {"restartPolicy": "Always"}, gpu]}}
    assert count_gpus(pod, NVIDIA) == 2


def test_gpus_of_this_machine_stand_for_every_resource_that_the_job_names():
    slices = {"nodePool": {"gpuResource": "nvidia.com/mig-3g.40gb"}}
    rewards = [{"name": "correct", "function": FUNCTION, **slices}]
    spec = make_job(trainer={"nodePool": {"gpuResource": "amd.com/gpu"}}, rewards=rewards).spec
    resources = find_resources(spec)
    assert resources == {"amd.com/gpu", "nvidia.com/gpu", "nvidia.com/mig-3g.40gb"}
    pool = GpuPool(["0", "1", "2"], resources)
    for name, resource in (("trainer-0", "amd.com/gpu"), ("judge", "nvidia.com/mig-3g.40gb")):
        limits = {resource: "1", "rdma/hca_shared_devices_a": "1"}
        assert pool.acquire(name, pool.count({"spec": {"containers": [{"resources": {"limits": limits}}]}}))
    assert pool.acquire("rollout", 2) is None, "one is left"
