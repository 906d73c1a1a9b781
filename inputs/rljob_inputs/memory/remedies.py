"""What would make a need fit: one change of the job, or a smaller model, tried on the plan. Pure.

Changes are tried in the order of what they cost the user, and of each the largest value first: memory that nothing
needs, speed, LoRA instead of all weights, offload, and at last another model; for rollouts more GPUs, shorter texts and
another model. The first one that fits is the remedy. Invariant: no remedy takes the GPU from another need that has it.

To say which size of a model fits, it has the shapes of one family from 0.5B to 32B, as their config.json has them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.gpus import count_all_gpus
from rljob_inputs.memory.parts import Need
from rljob_inputs.memory.plan import (
    ModelFacts,
    Question,
    find_recomputation,
    max_row_tokens,
    micro_batch_tokens,
    plan_memory,
)
from rljob_inputs.memory.recomputation import find_stronger
from rljob_inputs.memory.roles import GENERATE


def _qwen(hidden: int, layers: int, heads: int, key_heads: int, intermediate: int, *, is_tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": is_tied,
        "vocab_size": 151936 if is_tied else 152064,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-32B": _qwen(5120, 64, 40, 8, 27648, is_tied=False),
    "Qwen2.5-14B": _qwen(5120, 48, 40, 8, 13824, is_tied=False),
    "Qwen2.5-7B": _qwen(3584, 28, 28, 4, 18944, is_tied=False),
    "Qwen2.5-3B": _qwen(2048, 36, 16, 2, 11008, is_tied=True),
    "Qwen2.5-1.5B": _qwen(1536, 28, 12, 2, 8960, is_tied=True),
    "Qwen2.5-0.5B": _qwen(896, 24, 14, 2, 4864, is_tied=True),
}
"""By name, the largest first."""


SHARE = "rollout.gpuMemoryUtilization"
_SHARES = tuple(percent / 100 for percent in range(90, 15, -5))


@dataclass(frozen=True)
class Remedy:
    """Fields to set, and what the need becomes."""

    fields: dict[str, Any]
    """By path, such as trainer.gradientCheckpointing. Empty: a smaller model."""
    num_bytes: int
    model: str = ""
    """A model whose shape fits in place of the job's; empty: the job's own fits."""

    def describe(self) -> str:
        changes = [f"{path}: {value}".replace("'", "") for path, value in self.fields.items()]
        return f"{', '.join(changes) or f'a model of the size of {self.model}'} ({self.num_bytes / 2**30:.1f} GiB)"


def find_remedy(question: Question, need: Need) -> Remedy | None:
    """Return the first change that makes the need of a GPU fit. None: none does, or the need is of a host, where more
    memory does."""
    if need.resource == "host" or need.role not in ("trainer", "rollout"):
        return None
    changes = _change_trainer(question, need) if need.role == "trainer" else _change_rollout(question)
    for fields in changes:
        if num_bytes := _try(question, need, fields):
            return Remedy(fields, num_bytes)
    source, shape = question.spec.model.source, question.shape
    for name, config in CONFIGS.items():
        other = ModelFacts(config)
        assert other.shape is not None
        if shape is None or other.shape.num_parameters < shape.num_parameters:
            smaller = replace(question, models={**question.models, source: other})
            if num_bytes := _try(smaller, need, {}):
                return Remedy({}, num_bytes, name)
    return None


def _change_trainer(question: Question, need: Need) -> Iterator[dict[str, Any]]:
    spec, trainer = question.spec, question.spec.trainer
    if spec.shares_trainer and need.peak.name == GENERATE:  # awake, they need too much of the GPU
        yield from ({SHARE: share} for share in _SHARES if share < spec.rollout_gpu_share)
    tokens, row = micro_batch_tokens(question), max_row_tokens(question)
    while tokens > row:
        tokens = max(row, tokens // 2)
        yield {"trainer.microBatchTokens": tokens}
    for choice in find_stronger(find_recomputation(question)):
        yield {"trainer.gradientCheckpointing": choice}
    if trainer.lora is None:
        yield {"trainer.lora": {"rank": 32}}
    if not trainer.offloads_state:
        yield {"trainer.offload": "all"}


def _change_rollout(question: Question) -> Iterator[dict[str, Any]]:
    spec, shape = question.spec, question.shape
    for factor in (2, 4, 8):
        gpus = factor * spec.rollout.gpus_per_replica
        is_divisor = not spec.shares_trainer or spec.trainer.gpus_per_replica % gpus == 0
        if is_divisor and shape is not None and shape.num_heads % gpus == 0:
            yield {"rollout.gpusPerReplica": gpus}
    length = question.context_length or 0
    while (length := length // 2) > spec.rollout.sampling.answer_tokens:
        yield {"rollout.maxModelLen": length}


def _try(question: Question, need: Need, fields: dict[str, Any]) -> int | None:
    """Return what the same need becomes, if it fits with these fields, which the manifest's rules allow."""
    try:
        changed = replace(question, job=change_job(question.job, fields))
    except ValidationError:
        return None
    if question.num_gpus is not None:
        allowed = max(question.num_gpus, count_all_gpus(question.spec))
        if count_all_gpus(changed.job.spec) > allowed:
            return None
    after = {(each.role, each.resource): each for each in plan_memory(changed)}
    misfits = {each.role for each in after.values() if each.resource == "gpu" and each.fits is False}
    if misfits and any(each.role in misfits and each.resource == "gpu" and each.fits for each in plan_memory(question)):
        return None
    found = after[need.role, need.resource]
    return found.num_bytes if found.fits else None


def change_job(job: RLJob, fields: Mapping[str, Any], removed: Collection[str] = ()) -> RLJob:
    """Return the job with these fields, and without `removed` ones, which get their defaults. Raise ValidationError if
    a rule forbids it. Paths are those within spec, such as trainer.gradientCheckpointing or rewards[0].model.dtype."""
    data = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path in (*fields, *removed):
        *parents, leaf = path.split(".")
        section = data["spec"]
        for name, index in map(_split_index, parents):
            section = section.setdefault(name, {}) if index is None else section[name][index]
        if path in fields:
            section[leaf] = fields[path]
        else:
            section.pop(leaf, None)
    return RLJob.model_validate(data)


def _split_index(part: str) -> tuple[str, int | None]:
    """Return name and index: rewards[0] -> rewards, 0."""
    name, _, index = part.removesuffix("]").partition("[")
    return name, int(index) if index else None
