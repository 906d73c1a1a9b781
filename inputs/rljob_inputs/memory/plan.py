"""The memory plan of a job: what one GPU and one Pod of each role need, by part, and whether it fits. Pure.

Leaves the formulas to trainer.py, roles.py and roles.py. Invariant: the plan is of the job as it is, and an unknown
model or GPU makes it smaller, never wrong: a need without a shape has no model, and without a known GPU nothing is said
to fit.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.job_spec import CHECKPOINT_BYTES_PER_PARAMETER, Service
from rljob_api.manifest.roles import ALL_LINEAR, NodePool
from rljob_api.manifest.services.models import ServedModel, TeacherModel
from rljob_api.quantity import parse_quantity
from rljob_inputs.memory import limits, roles
from rljob_inputs.memory.gpus import read_gpu_labels
from rljob_inputs.memory.limits import ShardingMode, choose_sharding
from rljob_inputs.memory.parts import Moment, Need, Part, build_moment
from rljob_inputs.memory.recomputation import (
    choose_kept_logits,
    choose_recomputation,
    leaves_some_free,
)
from rljob_inputs.memory.shapes import Shape, read_shape
from rljob_inputs.memory.trainer import (
    GRADIENTS,
    Recomputation,
    Work,
    count_for_sharding,
    plan_freed,
    plan_offloaded,
    plan_publish,
    plan_rank,
)
from rljob_inputs.models.architectures import text_config
from rljob_inputs.models.config import Config, find_context_length, find_logit_transform, publishes_adapter

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_TAKES_MASKS = ("auto", "packed", "sdpa", "eager")
"""Implementations of attention that take the masks of shared prompts, unless rows are packed (policy.attention)."""
_PASS_TOKENS = 8192
"""vLLM's default of tokens in a pass, on GPUs with 70 GiB or more."""
_PASS_ARGUMENT = re.compile(r"--max[-_]num[-_]batched[-_]tokens[= ](\d+)")
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
    """Resolved (models.defaults)."""
    models: Mapping[str, ModelFacts]
    """By source."""
    gpu_bytes: int | None = None
    """Memory of every GPU. None: by the labels of each role's nodePool."""
    max_prompt_tokens: int | None = None
    """Longest of the training prompts, if they were measured."""
    num_gpus: int | None = None
    """GPUs that there are in all. None: as many as the job asks for."""

    @property
    def spec(self) -> RLJobSpec:
        return self.job.spec

    @property
    def facts(self) -> ModelFacts | None:
        """What is known about spec.model."""
        return self.models.get(self.spec.model.source)

    @property
    def shape(self) -> Shape | None:
        return self.shape_of(self.spec.model.source)

    def shape_of(self, source: str) -> Shape | None:
        facts = self.models.get(source)
        return facts.shape if facts else None

    @property
    def context_length(self) -> int | None:
        """The most tokens of a rollout. None: unknown."""
        return self.spec.rollout.max_model_len or (find_context_length(self.facts.config) if self.facts else None)

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self.spec.schedule.prompts_per_step * self.spec.algorithm.group_size


def plan_memory(question: Question) -> list[Need]:
    """Return the needs of all roles: of one GPU, and of one Pod."""
    question = _settle(question)
    trainer = _plan_trainer(question) if question.spec.trains else ()
    needs = [_plan_head(question), *trainer, *_plan_rollout(question)]
    for service in question.spec.services:
        needs += _plan_service(question, service)
    return needs


def bytes_per_row_token(question: Question) -> int:
    """Return what a rank gets of a sampled token, with 8 bytes for each that a teacher finds likeliest there."""
    tops = [reward.top_k for reward in question.spec.training_rewards if reward.top_k]
    return limits.ROW_BYTES_PER_TOKEN + 8 * len(tops) * max(tops, default=0)


def max_row_tokens(question: Question) -> int:
    """Return the longest row that the job may train on: its turns, or a given conversation, within the length that a
    rollout accepts."""
    spec = question.spec
    turns = 1 if spec.agent.type == "singleTurn" else spec.agent.turn_limit
    answers = turns * spec.rollout.sampling.answer_tokens
    prompt = spec.data.max_prompt_tokens or question.max_prompt_tokens
    if turns > 1 or prompt is None:
        # Replies of users and tools are as unknown as a prompt: within maxModelLen, else as long as the answers.
        prompt = spec.rollout.max_model_len or answers
    given = spec.rollout.max_model_len if spec.schedule.warm_start else None
    longest = max(answers + prompt, given or 0)
    return min(longest, question.context_length or longest)


