"""The memory of what is not a trainer rank: vLLM, hosts of GPU Pods, the head, and servers of the user's functions.

Pure. Constants that were measured on one machine, and estimates, are parts with `is_estimate`.

GPUs and Pods that trainer and rollouts share, in turns (rollout.placement: trainer):

    generate  the engines are awake, those of served models, too, and the ranks have freed the GPU
    update    the ranks have the GPU, and the engines sleep
    publish   likewise; weights are gathered, next to the state

Between two phases, one side frees the GPU before the other one takes it: the weights pass through a file in host
memory. So the start of an engine, its load of new weights, and the return of the ranks' state need less than the phase
that follows, and are no phases of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rljob_inputs.memory import limits
from rljob_inputs.memory.parts import Moment, Part, build_moment
from rljob_inputs.memory.shapes import Shape

GIB = 2**30
PROCESS_BYTES = int(0.7 * GIB)
"""One trainer rank or head: Python with torch, transformers and Ray. Measured."""
ENGINE_BYTES = int(2.5 * GIB)
"""A vLLM server on CPUs, or the host's part of one on GPUs, without weights and KV cache. Measured on CPUs."""
CUDA_BYTES = 3 * GIB // 2
"""CUDA context, NCCL's buffers and what the allocator cannot use. An estimate: one rank on an H100 had 1.3 GiB outside
of torch's allocator."""
GRAPHS_BYTES = 2 * GIB
"""vLLM's CUDA graphs and the activations of a full batch. An estimate: not measured."""
FREED_BYTES = CUDA_BYTES
"""What a rank keeps of a GPU after it has freed it for the rollouts that share it: its CUDA context and NCCL's buffers.
The allocator's cache is emptied, but small blocks can keep whole segments. An estimate: not measured."""
ASLEEP_BYTES = int(1.5 * GIB)
"""What a vLLM engine keeps of a GPU while it sleeps: its CUDA context, its CUDA graphs, and what it allocates outside
of the pool of weights and cache. An estimate: logs that others have published say 1.1 to 1.4 GiB for models on one GPU,
and more with tensor parallelism."""
SERVER_BYTES = 64 * 2**20
"""A reward server with few requests. Measured (README: 49 to 116 MiB)."""
WORKER_BYTES = 16 * 2**20
"""A worker process with the standard library alone, without what the function imports."""
BYTES_PER_EPISODE_TOKEN = 100
"""An estimate. A row of the trainer has 21 bytes per token, and 12 more with reference and critic."""

SCORED = "prompt log-probs"
_SCORED_BYTES = 8
"""Per token and entry of the vocabulary."""
_SLICE_BYTES = 8
"""Per value that a rank reads: as it is in the files, and as fp32."""
_PENDING_BYTES = 256 << 20
"""Size of parameters that wait for a thread to write them (weights.store)."""


GENERATE = "generate"


@dataclass(frozen=True)
class ModelEngine:
    """The engines of a served model in the same Pods, which are awake with the rollouts."""

    name: str
    """Name of its service, such as reward preference."""
    awake: Moment
    """What one holds on one GPU; without GPUs, in host memory."""
    weights: int
    """Bytes in all, which wait in host memory while it sleeps."""
    num_per_pod: int


_FREED = Part("freed trainer", FREED_BYTES, is_estimate=True)
_ASLEEP = Part("sleeping rollout", ASLEEP_BYTES, is_estimate=True)


def plan_gpu(engine: Moment, rank: Iterable[Moment], models: Sequence[ModelEngine]) -> tuple[Moment, ...]:
    """Return the phases of one GPU. `engine`: what vLLM holds on it while it is awake. `rank`: what a rank holds."""
    awake = [Part(f"vLLM of {each.name}", each.awake.num_bytes) for each in models]
    asleep = [Part(f"sleeping {each.name}", ASLEEP_BYTES, is_estimate=True) for each in models]
    generate = build_moment(GENERATE, [*engine.parts, *awake, _FREED])
    return (generate, *(each.plus(_ASLEEP, *asleep) for each in rank))


def plan_host(
    moments: Iterable[Moment],
    *,
    freed: Sequence[Part],
    num_engines: int,
    kept_weights: int,
    models: Sequence[ModelEngine],
) -> tuple[Moment, ...]:
    """Add to the phases of a trainer Pod with GPUs what it holds for its engines. They read the weight file in place.

    `freed`: copies of what its ranks free on their GPUs; their memory is kept while the GPUs have it again, since to
    pin memory takes longer than to copy. `kept_weights`: of all engines, which keep them while they sleep."""
    engines = _engine_parts(num_engines, kept_weights, models)
    return tuple(each.plus(*engines, *([] if each.name == "load" else freed)) for each in moments)


def plan_cpu_host(
    moments: Iterable[Moment],
    held: Sequence[Part],
    *,
    engine: Moment,
    kept_weights: int,
    models: Sequence[ModelEngine],
) -> tuple[Moment, ...]:
    """Return the phases of a trainer Pod without GPUs and its engine. `moments`: of the rank. `held`: what the rank has
    while the engine is awake: its state is in host memory anyway. `engine`: what vLLM holds while it is awake."""
    asleep = _engine_parts(1, kept_weights, models)
    awake = [Part(f"vLLM of {each.name}", each.awake.num_bytes, is_certain=True) for each in models]
    generate = build_moment(GENERATE, [*held, Part("rollout", engine.num_bytes, is_certain=True), *awake])
    return (generate, *(each.plus(*asleep) for each in moments))


