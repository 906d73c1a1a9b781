"""What would make a need fit: changes of fields, or a smaller model, each tried on the plan. Pure.

Remedies come in the order of what they cost the user: memory that nothing needs, speed, LoRA instead of all weights,
offload, more GPUs, and at last another model. Invariant: no remedy takes the GPU from another need that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rljob_inputs.memory import known_models
from rljob_inputs.memory.changes import change_job
from rljob_inputs.memory.gpu_counts import count_all_gpus
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
from rljob_inputs.memory.shared import GENERATE
from rljob_inputs.models.config import find_context_length

_MAX_FACTOR = 8
"""At most this many times the ranks of the job are suggested."""
_GPUS_PER_REPLICA = (1, 2, 4, 8)
_LORA_RANK = 32
_LENGTH_STEP = 256
_SHARES = tuple(percent / 100 for percent in range(90, 15, -5))
"""Values of rollout.gpuMemoryUtilization that are tried."""


@dataclass(frozen=True)
class Remedy:
    """Fields to set, and what the need becomes."""

    fields: dict[str, Any]
    """By path, such as trainer.gradientCheckpointing."""
    num_bytes: int
    model: str = ""
    """A model whose shape fits in place of the job's; empty: the job's own fits."""

    def describe(self) -> str:
        settings = [f"{path}: {_to_text(value)}" for path, value in self.fields.items()]
        settings += [f"a model of the size of {self.model}"] if self.model else []
        return f"{', '.join(settings)} ({self.num_bytes / 2**30:.1f} GiB)"


def find_remedies(question: Question, need: Need) -> list[Remedy]:
    """Return changes that make `need` fit, each enough alone; if none is, pairs; if these are not, smaller models.
    Empty: no change of the job does."""
    if need.role == "trainer":
        return _trainer_remedies(question, need)
    if need.role == "rollout" and need.resource == "gpu":
        return list(_rollout_remedies(question, need)) or list(_smaller_models(question, need))
    return []


def lower_share(question: Question, need: Need) -> Remedy | None:
    """Return the largest gpuMemoryUtilization with which the trainer's GPU fits, if the rollouts need too much of it
    while they are awake."""
    spec = question.job.spec
    if not spec.shares_trainer or need.peak.name != GENERATE:
        return None
    tried = ({"rollout.gpuMemoryUtilization": share} for share in _SHARES if share < spec.rollout_gpu_share)
    return next((remedy for fields in tried if (remedy := _try(question, need, fields))), None)


def _trainer_remedies(question: Question, need: Need) -> list[Remedy]:
    if need.resource == "host" and question.job.spec.trainer.gpus_per_replica:
        waiting = {"checkpoint.asynchronous": "never"} if question.job.spec.saves_asynchronously else {}
        return [remedy] if (remedy := _try(question, need, waiting)) else []
    spec = question.job.spec
    stronger = _more_recomputation(question)
    checkpointing: dict[str, Any] = stronger[-1] if stronger else {}
    lora: dict[str, Any] = {} if spec.trainer.lora else {"trainer.lora": {"rank": _LORA_RANK}}
    tried = [
        lower_share(question, need),
        _fewer_tokens(question, need, {}),
        next((remedy for fields in stronger if (remedy := _try(question, need, fields))), None),
        *(_try(question, need, fields) for fields in (lora, *_offloads(question))),
        _more_ranks(question, need, {}),
    ]
    if found := [remedy for remedy in tried if remedy]:
        return found
    singles = [fields for fields in (checkpointing, lora, *_offloads(question)) if fields]
    for base in [*singles, {**checkpointing, **lora}]:
        pairs = [_try(question, need, base), _fewer_tokens(question, need, base), _more_ranks(question, need, base)]
        if found := [remedy for remedy in pairs if remedy]:
            return found[:2]
    return list(_smaller_models(question, need, {}, lora))


def _smaller_models(question: Question, need: Need, *bases: dict[str, Any]) -> Iterator[Remedy]:
    """Yield the largest known model that fits with each of the fields, if these allow a larger one than the fields
    before them."""
    source = question.job.spec.model.source
    facts = question.models[source]
    limit = facts.shape.num_parameters if facts.shape else 0
    largest = 0
    for fields in bases or ({},):
        for name, config in known_models.CONFIGS.items():
            other = ModelFacts(config)
            assert other.shape is not None
            if not largest < other.shape.num_parameters < limit:
                continue
            with_model = replace(question, models={**question.models, source: other})
            if remedy := _try_model(with_model, need, fields):
                largest = other.shape.num_parameters
                yield replace(remedy, model=name)
                break


def _more_recomputation(question: Question) -> list[dict[str, Any]]:
    """Return the values of trainer.gradientCheckpointing that need less memory, the fastest one first."""
    chosen = find_recomputation(question)
    return [{"trainer.gradientCheckpointing": choice} for choice in find_stronger(chosen)]


def _offloads(question: Question) -> list[dict[str, Any]]:
    """Return the values of trainer.offload that move more to the host, the cheapest one first."""
    spec = question.job.spec
    if not spec.trainer.gpus_per_replica or spec.trainer.offloads_state:
        return []
    has_reference = spec.algorithm.kl.coefficient > 0 and spec.trainer.lora is None
    reference = [] if spec.trainer.offloads_reference or not has_reference else ["reference"]
    return [{"trainer.offload": value} for value in (*reference, "all")]


def _fewer_tokens(question: Question, need: Need, base: dict[str, Any]) -> Remedy | None:
    """Return the largest micro-batch, by halves, that fits; none is smaller than the longest row."""
    tokens, row = micro_batch_tokens(question), max_row_tokens(question)
    while tokens > row:
        tokens = max(row, tokens // 2)
        if remedy := _try(question, need, {**base, "trainer.microBatchTokens": tokens}):
            return remedy
    return None


def _more_ranks(question: Question, need: Need, base: dict[str, Any]) -> Remedy | None:
    trainer = question.job.spec.trainer
    factor = 2
    while factor <= _MAX_FACTOR:
        if remedy := _try(question, need, {**base, "trainer.replicas": factor * trainer.replicas}):
            return remedy
        factor *= 2
    return None


def _rollout_remedies(question: Question, need: Need) -> Iterator[Remedy]:
    spec, facts = question.job.spec, question.models[question.job.spec.model.source]
    rollout, heads = spec.rollout, facts.shape.num_heads if facts.shape else 0
    larger = [gpus for gpus in _GPUS_PER_REPLICA if gpus > rollout.gpus_per_replica and heads % gpus == 0]
    if spec.shares_trainer:
        larger = [gpus for gpus in larger if spec.trainer.gpus_per_replica % gpus == 0]
    tried = (_try(question, need, {"rollout.gpusPerReplica": gpus}) for gpus in larger)
    if fewest := next((remedy for remedy in tried if remedy), None):
        yield fewest
    one_text = next((part.num_bytes for part in need.peak.parts if part.name == "KV cache: one text"), 0)
    other = need.num_bytes - one_text
    if need.available is not None and one_text and other < need.available:
        length = rollout.max_model_len or _context(question)
        shorter = int(length * (need.available - other) / one_text) // _LENGTH_STEP * _LENGTH_STEP
        if shorter > rollout.sampling.answer_tokens and (
            remedy := _try(question, need, {"rollout.maxModelLen": shorter})
        ):
            yield remedy


def _context(question: Question) -> int:
    return find_context_length(question.models[question.job.spec.model.source].config) or 0


def _try(question: Question, need: Need, fields: dict[str, Any]) -> Remedy | None:
    """Return the remedy if the same need fits with these fields, which the manifest's rules allow."""
    return _try_model(question, need, fields) if fields else None


def _try_model(question: Question, need: Need, fields: dict[str, Any]) -> Remedy | None:
    """Also without fields: the question may have another model."""
    try:
        changed = replace(question, job=change_job(question.job, fields))
    except ValidationError:  # such as ranks that do not divide the batch
        return None
    if question.num_gpus is not None:
        allowed = max(question.num_gpus, count_all_gpus(question.job.spec))
        if count_all_gpus(changed.job.spec) > allowed:
            return None
    after = {(each.role, each.resource): each for each in plan_memory(changed)}
    found = after[need.role, need.resource]
    misfits = {each.role for each in after.values() if each.resource == "gpu" and each.fits is False}
    if not found.fits or (need.resource == "gpu" and _fits_any(question, misfits)):
        return None
    return Remedy(fields, found.num_bytes)


def _fits_any(question: Question, roles: set[str]) -> bool:
    """Whether the GPUs of one of the roles fit now."""
    return bool(roles) and any(
        each.role in roles for each in plan_memory(question) if each.resource == "gpu" and each.fits
    )


def _to_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_to_text(each)}" for name, each in value.items()) + "}"
    return str(value)
