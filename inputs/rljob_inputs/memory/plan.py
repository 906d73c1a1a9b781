"""The memory plan of a job: what one GPU and one Pod of each role need, by part, and whether it fits. Pure.

Leaves the formulas to trainer.py and roles.py. Invariant: the plan is of the job as it is, and an unknown model or GPU
makes it smaller, never wrong: a need without a shape has no model, and without a known GPU nothing is said to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rljob_api.manifest.job import RLJob, RLJobSpec, Service
from rljob_api.manifest.roles import ALL_LINEAR, NodePool
from rljob_api.manifest.scorers import ServedModel
from rljob_inputs.memory import limits, roles
from rljob_inputs.memory.gpus import read_gpu_labels
from rljob_inputs.memory.limits import ShardingMode, choose_sharding
from rljob_inputs.memory.parts import Moment, Need, Part, build_moment
from rljob_inputs.memory.shapes import Shape, read_shape
from rljob_inputs.memory.trainer import GRADIENTS, Work, count_for_sharding, plan_offloaded, plan_rank
from rljob_inputs.models.config import Config, find_context_length

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_TAKES_MASKS = ("auto", "packed", "sdpa", "eager")
"""Implementations of attention that take the masks of shared prompts, unless rows are packed (policy.attention)."""
_TREE_TOKENS = 1024
"""Lines with shared prompts are at most this long, unless one row is longer (policy.layout)."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a checkpoint without its weights."""

    config: Config
    num_parameters: int = 0
    """By the weights' headers or sizes. 0: unknown."""

    @property
    def shape(self) -> Shape | None:
        return read_shape(self.config, self.num_parameters)


@dataclass(frozen=True)
class Question:
    """A job, and what the plan may know in addition."""

    job: RLJob
    models: Mapping[str, ModelFacts]
    """By source."""
    parse_quantity: Callable[[str], float | None]
    """Bytes of a Kubernetes quantity."""
    gpu_bytes: int | None = None
    """Memory of every GPU. None: by the labels of each role's nodePool."""
    max_prompt_tokens: int | None = None
    """Of the training prompts, if they were measured."""


def plan_memory(question: Question) -> list[Need]:
    """Return the needs of all roles: of one GPU, and of one Pod."""
    needs = [_plan_head(question), *_plan_trainer(question), *_plan_rollout(question)]
    for service in question.job.spec.services:
        needs += _plan_service(question, service)
    return needs


def max_row_tokens(question: Question) -> int:
    """Return the longest row that the job may train on: its turns, within the length that a rollout accepts."""
    spec, facts = question.job.spec, question.models.get(question.job.spec.model.source)
    limit = spec.rollout.max_model_len or (find_context_length(facts.config) if facts else None)
    turns = 1 if spec.agent.type == "singleTurn" else spec.agent.turn_limit
    answers = turns * spec.rollout.sampling.max_tokens
    prompt = spec.data.max_prompt_tokens or question.max_prompt_tokens
    if turns > 1 or prompt is None:
        # Replies of users and tools are as unknown as a prompt: within maxModelLen, else as long as the answers.
        prompt = spec.rollout.max_model_len or answers
    return min(answers + prompt, limit or answers + prompt)


