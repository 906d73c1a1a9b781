"""The whole run: driver-summary.json, which the driver writes, and summary.json, which `rljob run` builds from it.

The driver's summary is as old as the last checkpoint. Invariant: numbers that are not finite are constants of JSON's
superset, as in the driver's history: the mean of immense scores may be infinite.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, ValidationError

from rljob_api.run.base import Count, Record, Score, Seconds, Share, Unit
from rljob_api.run.folder import FILE_BEST, FILE_DRIVER_SUMMARY, FILE_SUMMARY
from rljob_api.run.sessions import Session
from rljob_api.wire.driver_status import TrainerChoices


class DeliveryCounts(Record):
    """Records for one tracker."""

    sent: Count = 0
    """Those that its server has."""
    lost: Count = 0
    """Those that are given up."""
    waiting: Count = 0
    """Those that are not sent yet."""
    url: str = ""
    """Where the tracker shows the run. Empty: it has no address, or was never reached."""


class BestStep(Record):
    """The best step by `evaluation.best`, as best.json has it."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    set: str
    """Name of the evaluation set that decides."""
    metric: str
    """accuracy, majority or pass@K."""
    value: Score
    """The number at this step, the highest of all evaluations."""
    low: Score | None = None
    """Lower bound of its 95 % confidence interval. Null: unknown."""
    high: Score | None = None
    """Upper bound of the interval."""
    step: Count
    """Finished steps of the weights. 0: the model before the first step."""
    checkpoint: str | None = None
    """Its checkpoint, below the run's folder. Null: step 0 has none, or it is not written yet."""


class DriverSummary(Record):
    """What the driver counts, up to the last checkpoint. What it knows of each step is in metrics.jsonl alone."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    steps: Count = 0
    """Finished steps."""
    phase_seconds: dict[str, Seconds] = {}
    """The driver's time by phase."""
    training_share: Share | None = None
    """Share of the run's time that trained, up to the end of the last step; time in a queue is left out."""
    lost_seconds: dict[str, Seconds] = {}
    """Time that did not train, by cause."""
    samples_trained: Count | None = None
    """Samples that updates used. Null: no step or evaluation has ended."""
    rewards_served: Count | None = None
    """Results of rewards, valid or not, also of evaluations. Null: as above."""
    invalid_by_reason: dict[str, Count] = {}
    """Results without a valid score, and episodes that failed."""
    accuracy_before: Score | None = None
    """Accuracy of the first evaluation set before the first step. Null: not evaluated, or no episode was scored."""
    accuracy_after: Score | None = None
    """Accuracy of the first evaluation set in its last evaluation."""
    eval_before: dict[str, Score | None] | None = None
    """`means` of that evaluation before the first step."""
    eval_after: dict[str, Score | None] | None = None
    """`means` of its last evaluation."""
    best: BestStep | None = None
    """The best step. Null: no `evaluation.best`, or nothing was evaluated yet."""
    restarts: dict[str, Count] = {}
    """Restarts by role. The driver counts those of the trainer group, `rljob run` also those of Pods."""
    weight_digests: dict[str, str] = {}
    """Digest of the last weights, by process."""
    export: str | None = None
    """Folder of the trained model. Null: not written yet, or not wanted."""
    export_step: Count | None = None
    """Step of that model."""
    export_merged_share: Share | None = None
    """Share of the adapters' update that its weights have. Null: adapters are not merged."""
    versions: dict[str, str] = {}
    """Versions of the trainer's packages."""
    model_commit: str | None = None
    """Commit of the model on the Hub. Null: it is a folder, or not in the cache."""
    choices: TrainerChoices | None = None
    """What the last trainer group decided itself."""
    damaged_checkpoints: dict[str, str] = {}
    """Why checkpoints were set aside, by the name of their folder."""
    trackers: dict[str, DeliveryCounts] = {}
    """Records by tracker, known at the end of the run."""


class EvaluationSummary(Record):
    """One evaluation of a set: fields of its line in metrics.jsonl."""

    step: Count
    """Finished steps of the weights."""
    set: str = "eval"
    """Name of the set."""
    samples_per_prompt: Count = 1
    """Answers to each prompt."""
    accuracy: Score | None = None
    """Null: no episode was scored."""
    accuracy_low: Score | None = None
    """Lower bound of its 95 % confidence interval. Null: unknown."""
    accuracy_high: Score | None = None
    """Upper bound of the interval."""
    pass_at: dict[int, Share] = {}
    """pass@k by k."""
    majority: Score | None = None
    """maj@n. Null: no reward names the answer."""
    means: dict[str, Score | None] = {}
    """Means of `score` and of each component."""
    num_samples: Count = 0
    """Its episodes."""
    num_failed: Count = 0
    """Those that the agent failed: they count as 0."""
    num_left_out: Count = 0
    """Those that the accuracy leaves out."""


class RunSummary(DriverSummary):
    """What `rljob run` knows at the end of a run."""

    name: str
    """Name of the job."""
    phase: str
    """Succeeded, Failed or Interrupted; of a run without an end Running, or Unfinished: it was killed, or runs
    elsewhere."""
    total_steps: Count
    """Those of the job."""
    step_rewards: list[Score | None] = []
    """`reward` of each step."""
    prompts_trained: list[list[int]] = []
    """[steps][prompts] Rows of the dataset."""
    logprob_difference: list[float] = []
    """Mean difference of a token's log-prob between trainer and rollout, of the first update of each step."""
    pause_seconds: Seconds | None = None
    """For how long rollouts paused for new weights: the mean over updates."""
    transfer_seconds: Seconds | None = None
    """Time until rollouts had new weights: the mean over updates."""
    checkpoint_step: Count | None = None
    """Step of the newest complete checkpoint. Null: there is none."""
    wall_seconds: Seconds | None = None
    """Wall time of all sessions. Null: not recorded, as in a cluster."""
    device_bytes: dict[str, Annotated[int, Unit("bytes")]] = {}
    """With `rollout.placement: trainer`: the largest `device_bytes` of all steps, by its keys."""
    steps_without_signal: Count = 0
    """Steps without an advantage to learn from."""
    evaluations: list[EvaluationSummary] = []
    """All evaluations, oldest first."""
    metrics_before: dict[str, Score | None] = {}
    """`means` of that evaluation before the first step."""
    metrics_after: dict[str, Score | None] = {}
    """`means` of the last evaluation after a step."""
    sessions: list[Session] = []
    """All sessions, oldest first."""
    chat_template_arguments: dict[str, Any] = {}
    """Those of the job, which the export cannot have."""


_Kind = TypeVar("_Kind", bound=Record)


def read_driver_summary(folder: Path) -> DriverSummary | None:
    """Return the driver's summary; None if it is missing or not readable."""
    return _read(folder / FILE_DRIVER_SUMMARY, DriverSummary)


def read_run_summary(folder: Path) -> RunSummary | None:
    """Return summary.json; None if it is missing or not readable."""
    return _read(folder / FILE_SUMMARY, RunSummary)


def read_best(folder: Path) -> BestStep | None:
    """Return best.json; None if it is missing or not readable."""
    return _read(folder / FILE_BEST, BestStep)


def format_summary(summary: DriverSummary | BestStep) -> str:
    """Return the text of a summary's file, or of best.json."""
    return summary.model_dump_json(indent=1) + "\n"


def _read(path: Path, kind: type[_Kind]) -> _Kind | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
