"""The fields of a new job that depend on the machine: GPUs of each role, dtype, and a model that fits. Pure.

Invariant: the job of N GPUs requests at most N, and rollouts share the trainer's GPU only where there is no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.quantity import show_bytes
from rljob_inputs.memory.plan import ModelFacts, Question, plan_memory

DEFAULT_MODEL = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
_MAX_TRAINER_GPUS = 8
_ASSUMED_BYTES = 16 * 2**30
"""Memory of a GPU that is not known."""
_CPU_TOKENS = 2048
"""By `rljob plan`, a job of the default model takes 11 GiB with it, and 22 GiB with the field's default."""
_BFLOAT16_CAPABILITY = 8.0
"""Compute capability of Ampere. vLLM refuses bfloat16 on older GPUs."""


def _qwen(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    }


LARGER_MODELS = {
    "hf://Qwen/Qwen2.5-1.5B-Instruct": _qwen(1536, 28, 12, 8960),
    "hf://Qwen/Qwen2.5-0.5B-Instruct": _qwen(896, 24, 14, 4864),
}
"""What a task whose model may be larger is tried with, in this order: by source, with config.json."""


@dataclass(frozen=True)
class Devices:
    """What a job is written for."""

    num_gpus: int = 0
    name: str = ""
    """Product of the GPUs; empty: unknown."""
    memory_bytes: int = 0
    """Memory of the smallest GPU. 0: unknown."""
    capability: float | None = None
    """CUDA's compute capability of the oldest. None: unknown."""

    def describe(self) -> str:
        if not self.num_gpus:
            return "CPUs"
        memory = show_bytes(self.memory_bytes) if self.memory_bytes else "unknown memory"
        return f"{count_gpus(self.num_gpus)} ({', '.join(filter(None, [self.name, memory]))})"


@dataclass(frozen=True)
class Roles:
    """GPUs of each role."""

    trainer: int
    rollouts: int
    """Replicas with one GPU each. 0: they share the trainer's."""
    judge: int


def divide(num_gpus: int, has_judge: bool) -> Roles:
    """Return the GPUs of each role. The trainer gets the largest power of two within half, which divides the batch."""
    judge = int(has_judge and num_gpus > 1)
    rest = num_gpus - judge
    trainer = 1
    while 2 * trainer <= min(rest // 2, _MAX_TRAINER_GPUS):
        trainer *= 2
    return Roles(trainer, rest - trainer, judge)


def build_device_fields(devices: Devices, has_judge: bool) -> dict[str, str]:
    """Return the placeholders of the templates, but for the model."""
    where = "On another machine: `rljob init` there, or here with --gpus N; --gpus 0 is for CPUs."
    values = {"devices": f"For {devices.describe()}. {where}", "rate": "1.0e-6" if devices.num_gpus else "1.0e-5"}
    if not devices.num_gpus:
        trainer = ["replicas: 1", "gpusPerReplica: 0      # GPUs of each replica; 0 runs on CPU"]
        trainer += [f"microBatchTokens: {_CPU_TOKENS} # computed at once; fewer take less memory"]
        return values | {"trainer": _join(trainer), "rollout": _join(["replicas: 1", "gpusPerReplica: 0"])}
    roles, dtype = divide(devices.num_gpus, has_judge), choose_dtype(devices)
    trainer = ["replicas: 1", f"gpusPerReplica: {roles.trainer}", f"dtype: {dtype.ljust(15)} # float16 before Ampere"]
    rollout = [f"replicas: {roles.rollouts}", "gpusPerReplica: 1"]
    if not roles.rollouts:
        rollout = ["placement: trainer     # on the trainer's GPU, in turns with it", "gpusPerReplica: 1"]
    return values | {"trainer": _join(trainer), "rollout": _join(rollout)}


def choose_dtype(devices: Devices) -> str:
    is_old = devices.capability is not None and devices.capability < _BFLOAT16_CAPABILITY
    return "float16" if is_old else "bfloat16"


def choose_model(devices: Devices, build: Callable[[str], str]) -> str:
    """Return the largest of LARGER_MODELS whose job, which `build` writes, fits by `rljob plan`; else the default."""
    if not devices.num_gpus:
        return DEFAULT_MODEL
    memory = devices.memory_bytes or _ASSUMED_BYTES
    for source, config in LARGER_MODELS.items():
        job = RLJob.model_validate(yaml.safe_load(build(source)))
        needs = plan_memory(Question(job, {source: ModelFacts(config)}, memory))
        if all(need.fits for need in needs if need.resource == "gpu"):
            return source
    return DEFAULT_MODEL


def describe_job(devices: Devices, found: Devices, has_judge: bool, model: str) -> str:
    """Return what was found, and what the job was written for."""
    here = f"found {found.describe()}" if found.num_gpus else "found no GPU"
    asked = "" if found == devices else f", asked for {devices.describe()}"
    return f"{here}{asked}; the job: {', '.join(_describe_roles(devices, has_judge))}, {model}"


def _describe_roles(devices: Devices, has_judge: bool) -> list[str]:
    if not devices.num_gpus:
        return ["all on CPUs"]
    roles = divide(devices.num_gpus, has_judge)
    if roles.rollouts:
        parts = [f"a trainer with {count_gpus(roles.trainer)}, {roles.rollouts} x 1 for rollouts"]
    else:
        parts = [f"trainer and rollouts share {count_gpus(roles.trainer)}"]
    return [*parts, *(["1 for the judge"] if roles.judge else []), choose_dtype(devices)]


def count_gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"


def _join(lines: Sequence[str]) -> str:
    return "\n    ".join(lines)