def micro_batch_tokens(question: Question) -> int:
    """Return the tokens of the largest micro-batch: as many as trainer.microBatchTokens allows and a mini-batch has. A
    longer row is a micro-batch alone."""
    spec, row = question.job.spec, max_row_tokens(question)
    rows = -(-spec.schedule.prompts_per_step // spec.schedule.mini_batches) * spec.algorithm.group_size
    of_rank = -(-rows // spec.trainer.num_ranks) * row
    return max(row, min(spec.trainer.micro_batch_tokens, of_rank))


def build_work(question: Question, shape: Shape, gpu_bytes: int | None) -> Work:
    """Return what one trainer rank computes. Without a known GPU, with the sharding that needs least."""
    spec = question.job.spec
    lora, size = spec.trainer.lora, _DTYPE_BYTES[spec.trainer.dtype]
    adapters = 0
    if lora is not None:
        targets = [] if lora.target_modules == [ALL_LINEAR] else lora.target_modules
        adapters = shape.adapter_parameters(lora.rank, targets)
    has_reference = spec.algorithm.kl.coefficient > 0 and lora is None
    has_critic = spec.algorithm.type == "ppo"
    on_gpu = spec.trainer.gpus_per_replica > 0
    mode = ShardingMode(keep_gathered=not on_gpu, reduce_once=not on_gpu)
    if on_gpu and gpu_bytes is not None:
        trained, frozen = count_for_sharding(shape, adapters, has_reference=has_reference, has_critic=has_critic)
        mode = choose_sharding(trained, frozen, size, gpu_bytes)
    row, tokens = max_row_tokens(question), micro_batch_tokens(question)
    is_packed = spec.trainer.attention == "packed" or (spec.trainer.attention == "auto" and on_gpu)
    shares_prompts = spec.trainer.attention in _TAKES_MASKS and spec.algorithm.group_size > 1
    has_masks = shares_prompts and not is_packed
    return Work(
        shape=shape,
        num_shards=spec.trainer.num_ranks // spec.trainer.num_copies,
        bytes_per_value=size,
        tokens=tokens,
        line_tokens=min(tokens, max(row, _TREE_TOKENS)) if has_masks else row,
        on_gpu=on_gpu,
        mode=mode,
        checkpoints_activations=spec.trainer.recomputes_activations,
        attention=spec.trainer.attention,
        has_masks=has_masks,
        key_copies=_key_copies(spec, row) if shares_prompts and is_packed else 1,
        adapter_parameters=adapters,
        has_reference=has_reference,
        has_critic=has_critic,
        offloads_state=on_gpu and spec.trainer.offloads_state,
        offloads_reference=on_gpu and spec.trainer.offloads_reference,
    )


def _key_copies(spec: RLJobSpec, row_tokens: int) -> float:
    """Return how many keys packed attention reads per token that it computes: those of a shared prompt once per row."""
    group, answer = spec.algorithm.group_size, min(spec.rollout.sampling.max_tokens, row_tokens)
    return group * row_tokens / (row_tokens - answer + group * answer)


def checkpoint_bytes(question: Question) -> int:
    """Return the size of one checkpoint on disk: weights and moments of what is trained; 0 if it is unknown."""
    facts = question.models.get(question.job.spec.model.source)
    if facts is None or (shape := facts.shape) is None:
        return 0
    work = build_work(question, shape, None)
    return 12 * (work.num_trained + shape.decoder_parameters * work.has_critic)


def _plan_head(question: Question) -> Need:
    spec = question.job.spec
    steps = 1 + spec.schedule.staleness
    num_rows, row_tokens = spec.schedule.prompts_per_step * spec.algorithm.group_size, max_row_tokens(question)
    rows_bytes = num_rows * row_tokens * limits.ROW_BYTES_PER_TOKEN
    moment = roles.plan_head(steps * num_rows, row_tokens, rows_bytes)
    limit = _limit(question, spec.head.resources.limits)
    return Need("head", "spec.head", "host", 1, (moment,), limit)


def _plan_trainer(question: Question) -> Iterator[Need]:
    spec, trainer = question.job.spec, question.job.spec.trainer
    limit = _limit(question, trainer.resources.limits)
    shape = _shape(question, spec.model.source)
    if shape is None:
        process = Part("processes", max(1, trainer.gpus_per_replica) * roles.PROCESS_BYTES, True, True)
        yield Need("trainer", "spec.trainer", "host", trainer.replicas, (build_moment("load", [process]),), limit)
        return
    gpu_bytes = _gpu_bytes(question, trainer.node_pool)
    work = build_work(question, shape, gpu_bytes)
    published = _published_bytes(question, work)
    if work.on_gpu:
        cuda = Part("CUDA", roles.CUDA_BYTES, is_estimate=True)
        moments = tuple(build_moment(each.name, [*each.parts, cuda]) for each in plan_rank(work))
        yield Need("trainer", "spec.trainer", "gpu", trainer.num_ranks, moments, gpu_bytes)
        host = roles.plan_trainer_host(
            shape,
            ranks_per_pod=trainer.gpus_per_replica,
            num_shards=work.num_shards,
            published_bytes=published,
            gathers_first=work.has_adapters or shape.num_experts > 0,
            value_bytes=work.bytes_per_value,
        )
        host = _with_offloaded(host, work, published, ranks_per_pod=trainer.gpus_per_replica)
        host = _with_checkpoint_copy(host, question, work, ranks_per_pod=trainer.gpus_per_replica)
        yield Need("trainer", "spec.trainer", "host", trainer.replicas, host, limit)
    else:
        moments = _with_checkpoint_copy(_plan_cpu_rank(work, published), question, work, ranks_per_pod=1)
        yield Need("trainer", "spec.trainer", "host", trainer.replicas, moments, limit)


def _plan_cpu_rank(work: Work, published_bytes: int) -> tuple[Moment, ...]:
    """Return what the Pod of rank 0 holds: its rank, and the weight files in /dev/shm."""
    process = Part("process", roles.PROCESS_BYTES, is_certain=True, is_estimate=True)
    files = roles.publish_parts(published_bytes, published_bytes * work.has_adapters)
    kept = roles.scratch_part(published_bytes)
    update = [build_moment(each.name, [process, *each.parts, kept]) for each in plan_rank(work)]
    held = [part for part in plan_rank(work)[0].parts if part.is_certain and part.name != GRADIENTS]
    return (*update, build_moment("publish", [process, *held, *files]))


def _with_offloaded(
    moments: tuple[Moment, ...], work: Work, published_bytes: int, *, ranks_per_pod: int
) -> tuple[Moment, ...]:
    """Add what trainer.offload moves to the host, and the moment at which it holds gradients."""
    parts = [replace(part, num_bytes=ranks_per_pod * part.num_bytes) for part in plan_offloaded(work)]
    if not parts:
        return moments
    held = [part for part in parts if part.name != GRADIENTS]
    load, *others = (build_moment(each.name, [*each.parts, *held]) for each in moments)
    update = build_moment("update", [load.parts[0], *parts, roles.scratch_part(published_bytes)])
    return (load, update, *others)


def _with_checkpoint_copy(
    moments: tuple[Moment, ...], question: Question, work: Work, *, ranks_per_pod: int
) -> tuple[Moment, ...]:
    """Add the copy of the state that is written while training continues (policy.host_copy)."""
    if not question.job.spec.saves_asynchronously:
        return moments
    copy = Part("checkpoint copy", ranks_per_pod * -(-checkpoint_bytes(question) // work.num_shards), is_certain=True)
    return tuple(each if each.name == "load" else build_moment(each.name, [*each.parts, copy]) for each in moments)


def _published_bytes(question: Question, work: Work) -> int:
    lora = question.job.spec.trainer.lora
    is_adapter = lora is not None and lora.publish == "adapter"
    return (work.adapter_parameters if is_adapter else work.shape.num_parameters) * work.bytes_per_value


def _plan_rollout(question: Question) -> Iterator[Need]:
    spec, rollout = question.job.spec, question.job.spec.rollout
    shape = _shape(question, spec.model.source)
    if shape is None or not rollout.replicas:
        return
    limit = _limit(question, rollout.resources.limits)
    size = _DTYPE_BYTES[spec.trainer.dtype]
    scratch = _published_bytes(question, build_work(question, shape, None))
    if not rollout.gpus_per_replica:
        cache = int((rollout.kv_cache_gib or 1) * roles.GIB)
        moment = roles.plan_vllm_cpu(shape, bytes_per_value=size, kv_cache_bytes=cache, scratch_bytes=scratch)
        yield Need("rollout", "spec.rollout", "host", rollout.replicas, (moment,), limit)
        return
    gpu_bytes = _gpu_bytes(question, rollout.node_pool)
    config = question.models[spec.model.source].config
    moment = roles.plan_vllm_gpu(
        shape,
        bytes_per_value=size,
        num_shards=rollout.gpus_per_replica,
        max_tokens=rollout.max_model_len or find_context_length(config) or 0,
        share=rollout.gpu_memory_utilization,
        gpu_bytes=gpu_bytes,
    )
    available = None if gpu_bytes is None else int(rollout.gpu_memory_utilization * gpu_bytes)
    num_gpus = rollout.replicas * rollout.gpus_per_replica
    yield Need("rollout", "spec.rollout", "gpu", num_gpus, (moment,), available)
    yield Need("rollout", "spec.rollout", "host", rollout.replicas, (roles.plan_vllm_host(scratch),), limit)


def _plan_service(question: Question, service: Service) -> Iterator[Need]:
    reward = service.reward
    if not reward.is_served:
        return
    name = f"{'reward' if service.kind == 'reward' else 'agent'} {reward.name}"
    count = reward.autoscaling.max_replicas if reward.autoscaling else reward.replicas
    slots = reward.slots if reward.function else 0
    limit = _limit(question, reward.resources.limits)
    yield Need(name, service.path, "host", count, (roles.plan_server(slots),), limit)
    if (model := reward.served_model) is not None:
        yield from _plan_served_model(question, f"{name} vllm", service.path, model, count, reward.node_pool)


def _plan_served_model(
    question: Question, name: str, path: str, model: ServedModel, count: int, pool: NodePool
) -> Iterator[Need]:
    facts = question.models.get(model.source)
    if facts is None or (shape := facts.shape) is None:
        return
    limit = _limit(question, model.resources.limits)
    size = _DTYPE_BYTES.get(model.dtype, 2)  # auto reduces float32
    if not model.gpus:
        cache = int((model.kv_cache_gib or 1) * roles.GIB)
        moment = roles.plan_vllm_cpu(shape, bytes_per_value=size, kv_cache_bytes=cache, scratch_bytes=0)
        yield Need(name, path, "host", count, (moment,), limit)
        return
    gpu_bytes = _gpu_bytes(question, pool)
    moment = roles.plan_vllm_gpu(
        shape,
        bytes_per_value=size,
        num_shards=model.gpus,
        max_tokens=model.max_model_len or find_context_length(facts.config) or 0,
        share=model.gpu_memory_utilization,
        gpu_bytes=gpu_bytes,
    )
    available = None if gpu_bytes is None else int(model.gpu_memory_utilization * gpu_bytes)
    yield Need(name, path, "gpu", count * model.gpus, (moment,), available)
    yield Need(name, path, "host", count, (roles.plan_vllm_host(0),), limit)


def _gpu_bytes(question: Question, pool: NodePool) -> int | None:
    return question.gpu_bytes or read_gpu_labels(pool.node_selector, pool.gpu_resource)


def _shape(question: Question, source: str) -> Shape | None:
    facts = question.models.get(source)
    return facts.shape if facts else None


def _limit(question: Question, limits: Mapping[str, str]) -> int | None:
    value = question.parse_quantity(limits["memory"]) if "memory" in limits else None
    return None if value is None else int(value)