def micro_batch_tokens(question: Question) -> int:
    """Return the tokens of the largest micro-batch: as many as trainer.microBatchTokens allows and a mini-batch has. A
    longer row is a micro-batch alone."""
    spec, row = _settle(question).spec, max_row_tokens(question)
    rows = -(-spec.schedule.prompts_per_step // spec.schedule.mini_batches) * spec.algorithm.group_size
    of_rank = -(-rows // spec.trainer.num_ranks) * row
    return max(row, min(spec.trainer.largest_micro_batch, of_rank))


@dataclass(frozen=True)
class UpdatePlan:
    """What the ranks do in an update where the job leaves it to them."""

    micro_batch_tokens: int
    """trainer.microBatchTokens."""
    recomputation: Recomputation
    """trainer.gradientCheckpointing."""
    kept_logits_bytes: int = limits.LOGITS_BLOCK_BYTES
    """Logits of at most this size are kept for the backward pass."""


def plan_update(question: Question) -> UpdatePlan:
    """Return what the trainer does. The same on all ranks, if they know the smallest GPU."""
    settled = _settle(question)
    trainer, shape = settled.spec.trainer, settled.shape
    if shape is None:
        setting = trainer.gradient_checkpointing
        automatic: Recomputation = "full" if trainer.gpus_per_replica else "none"
        return UpdatePlan(trainer.largest_micro_batch, automatic if setting == "auto" else setting)
    work = build_work(settled, shape, _gpu_bytes(settled, trainer.node_pool))
    return UpdatePlan(trainer.largest_micro_batch, work.recomputation, work.kept_logits_bytes)


def find_recomputation(question: Question) -> Recomputation:
    """Return what the backward pass of the trainer computes again."""
    return plan_update(question).recomputation


def build_work(question: Question, shape: Shape, gpu_bytes: int | None) -> Work:
    """Return what one trainer rank computes. Without a known GPU, with the sharding and the recomputation that need
    least."""
    spec = question.spec
    # The ranks do not know how long the prompts are.
    known = _describe_work(replace(question, max_prompt_tokens=None), shape, gpu_bytes)
    choice = choose_recomputation(spec, known, gpu_bytes)
    kept = choose_kept_logits(spec, replace(known, recomputation=choice), gpu_bytes)
    return replace(_describe_work(question, shape, gpu_bytes), recomputation=choice, kept_logits_bytes=kept)


def _settle(question: Question) -> Question:
    """Return the question with trainer.microBatchTokens: the most with which no layer is computed again as a whole.
    That costs a third of an update, and smaller micro-batches cost little, unless each one copies all weights from the
    host. If there are none, the most that fit; else the fewest."""
    trainer, shape = question.spec.trainer, question.shape
    if trainer.micro_batch_tokens is not None:
        return question
    settled = [_set_micro_batch(question, tokens) for tokens in limits.MICRO_BATCH_TOKENS]
    is_open = trainer.gradient_checkpointing == "auto" and trainer.gpus_per_replica > 0 and not trainer.offloads_state
    gpu_bytes = _gpu_bytes(question, trainer.node_pool)
    if not is_open or shape is None or gpu_bytes is None:
        return settled[0]
    # As in build_work: the ranks, which decide alike, do not know how long the prompts are.
    works = [build_work(replace(each, max_prompt_tokens=None), shape, gpu_bytes) for each in settled]
    is_fast = [work.recomputation != "full" for work in works]
    fits = [leaves_some_free(question.spec, work, gpu_bytes) for work in works]
    return next((settled[i] for has in (is_fast, fits) for i, found in enumerate(has) if found), settled[-1])


def _set_micro_batch(question: Question, tokens: int) -> Question:
    spec = question.spec
    trainer = spec.trainer.model_copy(update={"micro_batch_tokens": tokens})
    job = question.job.model_copy(update={"spec": spec.model_copy(update={"trainer": trainer})})
    return replace(question, job=job)


def _describe_work(question: Question, shape: Shape, gpu_bytes: int | None) -> Work:
    spec = question.spec
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
        num_shards=spec.trainer.num_ranks,
        bytes_per_value=size,
        bytes_per_logit=_DTYPE_BYTES.get(spec.trainer.head_dtype, size),
        limits_logits=find_logit_transform(text_config(question.models[spec.model.source].config)).limit is not None,
        tokens=tokens,
        line_tokens=min(tokens, max(row, _TREE_TOKENS)) if has_masks else row,
        on_gpu=on_gpu,
        mode=mode,
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
    group, answer = spec.algorithm.group_size, min(spec.rollout.sampling.answer_tokens, row_tokens)
    return group * row_tokens / (row_tokens - answer + group * answer)


def checkpoint_bytes(question: Question) -> int:
    """Return the size of one checkpoint on disk: weights and moments of what is trained; 0 if it is unknown."""
    if (shape := question.shape) is None:
        return 0
    work = build_work(question, shape, None)
    return CHECKPOINT_BYTES_PER_PARAMETER * (work.num_trained + shape.decoder_parameters * work.has_critic)


def _plan_head(question: Question) -> Need:
    spec = question.spec
    num_rows = (1 + spec.schedule.staleness) * question.num_rows
    moment = roles.plan_head(num_rows, max_row_tokens(question), _store_bytes(question) if spec.trains else 0)
    limit = _limit(spec.head.resources.limits)
    return Need("head", "spec.head", "host", 1, (moment,), limit)


def _plan_trainer(question: Question) -> Iterator[Need]:
    spec, trainer = question.spec, question.spec.trainer
    limit = _limit(trainer.resources.limits)
    shape = question.shape
    if shape is None:
        process = Part("processes", max(1, trainer.gpus_per_replica) * roles.PROCESS_BYTES, True, True)
        yield Need("trainer", "spec.trainer", "host", trainer.replicas, (build_moment("load", [process]),), limit)
        return
    gpu_bytes = _gpu_bytes(question, trainer.node_pool)
    work = build_work(question, shape, gpu_bytes)
    published = _published_bytes(question, work)
    models = _plan_model_engines(question)
    if work.on_gpu:
        moments = [*plan_rank(work)]
        if spec.shares_trainer:
            moments.append(plan_publish(work, is_adapter=_publishes_adapter(question)))
        cuda = Part("CUDA", roles.CUDA_BYTES, is_estimate=True)
        phases = tuple(each.plus(cuda) for each in moments)
        if spec.shares_trainer:
            phases = roles.plan_gpu(_plan_engine(question, shape, gpu_bytes), phases, models)
        yield Need("trainer", "spec.trainer", "gpu", trainer.num_ranks, phases, gpu_bytes)
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
        if spec.shares_trainer:
            host = roles.plan_host(
                host,
                freed=_times(trainer.gpus_per_replica, plan_freed(work)),
                num_engines=spec.engines_per_pod,
                kept_weights=spec.engines_per_pod * _kept_bytes(question, work),
                models=models,
            )
    else:
        host = _plan_cpu_rank(work, published)
        if spec.shares_trainer:
            host = roles.plan_cpu_host(
                host,
                _held_by_cpu_rank(work, published),
                engine=_plan_cpu_engine(question, shape, scratch_bytes=0),
                kept_weights=_kept_bytes(question, work),
                models=models,
            )
        host = _with_checkpoint_copy(host, question, work, ranks_per_pod=1)
    store = Part("object store", _store_bytes(question, trainer.replicas))
    host = tuple(each.plus(store) for each in host)
    yield Need("trainer", "spec.trainer", "host", trainer.replicas, host, limit)


def _plan_cpu_rank(work: Work, published_bytes: int) -> tuple[Moment, ...]:
    """Return what the Pod of rank 0 holds: its rank, and the weight files in /dev/shm."""
    process, *held, kept = _held_by_cpu_rank(work, published_bytes)
    files = roles.publish_parts(published_bytes, published_bytes * work.has_adapters)
    update = [build_moment(each.name, [process, *each.parts, kept]) for each in plan_rank(work)]
    return (*update, build_moment("publish", [process, *held, *files]))


def _held_by_cpu_rank(work: Work, published_bytes: int) -> list[Part]:
    """Return what it holds between two updates: its process first, and the weight files last."""
    process = Part("process", roles.PROCESS_BYTES, is_certain=True, is_estimate=True)
    held = [part for part in plan_rank(work)[0].parts if part.is_certain and part.name != GRADIENTS]
    return [process, *held, roles.scratch_part(published_bytes)]


def _times(count: int, parts: Iterable[Part]) -> list[Part]:
    return [replace(part, num_bytes=count * part.num_bytes) for part in parts]


def _with_offloaded(
    moments: tuple[Moment, ...], work: Work, published_bytes: int, *, ranks_per_pod: int
) -> tuple[Moment, ...]:
    """Add what trainer.offload moves to the host, and the moment at which it holds gradients."""
    parts = _times(ranks_per_pod, plan_offloaded(work))
    if not parts:
        return moments
    held = [part for part in parts if part.name != GRADIENTS]
    load, *others = (each.plus(*held) for each in moments)
    update = build_moment("update", [load.parts[0], *parts, roles.scratch_part(published_bytes)])
    return (load, update, *others)


def _with_checkpoint_copy(
    moments: tuple[Moment, ...], question: Question, work: Work, *, ranks_per_pod: int
) -> tuple[Moment, ...]:
    """Add the copy of the state that is written while training continues (policy.host_copy)."""
    if not question.spec.saves_asynchronously:
        return moments
    copy = Part("checkpoint copy", ranks_per_pod * -(-checkpoint_bytes(question) // work.num_shards), is_certain=True)
    return tuple(each if each.name == "load" else each.plus(copy) for each in moments)


def _publishes_adapter(question: Question) -> bool:
    return publishes_adapter(question.spec, question.facts.config if question.facts else {})


def _published_bytes(question: Question, work: Work) -> int:
    is_adapter = _publishes_adapter(question)
    return (work.adapter_parameters if is_adapter else work.shape.num_parameters) * work.bytes_per_value


def _kept_bytes(question: Question, work: Work) -> int:
    """Return the weights that an engine keeps in host memory while it sleeps: all, if only adapters are published."""
    return work.shape.num_parameters * work.bytes_per_value * _publishes_adapter(question)


def _store_bytes(question: Question, num_pods: int = 1) -> int:
    """Return what the rows of a step take in Ray's object store: in that of the head, or of one of `num_pods`."""
    row_bytes = max_row_tokens(question) * bytes_per_row_token(question)
    return max(limits.OBJECT_STORE_BYTES, -(-question.num_rows * row_bytes // num_pods))


def _plan_rollout(question: Question) -> Iterator[Need]:
    spec, rollout = question.spec, question.spec.rollout
    shape = question.shape
    if shape is None or not spec.num_rollout_replicas or (spec.shares_trainer and not rollout.gpus_per_replica):
        return
    limit = _limit(rollout.resources.limits)
    # Without a trainer, engines read the model's own files.
    scratch = _published_bytes(question, build_work(question, shape, None)) if spec.trains else 0
    if not rollout.gpus_per_replica:
        moment = _plan_cpu_engine(question, shape, scratch_bytes=scratch)
        yield Need("rollout", "spec.rollout", "host", rollout.replicas, (moment,), limit)
        return
    gpu_bytes = _gpu_bytes(question, spec.trainer.node_pool if spec.shares_trainer else rollout.node_pool)
    moment = _plan_engine(question, shape, gpu_bytes)
    available = _find_available(moment, spec.rollout_gpu_share, gpu_bytes)
    num_gpus = spec.num_rollout_replicas * rollout.gpus_per_replica
    yield Need("rollout", "spec.rollout", "gpu", num_gpus, (moment,), available, spec.shares_trainer)
    if not spec.shares_trainer:
        yield Need("rollout", "spec.rollout", "host", rollout.replicas, (roles.plan_vllm_host(scratch),), limit)


def _find_available(moment: Moment, share: float, gpu_bytes: int | None) -> int | None:
    """Return what vLLM may use of a GPU: its share, and beyond it what log-probs of prompts take, if they fit there."""
    if gpu_bytes is None:
        return None
    own, scored = int(share * gpu_bytes), sum(part.num_bytes for part in moment.parts if part.name == roles.SCORED)
    return own + min(scored, gpu_bytes - own)


def _plan_engine(question: Question, shape: Shape, gpu_bytes: int | None) -> Moment:
    """Return what a rollout holds on one GPU."""
    spec, rollout = question.spec, question.spec.rollout
    return roles.plan_vllm_gpu(
        shape,
        bytes_per_value=_DTYPE_BYTES[spec.trainer.dtype],
        num_shards=max(1, rollout.gpus_per_replica),
        max_tokens=question.context_length or 0,
        share=spec.rollout_gpu_share,
        gpu_bytes=gpu_bytes,
        scored=_scored_by_rollouts(question),
    )


def _scored_by_rollouts(question: Question) -> int:
    """Return the tokens of a pass whose log-probs a hint asks for."""
    rollout = question.spec.rollout
    given = _PASS_ARGUMENT.search(" ".join(rollout.extra_args))
    most = min(int(given[1]) if given else _PASS_TOKENS, question.context_length or _PASS_TOKENS)
    return most if any(reward.hint is not None for reward in question.spec.rewards) else 0


def _plan_cpu_engine(question: Question, shape: Shape, *, scratch_bytes: int) -> Moment:
    spec = question.spec
    return roles.plan_vllm_cpu(
        shape,
        bytes_per_value=_DTYPE_BYTES[spec.trainer.dtype],
        kv_cache_bytes=spec.rollout.kv_cache_memory.num_bytes,
        scratch_bytes=scratch_bytes,
        scored=_scored_by_rollouts(question),
    )


def _plan_service(question: Question, service: Service) -> Iterator[Need]:
    settings = service.settings
    if not settings.is_served:
        return
    name = _name_service(service)
    count = settings.autoscaling.max_replicas if settings.autoscaling else settings.replicas
    slots = settings.slots if settings.function else 0
    limit = _limit(settings.resources.limits)
    yield Need(name, service.path, "host", count, (roles.plan_server(slots),), limit)
    if (model := settings.served_model) is not None:
        yield from _plan_served_model(question, f"{name} vllm", service.path, model, count, settings.node_pool)


def _name_service(service: Service) -> str:
    return f"{'reward' if service.kind == 'reward' else 'agent'} {service.settings.name}"


def _plan_served_model(
    question: Question, name: str, path: str, model: ServedModel, count: int, pool: NodePool
) -> Iterator[Need]:
    trainer, shares = question.spec.trainer, model.placement == "trainer"
    gpu_bytes = _gpu_bytes(question, trainer.node_pool if shares else pool)
    moment = _plan_model(question, model, gpu_bytes)
    if moment is None or (shares and not model.gpus_per_replica):  # a part of the trainer's Pod
        return
    limit = _limit(model.resources.limits)
    if not model.gpus_per_replica:
        yield Need(name, path, "host", count, (moment,), limit)
        return
    available = _find_available(moment, model.gpu_share, gpu_bytes)
    num_engines = trainer.replicas * question.spec.count_per_pod(model.gpus_per_replica) if shares else count
    yield Need(name, path, "gpu", num_engines * model.gpus_per_replica, (moment,), available, shares)
    if not shares:
        yield Need(name, path, "host", count, (roles.plan_vllm_host(0),), limit)


def _plan_model(question: Question, model: ServedModel, gpu_bytes: int | None) -> Moment | None:
    """Return what vLLM holds of a served model, on one GPU or without GPUs. None: its shape is unknown."""
    facts = question.models.get(model.source)
    if facts is None or (shape := facts.shape) is None:
        return None
    size, length = _served_value_bytes(model), model.max_model_len or find_context_length(facts.config)
    scored = 0
    if isinstance(model, TeacherModel):
        scored = min(model.max_batched_tokens or _PASS_TOKENS, length or _PASS_TOKENS)
    if not model.gpus_per_replica:
        cache = model.kv_cache_memory.num_bytes
        return roles.plan_vllm_cpu(shape, bytes_per_value=size, kv_cache_bytes=cache, scratch_bytes=0, scored=scored)
    return roles.plan_vllm_gpu(
        shape,
        bytes_per_value=size,
        num_shards=model.gpus_per_replica,
        max_tokens=length or 0,
        share=model.gpu_share,
        gpu_bytes=gpu_bytes,
        scored=scored,
    )


def _served_value_bytes(model: ServedModel) -> int:
    return _DTYPE_BYTES.get(model.dtype, 2)  # auto reduces float32


def _plan_model_engines(question: Question) -> list[roles.ModelEngine]:
    """Return the engines of served models in the trainer's Pods whose shapes are known."""
    spec, found = question.spec, list[roles.ModelEngine]()
    gpu_bytes = _gpu_bytes(question, spec.trainer.node_pool)
    for service in spec.services:
        model = service.settings.served_model
        if model is None or model.placement == "separate" or (shape := question.shape_of(model.source)) is None:
            continue
        awake = _plan_model(question, model, gpu_bytes)
        assert awake is not None, "its shape is known"
        weights = shape.num_parameters * _served_value_bytes(model)
        num_per_pod = spec.count_per_pod(model.gpus_per_replica)
        found.append(roles.ModelEngine(_name_service(service), awake, weights, num_per_pod))
    return found


def _gpu_bytes(question: Question, pool: NodePool) -> int | None:
    return question.gpu_bytes or read_gpu_labels(pool.node_selector, pool.gpu_resource)


def _limit(limits: Mapping[str, str]) -> int | None:
    value = parse_quantity(limits["memory"]) if "memory" in limits else None
    return None if value is None else int(value)
