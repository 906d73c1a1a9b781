"""Evaluation on sets of held-out prompts: what is sampled and scored, and which step is the best one.

`data.eval` is the short form of one set, named eval. Invariant: the rest of RLJob reads `HeldOutSet`, whose settings
are those that apply, wherever the job has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import Field

from rljob_api.manifest.base import (
    PART_NAME_PATTERN,
    REWARD_NAME_PATTERN,
    Rule,
    ShortText,
    Spec,
    different_names,
    list_map,
)
from rljob_api.manifest.job_sections import Data, DataSource
from rljob_api.manifest.roles import Sampling
from rljob_api.manifest.services.reward import Reward

SHORT_FORM: Final = "eval"
"""Name of the set that data.eval is."""
MAX_SAMPLES: Final = 1024
_MAX_SETS: Final = 16
_METRIC_PATTERN = r"^(accuracy|majority|pass@[1-9][0-9]{0,3})$"
SetName = Annotated[str, Field(pattern=PART_NAME_PATTERN, max_length=32)]
RewardName = Annotated[str, Field(pattern=REWARD_NAME_PATTERN, max_length=40)]
PassAt = Annotated[list[Annotated[int, Field(ge=1, le=MAX_SAMPLES)]], Field(min_length=1, max_length=16)]


class EvaluationSet(Spec):
    """A set of held-out prompts. Null settings are those of `evaluation`."""

    name: SetName
    """Name in metrics: `eval/NAME/accuracy`. Unique within the job; `eval` is that of data.eval, if it is set."""
    data: DataSource
    """The prompts."""
    sampling: Sampling | None = None
    """How its answers are sampled. Null: evaluation.sampling."""
    samples_per_prompt: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Answers to each prompt. Null: evaluation.samplesPerPrompt."""
    rewards: list[RewardName] | None = Field(default=None, min_length=1, max_length=16)
    """Names of the rewards that score it; their weighted sum is its score. Null: all but those with `use: training`."""
    accuracy: ShortText | None = None
    """Component that is reported as its accuracy. Null: evaluation.accuracy."""
    pass_threshold: float | None = None
    """Accuracy from which an answer solves its prompt. Null: evaluation.passThreshold."""
    pass_at: PassAt | None = None
    """The k of pass@k. Null: evaluation.passAt."""
    every_steps: int | None = Field(default=None, ge=0)
    """Steps between its evaluations. 0: only before the first step and after the last. Null: evaluation.everySteps."""
    at_start: bool | None = None
    """Whether to evaluate it before the first step. Null: evaluation.atStart."""


class BestStep(Spec):
    """Which step is the best one. Its checkpoint is kept, in addition to the newest ones of checkpoint.keep."""

    set: SetName
    """The evaluation set that decides. After each step that it evaluates, a checkpoint is written."""
    metric: Annotated[str, Field(pattern=_METRIC_PATTERN, max_length=16)] = "accuracy"
    """The number that is compared; the highest is the best, of equal ones the first: accuracy, majority, or pass@K with
    a K of the set's passAt."""