def _engine_parts(num_engines: int, kept_weights: int, models: Sequence[ModelEngine]) -> list[Part]:
    of_models = [
        part
        for each in models
        for part in (
            Part(f"vLLM of {each.name}", each.num_per_pod * ENGINE_BYTES, is_certain=True, is_estimate=True),
            Part(f"weights of {each.name}", each.num_per_pod * each.weights, is_certain=True),
        )
    ]
    return [
        *of_models,
        Part("rollouts", num_engines * ENGINE_BYTES, is_certain=True, is_estimate=True),
        Part("weights of rollouts", kept_weights, is_certain=True),
    ]


def kv_bytes_per_token(shape: Shape, bytes_per_value: int, num_shards: int = 1) -> int:
    """Keys and values of one token on one of `num_shards` tensor-parallel GPUs. A GPU holds at least one head."""
    heads = -(-shape.num_kv_heads // num_shards)
    return 2 * shape.num_layers * heads * shape.head_dim * bytes_per_value


def plan_scoring(shape: Shape, num_tokens: int) -> Part:
    """Return what log-probs of prompts take in a pass of `num_tokens`, besides what vLLM reserves: logits of the whole
    vocabulary on each GPU, and their log-softmax, both in fp32 (vLLM's gpu_model_runner)."""
    return Part(SCORED, num_tokens * shape.vocabulary * _SCORED_BYTES)


def plan_vllm_gpu(
    shape: Shape,
    *,
    bytes_per_value: int,
    num_shards: int,
    max_tokens: int,
    share: float,
    gpu_bytes: int | None,
    scored: int = 0,
) -> Moment:
    """Return what vLLM holds on one GPU. With a known GPU, the KV cache gets what is left of `share` of its memory, but
    at least one text of `max_tokens`, without which vLLM does not start. `scored`: of plan_scoring."""
    weights = -(-shape.num_parameters * bytes_per_value // num_shards)
    one_text = max_tokens * kv_bytes_per_token(shape, bytes_per_value, num_shards)
    left = 0 if gpu_bytes is None else int(share * gpu_bytes) - weights - GRAPHS_BYTES - CUDA_BYTES
    return build_moment(
        "serve",
        [
            Part("weights", weights, is_certain=True),
            Part("KV cache: one text", one_text, is_certain=True),
            Part("KV cache: the rest", max(0, left - one_text)),
            Part("CUDA graphs", GRAPHS_BYTES, is_estimate=True),
            Part("CUDA", CUDA_BYTES, is_estimate=True),
            plan_scoring(shape, scored),
        ],
    )


def plan_vllm_cpu(
    shape: Shape, *, bytes_per_value: int, kv_cache_bytes: int, scratch_bytes: int, scored: int = 0
) -> Moment:
    """Return what a vLLM server on CPUs holds, with the weight file that it loads from /dev/shm."""
    return build_moment(
        "serve",
        [
            Part("process", ENGINE_BYTES, is_certain=True, is_estimate=True),
            Part("weights", shape.num_parameters * bytes_per_value, is_certain=True),
            Part("KV cache", kv_cache_bytes, is_certain=True),
            Part("scratch", scratch_bytes),
            plan_scoring(shape, scored),
        ],
    )


def plan_vllm_host(scratch_bytes: int) -> Moment:
    """Return what the Pod of a GPU replica holds on the host: vLLM's processes, and the weight file of an update."""
    return build_moment("serve", [Part("process", ENGINE_BYTES, is_estimate=True), Part("scratch", scratch_bytes)])


def plan_trainer_host(
    shape: Shape, *, ranks_per_pod: int, num_shards: int, published_bytes: int, gathers_first: bool, value_bytes: int
) -> tuple[Moment, ...]:
    """Return what a trainer Pod with GPUs holds on the host: the slices that its ranks read at a time, at most those
    of embeddings and head (policy.sharded_weights); and on rank 0's Pod the published weights and their files in
    /dev/shm (weights.store). `gathers_first`: adapters are merged, and experts are taken apart, once all are gathered;
    other parameters are written one by one (weights.store)."""
    process = Part("processes", ranks_per_pod * PROCESS_BYTES, is_certain=True, is_estimate=True)
    slices = -(-shape.root_parameters * _SLICE_BYTES // num_shards)
    load = [process, Part("load", ranks_per_pod * slices)]
    on_host = published_bytes
    if not gathers_first:
        on_host = min(published_bytes, _PENDING_BYTES + value_bytes * shape.embedding_parameters)
    return (build_moment("load", load), build_moment("publish", [process, *publish_parts(published_bytes, on_host)]))


def scratch_part(published_bytes: int) -> Part:
    """Return the weight files between two updates of the rollouts."""
    return Part("scratch", published_bytes * limits.NUM_KEPT_VERSIONS, is_certain=True)


def publish_parts(published_bytes: int, on_host: int) -> list[Part]:
    """Return what publishing holds (weights.store): `on_host` bytes of tensors, and the files: the kept versions, and
    the one that is written before the oldest is deleted."""
    tensors = Part("published weights", on_host, is_certain=True)
    return [tensors, Part("scratch", published_bytes * (limits.NUM_KEPT_VERSIONS + 1), is_certain=True)]


def plan_head(num_episodes: int, tokens_per_episode: int, store_bytes: int) -> Moment:
    """Return what the head holds: its process, Ray's object store with the rows of a call, and the episodes that are
    open or train."""
    return build_moment(
        "step",
        [
            Part("process", PROCESS_BYTES, is_certain=True, is_estimate=True),
            Part("object store", store_bytes),
            Part("episodes", num_episodes * tokens_per_episode * BYTES_PER_EPISODE_TOKEN, is_estimate=True),
        ],
    )


def plan_server(slots: int) -> Moment:
    """Return what a server of the user's functions holds, without what these import and allocate."""
    return build_moment(
        "serve",
        [
            Part("server", SERVER_BYTES, is_certain=True, is_estimate=True),
            Part("workers", slots * WORKER_BYTES, is_estimate=True),
        ],
    )
