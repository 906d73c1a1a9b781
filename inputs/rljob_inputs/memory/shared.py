"""The memory of GPUs and Pods that trainer and rollouts share, in turns (rollout.placement: trainer). Pure.

    generate  the engines are awake, those of served models, too, and the ranks have freed the GPU
    update    the ranks have the GPU, and the engines sleep
    publish   likewise; weights are gathered, next to the state

Between two phases, one side frees the GPU before the other one takes it: the weights pass through a file in host
memory. So the start of an engine, its load of new weights, and the return of the ranks' state need less than the phase
that follows, and are no phases of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rljob_inputs.memory import roles
from rljob_inputs.memory.parts import Moment, Part, build_moment

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


_FREED = Part("freed trainer", roles.FREED_BYTES, is_estimate=True)
_ASLEEP = Part("sleeping rollout", roles.ASLEEP_BYTES, is_estimate=True)


def plan_gpu(engine: Moment, rank: Iterable[Moment], models: Sequence[ModelEngine]) -> tuple[Moment, ...]:
    """Return the phases of one GPU. `engine`: what vLLM holds on it while it is awake. `rank`: what a rank holds."""
    awake = [Part(f"vLLM of {each.name}", each.awake.num_bytes) for each in models]
    asleep = [Part(f"sleeping {each.name}", roles.ASLEEP_BYTES, is_estimate=True) for each in models]
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
            Part(f"vLLM of {each.name}", each.num_per_pod * roles.ENGINE_BYTES, is_certain=True, is_estimate=True),
            Part(f"weights of {each.name}", each.num_per_pod * each.weights, is_certain=True),
        )
    ]
    return [
        *of_models,
        Part("rollouts", num_engines * roles.ENGINE_BYTES, is_certain=True, is_estimate=True),
        Part("weights of rollouts", kept_weights, is_certain=True),
    ]