class Evaluation(Spec):
    """Evaluation on data.eval and on sets. It has its own lane, next to training."""

    RULES: ClassVar[tuple[Rule, ...]] = (different_names("sets"),)

    sets: list[EvaluationSet] = Field(default=[], max_length=_MAX_SETS, json_schema_extra=list_map("name"))
    """Sets of held-out prompts, each with settings of its own, in addition to data.eval."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations. 0: only before the first step and after the last."""
    at_start: bool = True
    """Whether to evaluate before the first step."""
    samples_per_prompt: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Answers to each prompt. With more than one, the accuracy is their mean (avg@n), and pass@k and maj@n are reported
    as well."""
    sampling: Sampling | None = None
    """How evaluation trajectories are sampled. Null: as generation_config.json of the model says, if it has do_sample
    (temperature, top_p, top_k); else greedy, or as rollout.sampling with several samples per prompt. stop and maxTokens
    are then those of rollout.sampling."""
    accuracy: ShortText | None = None
    """Component of the reward's result that is reported as accuracy. Null: acc if it exists, else score. Episodes that
    the agent failed count as 0."""
    pass_threshold: float = 1.0
    """Accuracy from which an answer solves its prompt, for pass@k."""
    pass_at: PassAt | None = None
    """The k of pass@k, each at most samplesPerPrompt; larger ones are left out. Null: the powers of two up to
    samplesPerPrompt, and samplesPerPrompt; none if that is 1."""
    best: BestStep | None = None
    """Keeps the checkpoint of the best step, and names it in best.json, the summary and the driver's /status. Null:
    off."""


@dataclass(frozen=True)
class HeldOutSet:
    """An evaluation set with the settings that apply to it."""

    name: str
    path: str
    """Path of its section: spec.evaluation, or spec.evaluation.sets[0]."""
    data_path: str
    """Path of its data: spec.data.eval, or spec.evaluation.sets[0].data."""
    data: DataSource
    sampling: Sampling | None
    """None while the job's open settings are not resolved."""
    samples_per_prompt: int
    rewards: tuple[str, ...]
    """Names of the rewards that score it, in the order of the job."""
    accuracy: str | None
    pass_threshold: float
    pass_at: tuple[int, ...]
    """Ascending, each at most samples_per_prompt."""
    every_steps: int
    at_start: bool


def list_held_out(evaluation: Evaluation, data: Data, rewards: Sequence[Reward]) -> list[HeldOutSet]:
    """Return all sets of a job, that of data.eval first."""
    found: list[HeldOutSet] = []
    if data.eval is not None:
        found.append(_apply(evaluation, _short_form(data.eval), "spec.evaluation", "spec.data.eval", rewards))
    for index, each in enumerate(evaluation.sets):
        path = f"spec.evaluation.sets[{index}]"
        found.append(_apply(evaluation, each, path, f"{path}.data", rewards))
    return found


def _short_form(data: DataSource) -> EvaluationSet:
    # Not validated again: the data is, and a resolved job has paths that no file may have.
    return EvaluationSet.model_construct(name=SHORT_FORM, data=data)


def _apply(
    evaluation: Evaluation, each: EvaluationSet, path: str, data_path: str, rewards: Sequence[Reward]
) -> HeldOutSet:
    num_samples = each.samples_per_prompt or evaluation.samples_per_prompt
    names = each.rewards
    threshold = evaluation.pass_threshold if each.pass_threshold is None else each.pass_threshold
    return HeldOutSet(
        name=each.name,
        path=path,
        data_path=data_path,
        data=each.data,
        sampling=each.sampling or evaluation.sampling,
        samples_per_prompt=num_samples,
        rewards=tuple(r.name for r in rewards if (r.use != "training" if names is None else r.name in names)),
        accuracy=each.accuracy or evaluation.accuracy,
        pass_threshold=threshold,
        pass_at=_choose_pass_at(each.pass_at or evaluation.pass_at, num_samples),
        every_steps=evaluation.every_steps if each.every_steps is None else each.every_steps,
        at_start=evaluation.at_start if each.at_start is None else each.at_start,
    )


def _choose_pass_at(given: Sequence[int] | None, num_samples: int) -> tuple[int, ...]:
    if given is not None:
        return tuple(sorted({k for k in given if k <= num_samples}))
    powers = {1 << exponent for exponent in range(num_samples.bit_length())}
    return tuple(sorted({*powers, num_samples})) if num_samples > 1 else ()


def list_greedy(evaluation: Evaluation) -> list[str]:
    """Return what samples a prompt several times with temperature 0: names of sets, `evaluation` for itself."""
    own = ("evaluation", evaluation.sampling, evaluation.samples_per_prompt)
    sets = (
        (each.name, each.sampling or evaluation.sampling, each.samples_per_prompt or evaluation.samples_per_prompt)
        for each in evaluation.sets
    )
    return [name for name, sampling, count in (own, *sets) if sampling and sampling.temperature == 0 and count > 1]
