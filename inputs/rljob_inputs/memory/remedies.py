"""What would make a need fit: changes of fields, each tried on the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.parts import Need
from rljob_inputs.memory.plan import Question, max_row_tokens, micro_batch_tokens, plan_memory
from rljob_inputs.models.config import find_context_length

_MAX_FACTOR = 8
"""At most this many times the ranks of the job are suggested."""
_GPUS_PER_REPLICA = (1, 2, 4, 8)
_LORA_RANK = 32
_LENGTH_STEP = 256


@dataclass(frozen=True)
class Remedy:
    """Fields to set, and what the need becomes."""

    fields: dict[str, Any]
    """By path, such as trainer.gradientCheckpointing."""
    num_bytes: int

    def describe(self) -> str:
        settings = ", ".join(f"{path}: {_to_text(value)}" for path, value in self.fields.items())
        return f"{settings} ({self.num_bytes / 2**30:.1f} GiB)"


def find_remedies(question: Question, need: Need) -> list[Remedy]:
    """Return changes that make `need` fit, each enough alone; if none is, pairs. Empty: no change of the job does."""
    if need.role == "trainer":
        return _trainer_remedies(question, need)
    if need.role == "rollout" and need.resource == "gpu":
        return list(_rollout_remedies(question, need))
    return []


def _trainer_remedies(question: Question, need: Need) -> list[Remedy]:
    if need.resource == "host" and question.job.spec.trainer.gpus_per_replica:
        waiting = {"checkpoint.asynchronous": False} if question.job.spec.saves_asynchronously else {}
        return [remedy] if (remedy := _try(question, need, waiting)) else []
    spec = question.job.spec
    checkpointing = {} if spec.trainer.recomputes_activations else {"trainer.gradientCheckpointing": True}
    sharding = {} if spec.trainer.num_copies == 1 else {"trainer.sharding": "full"}
    lora = {} if spec.trainer.lora else {"trainer.lora": {"rank": _LORA_RANK}}
    choices: list[dict[str, Any]] = [sharding, checkpointing, lora, *_offloads(question)]
    singles = [fields for fields in choices if fields]
    found = [remedy for fields in singles if (remedy := _try(question, need, fields))]
    found += [remedy for search in (_fewer_tokens, _more_ranks) if (remedy := search(question, need, {}))]
    if found:
        return found
    for base in [*singles, {**checkpointing, **lora}]:
        pairs = [_try(question, need, base), _fewer_tokens(question, need, base), _more_ranks(question, need, base)]
        found += [remedy for remedy in pairs if remedy]
        if found:
            return found[:2]
    return []


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
    rollout, facts = question.job.spec.rollout, question.models[question.job.spec.model.source]
    heads = facts.shape.num_heads if facts.shape else 0
    larger = [gpus for gpus in _GPUS_PER_REPLICA if gpus > rollout.gpus_per_replica and heads % gpus == 0]
    tried = (_try(question, need, {"rollout.gpusPerReplica": gpus}) for gpus in larger)
    if fewest := next((remedy for remedy in tried if remedy), None):
        yield fewest
    one_text = next((part.num_bytes for part in need.peak.parts if part.name == "KV cache: one text"), 0)
    other = need.num_bytes - one_text
    if need.available is not None and one_text and other < need.available:
        length = rollout.max_model_len or _context(question)
        shorter = int(length * (need.available - other) / one_text) // _LENGTH_STEP * _LENGTH_STEP
        if shorter > rollout.sampling.max_tokens and (remedy := _try(question, need, {"rollout.maxModelLen": shorter})):
            yield remedy


def _context(question: Question) -> int:
    return find_context_length(question.models[question.job.spec.model.source].config) or 0


def _try(question: Question, need: Need, fields: dict[str, Any]) -> Remedy | None:
    """Return the remedy if the same need fits with these fields, which the manifest's rules allow."""
    if not fields:
        return None
    data = question.job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path, value in fields.items():
        *parents, leaf = path.split(".")
        section = data["spec"]
        for name in parents:
            section = section.setdefault(name, {})
        section[leaf] = value
    try:
        job = RLJob.model_validate(data)
    except ValidationError:  # such as ranks that do not divide the batch
        return None
    changed = replace(question, job=job)
    same = (each for each in plan_memory(changed) if (each.role, each.resource) == (need.role, need.resource))
    found = next(same)
    return Remedy(fields, found.num_bytes) if found.fits else None


def _to_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_to_text(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
