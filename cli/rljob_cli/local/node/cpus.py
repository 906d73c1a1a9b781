"""The data type that this machine's CPUs compute fast.

Without instructions for bfloat16, torch and vLLM convert each value before they multiply it, which takes several times
as long as float32.
"""

from pathlib import Path

from rljob_api.manifest.job import RLJob

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of x86 and of Arm."""


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPUs have instructions for bfloat16. True where /proc/cpuinfo does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags)


def use_float32(job: RLJob) -> list[str]:
    """Let CPUs compute in float32 wherever the job leaves the type open. Return the paths of the changed fields."""
    spec, changed = job.spec, []
    trainer, rollout = spec.trainer, spec.rollout
    if "dtype" not in trainer.model_fields_set and not trainer.gpus_per_replica and not rollout.gpus_per_replica:
        trainer.dtype = "float32"
        changed.append("spec.trainer.dtype")
    for path, model in spec.served_models.items():
        if model.dtype == "auto" and not model.gpus:
            model.dtype = "float32"
            changed.append(f"{path}.dtype")
    return changed
