"""The memory of GPUs, by the names that people and node labels use; and how many GPUs a job takes in all. Pure."""

import re
from collections.abc import Mapping, Sequence

from rljob_api.manifest.job import RLJobSpec

_MIB = 2**20
_MEMORY_MIB = {
    "t4": 15360,
    "v100-16gb": 16384,
    "v100-32gb": 32768,
    "a10": 23028,
    "a10g": 23028,
    "rtx-3090": 24576,
    "rtx-4090": 24564,
    "rtx-5090": 32607,
    "rtx-a6000": 49140,
    "rtx-6000-ada": 49140,
    "rtx-pro-6000": 97887,
    "l4": 23034,
    "l40s": 46068,
    "a100-40gb": 40960,
    "a100-80gb": 81920,
    "h100-80gb": 81559,
    "h200-141gb": 143771,
    "b200": 182633,
}
"""As nvidia-smi reports it. RTX A6000 and RTX 6000 Ada have it without ECC, their default; with ECC it is 46068."""
_ALIASES = {
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "b200-180gb": "b200",
    "a6000": "rtx-a6000",
    **{name: f"rtx-{name.removeprefix('rtx')}" for name in ("3090", "4090", "5090", "rtx3090", "rtx4090", "rtx5090")},
}
_WHOLE_GPU = "nvidia.com/gpu"
"""The resource to which the labels of products belong."""
_MEMORY_SUFFIX = ".memory"
"""Suffix of a resource's label with its MiB, from NVIDIA's GPU feature discovery: nvidia.com/gpu.memory,
nvidia.com/mig-3g.40gb.memory."""
_LABEL_PRODUCTS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator")
_UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}
NAMES = (*_MEMORY_MIB, *_ALIASES)


def find_gpu_bytes(name: str) -> int | None:
    """Return the memory of a GPU: h100-80gb, NVIDIA-H100-80GB-HBM3, or a size such as 80GiB. None: unknown, a slice of
    a GPU, or one of a laptop, which has less memory than the name suggests."""
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(Mi|Gi|MiB|GiB|GB)", name.strip()):
        return int(float(size[1]) * _UNITS[size[2]]) or None
    parts = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in ("nvidia", "tesla", "geforce")]
    if not {"mig", "laptop"}.isdisjoint(parts):  # NVIDIA-H100-80GB-HBM3-MIG-1g.10gb
        return None
    for length in (3, 2, 1):
        for start in range(len(parts) - length + 1):
            key = "-".join(parts[start : start + length])
            if _ALIASES.get(key, key) in _MEMORY_MIB:
                memory = _MEMORY_MIB.get(_name_size(key, parts))
                return memory * _MIB if memory else None
    return None


def _name_size(key: str, words: Sequence[str]) -> str:
    """Return the full name of a GPU. Of one that exists in several sizes, another word may have the size, such as
    A100-SXM4-40GB or a100-40; one with which it does not exist is not replaced by the usual one."""
    sized = [name for name in _MEMORY_MIB if name.startswith(f"{key}-") and name.endswith("gb")]
    sizes = [found[1] for word in words if (found := re.fullmatch(r"(\d+)g?b?", word))]
    return f"{key}-{sizes[0]}gb" if sized and sizes else _ALIASES.get(key, key)


def read_gpu_labels(node_selector: Mapping[str, str], resource: str = _WHOLE_GPU) -> int | None:
    """Return the memory of the GPUs of a node pool, by the labels that it selects. None: they do not determine it.
    `resource`: what the pool counts as one GPU."""
    memory = node_selector.get(resource + _MEMORY_SUFFIX, "")
    if memory.isdigit():
        return int(memory) * _MIB
    if resource != _WHOLE_GPU:
        return None  # these labels are of the whole GPU
    names = [node_selector[label] for label in _LABEL_PRODUCTS if label in node_selector]
    return next((found for name in names if (found := find_gpu_bytes(name))), None)


def count_gpus(spec: RLJobSpec) -> dict[str, int]:
    """Return the GPUs that the job requests, by the field that requests them: served models, trainer, rollouts. What
    runs in the trainer's Pods requests none."""
    counts = {
        f"{service.path}.{service.settings.served_model_field}.gpusPerReplica": service.settings.replicas
        * model.gpus_per_replica
        for service in spec.services
        if (model := service.settings.served_model) and model.placement == "separate"
    }
    for name, role in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        is_counted = spec.trains if name == "trainer" else not spec.shares_trainer
        counts[f"spec.{name}.gpusPerReplica"] = role.replicas * role.gpus_per_replica * is_counted
    return {path: count for path, count in counts.items() if count}


def count_all_gpus(spec: RLJobSpec) -> int:
    return sum(count_gpus(spec).values())
