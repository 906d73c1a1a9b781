"""The memory of GPUs by name, by size and by the labels of nodes."""

import pytest

from rljob_inputs.memory.gpus import NAMES, find_gpu_bytes, read_gpu_labels

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("h100-80gb", 81559),
        ("H100", 81559),
        ("NVIDIA-H100-80GB-HBM3", 81559),
        ("nvidia-h100-80gb", 81559),
        ("NVIDIA-A100-SXM4-40GB", 40960),
        ("a100", 81920),
        ("NVIDIA-L4", 23034),
        ("Tesla-T4", 15360),
        ("NVIDIA-GeForce-RTX-3090", 24576),
        ("rtx4090", 24564),
        ("4090", 24564),
        ("NVIDIA GeForce RTX 5090", 32607),
        ("NVIDIA-RTX-A6000", 49140),
        ("a6000", 49140),
        ("NVIDIA-RTX-6000-Ada-Generation", 49140),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", 97887),
        ("a100-40", 40960),
        ("A100-40G", 40960),
        ("NVIDIA-A100-PCIE-40GB", 40960),
        ("NVIDIA-H100-NVL", 81559),
        ("80GiB", 80 * 1024),
        ("24564MiB", 24564),
    ],
)
def test_names_and_sizes_are_understood(name, mib):
    assert find_gpu_bytes(name) == mib * MIB


@pytest.mark.parametrize(
    "name",
    [
        "x100",
        "",
        "80",
        "h1000",
        "gb",
        "6000",
        "a100-400gb",
        "NVIDIA-A100-SXM-64GB",
        "h100-40gb",
        "0GiB",
        "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
        "NVIDIA-GeForce-RTX-4090-Laptop-GPU",
    ],
)
def test_an_unknown_name_has_no_memory(name):
    assert find_gpu_bytes(name) is None


def test_every_listed_name_has_a_memory():
    assert all(find_gpu_bytes(name) for name in NAMES)


def test_labels_of_a_node_pool_determine_the_memory():
    assert read_gpu_labels({"nvidia.com/gpu.memory": "143771"}) == 143771 * MIB
    assert read_gpu_labels({"cloud.google.com/gke-accelerator": "nvidia-l4"}) == 23034 * MIB
    assert read_gpu_labels({"nvidia.com/gpu.product": "NVIDIA-H200"}) == 143771 * MIB
    assert read_gpu_labels({"pool": "gpus"}) is None


def test_a_slice_has_its_own_memory_and_never_that_of_the_whole_gpu():
    whole = {"nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert read_gpu_labels(whole, "nvidia.com/mig-3g.40gb") is None
    labels = whole | {"nvidia.com/mig-3g.40gb.memory": "40448"}
    assert read_gpu_labels(labels, "nvidia.com/mig-3g.40gb") == 40448 * MIB
