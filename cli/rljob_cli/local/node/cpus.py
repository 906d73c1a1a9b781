"""The data type that this machine's CPUs compute fast.

Without instructions for bfloat16, torch and vLLM convert each value before they multiply it, which takes several times
as long as float32.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_inputs.models.config import find_dtype_problem

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of x86 and of Arm."""


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPUs have instructions for bfloat16. True where /proc/cpuinfo does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags)


def use_float32(job: RLJob, trained: Mapping[str, Any]) -> list[str]:
    """Let CPUs compute in float32 wherever the job leaves the type open, and the model allows it. Return the paths of
    the changed fields. `trained`: config.json of the model to train; empty if it is unknown."""
    spec, changed = job.spec, []
    trainer, rollout = spec.trainer, spec.rollout
    is_open = "dtype" not in trainer.model_fields_set and not trainer.gpus_per_replica and not rollout.gpus_per_replica
    if is_open and not find_dtype_problem(trained, "float32", on_cpus=True):
        trainer.dtype = "float32"
        changed.append("spec.trainer.dtype")
    for path, model in spec.served_models.items():
        if model.dtype == "auto" and not model.gpus_per_replica:
            model.dtype = "float32"
            changed.append(f"{path}.dtype")
    return changed
