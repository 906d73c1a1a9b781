"""GPUs of a Pod."""

from __future__ import annotations

import pytest

from rljob_cli.local.node.gpus import GpuPool, count_gpus, find_least_bytes, find_resources, select_gpus
from rljob_inputs.machine.nvidia import Gpu, parse_list
from tests.support.job_simulation import FUNCTION, make_job

GPUS = [(0, "a", 24564), (1, "b", 81559), (2, "c", "[N/A]")]
NVIDIA = frozenset({"nvidia.com/gpu"})


def test_count_gpus_includes_sidecars_and_no_other_init_containers():
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    pod = {"spec": {"containers": [{}], "initContainers": [gpu | {"restartPolicy": "Always"}, gpu]}}
    assert count_gpus(pod, NVIDIA) == 2


@pytest.mark.parametrize(
    ("gpus", "mib"),
    [(["0"], 24564), (["1"], 81559), (["0", "1"], 24564), (["GPU-b"], 81559), (["7"], None), ([], None)],
)
def test_the_smallest_gpu_that_may_be_used_counts(gpus, mib):
    listing = "\n".join(f"{index}, GPU-{uuid}, 580.65, {mib}, L4, 8.9" for index, uuid, mib in GPUS)
    assert find_least_bytes(select_gpus(parse_list(listing), gpus)) == (mib and mib * 2**20)
    assert parse_list("No devices were found\n") == ()


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


@pytest.mark.parametrize(
    ("visible", "selected"),
    [(["0"], ["0"]), (["1", "0"], ["0", "1"]), (["GPU-b"], ["1"]), (["MIG-a"], []), ([], [])],
)
def test_gpus_are_selected_by_index_or_uuid_and_not_by_their_slices(visible, selected):
    gpus = [Gpu("0", "GPU-aa", "A100", 1, "580.65"), Gpu("1", "GPU-bb", "A100", 1, "580.65")]
    assert [gpu.index for gpu in select_gpus(gpus, visible)] == selected


def test_gpus_of_rollouts_in_the_trainers_pods_are_those_of_the_trainer():
    amd = {"nodePool": {"gpuResource": "amd.com/gpu"}, "gpusPerReplica": 1}
    pool = {"nodePool": amd["nodePool"]}
    rewards = [{"name": "correct", "function": FUNCTION, **pool}]
    shared = {"placement": "trainer", "gpusPerReplica": 1}
    assert find_resources(make_job(trainer=amd, head=pool, rewards=rewards, rollout=shared).spec) == {"amd.com/gpu"}
