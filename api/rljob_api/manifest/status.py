"""Observed state of an RLJob: conditions, and fields derived from them.

Invariant: each text is printable and bounded, so a status can be stored and printed. A longer text is truncated, also
when a status is read that a different version wrote.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.manifest.base import FreeForm, Spec, list_map
from rljob_api.manifest.scaling import RewardScaling
from rljob_api.wire.driver_status import FIELD_CHECKPOINT, MAX_PROBLEMS, DriverProblem
from rljob_api.wire.text import Count, Line, Name, Paragraph, Word


class Condition(Spec):
    """Kubernetes' metav1.Condition."""

    type: str
    """Name of the condition, in CamelCase."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Name
    """Machine-readable reason, in CamelCase."""
    message: Paragraph = ""
    """Human-readable message: the cause and the remedy."""
    last_transition_time: datetime
    """Time of the last change of status."""
    observed_generation: int = 0
    """Generation of spec that this condition refers to."""


MAX_FAILING_PODS = 32
MAX_FAILURE_TIMES = 18


class FailureTime(Spec):
    """Failures at one time."""

    at: datetime
    """End of the failed container."""
    count: Count = 1
    """Failures that are charged to backoffLimit. 0: a restart that is not."""


class PodFailures(Spec):
    """Failures of a Pod's own containers. For the head, of all its Pods; the trainers have an entry with the head's
    name, too: failures of their ranks."""

    pod: Name
    """Name of the Pod that failed last."""
    created: datetime
    """Its creation. Another Pod with its name has a later one."""
    counted: Count = 0
    """Restarts of that Pod that these entries contain, charged or not."""
    last: Line = ""
    """Why it restarted last."""
    charged: bool = True
    """Whether that counts against backoffLimit."""
    times: list[FailureTime] = Field(default=[], max_length=MAX_FAILURE_TIMES)
    """Oldest first. With a backoffLimit above 15, rounded to a sixteenth of the window."""


MAX_IMAGE_LENGTH = 1024
"""A longer image is cut."""


class RoleStatus(Spec):
    """Pods of one role."""

    name: str
    """head, trainer, rollout, reward-NAME or agent-NAME."""
    desired: int = 0
    """Desired Pods."""
    ready: int = 0
    """Ready Pods."""
    restarts: int = 0
    """Restarts so far, charged or not."""
    image: str = Field(default="", max_length=MAX_IMAGE_LENGTH)
    """Image of the main container. Over an upgrade of the operator, a running role keeps the image that it started with
    until its configuration changes, or until `kubectl rljob restart`."""
    failures: list[PodFailures] = Field(default=[], max_length=MAX_FAILING_PODS)
    """What counts against backoffLimit: the Pods that failed within backoffWindowSeconds, those with most failures."""


MAX_AVOIDED_NODES = 16


class AvoidedNode(Spec):
    """A node on which a GPU of a role has failed. The role's Pods are no longer scheduled there."""

    role: Name
    """Name of the role."""
    node: Name
    """Name of the node."""
    pod: Name
    """Name of the Pod whose GPU failed."""
    message: Line
    """CUDA's or the driver's text."""
    restart: Line = ""
    """Requests to restart the role so far (`kubectl rljob restart`). The next one uses the node again."""


class RewardProblem(Spec):
    """Why samples have no valid score."""

    reward: Name
    """Name of the reward. For an episode that failed: the field of what failed, such as spec.agent.user."""
    reason: Word
    """Reason of the invalid result, such as exception or timeout."""
    message: Line = ""
    """Message of the first sample: for an exception its file, line, type and text."""
    step: int = 0
    """Step of the first sample. 0: an evaluation before the first step."""

    @classmethod
    def of(cls, problem: DriverProblem) -> RewardProblem:
        """Return what the status keeps of a problem that the driver reports: all but the count, which grows."""
        return cls(reward=problem.reward, reason=problem.reason, message=problem.message, step=problem.step)

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is a damaged checkpoint, and no reward."""
        return self.reward == FIELD_CHECKPOINT

    def describe(self) -> str:
        """Return `reward correct: no valid score (timeout): ...`, or the same with the field of what failed."""
        if self.is_checkpoint:
            return f"{self.reward}: {self.reason}: {self.message}"
        what = self.reward if self.reward.startswith("spec.") else f"reward {self.reward}"
        effect = "a call failed" if self.reward.startswith("spec.agent.tools") else "no valid score"
        return f"{what}: {effect} ({self.reason}): {self.message}"


class ScheduleProgress(Spec):
    """What the schedule does."""

    type: Word = ""
    """spec.schedule.type."""
    staleness: int | None = None
    """Age of the oldest token that is not trained yet, in steps: the finished ones minus its weight version. Never
    above spec.schedule.maxStaleness."""
    groups_in_flight: int | None = None
    """Groups that have started and have no score yet."""
    groups_scored: int | None = None
    """Groups that have their scores and wait to be trained."""
    groups_due: int | None = None
    """Groups in flight that must train in the current step: what the step waits for."""
    busy: Line = ""
    """Share of the last step's wall time in which each role worked, such as `rollouts 97%, rewards 80%, trainer 31%`.
    They overlap."""
    prefix_hits: float | None = None
    """Share of the last step's requests to rollouts that ran where the beginning of their prompt was cached."""


class HungPartStatus(Spec):
    """A part of the job that finishes nothing, although it has work."""

    role: Word
    """Name of the role."""
    name: Line
    """A Pod, a rank, a worker of a service."""
    since: datetime
    """When it finished something last, or got its work."""
    limit_seconds: int = 0
    """What its own history allows."""
    doing: Line = ""
    """What it works on."""
    action: Line = ""
    """What is done about it."""


class OutageStatus(Spec):
    """A service that answered before and that the job waits for, since all requests to it fail."""

    what: Line
    """The field's path, and the address."""
    since: datetime
    """First failure after the last success."""
    limit_seconds: int = 0
    """spec.outageSeconds. Then the job fails."""
    message: Line = ""
    """The first error that was reported."""


class JobProgress(Spec):
    """The driver's last report. Advisory: it may be 10 s old, with more than 100 training jobs up to a minute."""

    run_id: Word = ""
    """Id of the folder with the run's files. It changes when they were lost."""
    step: int = 0
    """Completed optimizer steps."""
    total_steps: int = 0
    """Steps of the whole job."""
    reward: float | None = None
    """Mean score of the last step's valid samples."""
    weight_version: int = 0
    """Version of the newest published weights."""
    last_step_time: datetime | None = None
    """When the last step was counted. Null: none yet."""
    hung: list[HungPartStatus] = Field(default=[], max_length=MAX_PROBLEMS)
    """The parts that hang now."""
    outages: list[OutageStatus] = Field(default=[], max_length=MAX_PROBLEMS)
    """The services that the job waits for."""
    training_share: float | None = None
    """Share of the wall time since the run began that trained."""
    phase: Word = ""
    """Current phase: starting, evaluate, generate, score, update, publish, checkpoint, done."""
    waits_for: Line = ""
    """What the driver is waiting for; empty if nothing."""
    problems: list[RewardProblem] = Field(default=[], max_length=MAX_PROBLEMS)
    """The first reasons for which samples have no valid score, each once."""
    schedule: ScheduleProgress | None = None
    """Staleness, groups, and what each role did. Null: the driver has not reported it."""


MAX_FIGURES = 64


class EvaluationFigure(Spec):
    """One result of a job with task evaluate."""

    set: Name
    """Name of the set of prompts."""
    name: Word
    """Name of the estimator, such as accuracy."""
    value: float | None = None
    """Null: no episode was scored."""
    low: float | None = None
    """Lower end of its 95% confidence interval. Null: not known."""
    high: float | None = None
    """Upper end."""
    num_prompts: Count = 0
    """Prompts of the set."""


MAX_PULL_SECRETS = 128


class StartModelStatus(Spec):
    """Where the Pods find the files of the job that spec.model.source names (job://NAME@STEP)."""

    job: Name
    """NAME."""
    claim: Name
    """PersistentVolumeClaim with the folder NAME."""
    step: Count | None = None
    """Which exported step the job has begun with. A head that has lost the run's files begins with it again, too. Null:
    not known yet."""


class RLJobStatus(Spec):
    """Observed state of an RLJob."""

    conditions: list[Condition] = Field(default=[], json_schema_extra=list_map("type"))
    """Ready, Reconciling, Stalled, Queued, Suspended, Running, Restarting, Succeeded, Failed, Progressing,
    PoolsIsolated, NameConflict, RewardVersionsMixed, Learning, ProgressLost."""
    observed_generation: int = 0
    """Generation of spec that this status refers to."""
    phase: Literal["", "Pending", "Queued", "Suspended", "Running", "Restarting", "Succeeded", "Failed"] = ""
    """Derived from the conditions, for the printed column."""
    roles: list[RoleStatus] = Field(default=[], json_schema_extra=list_map("name"))
    """One entry per role."""
    image_pull_secrets: list[Name] = Field(default=[], max_length=MAX_PULL_SECRETS)
    """Secrets with which the head's image is pulled: of the job, the namespace and the installation."""
    rollouts: str = ""
    """Rollout replicas as READY/DESIRED, for the printed column."""
    rewards: str = ""
    """Reward Pods as READY/DESIRED, for the printed column."""
    rollout_replicas: int = 0
    """Ready rollout replicas, for the scale subresource."""
    rollout_selector: str = ""
    """Label selector of the rollout Pods, for the scale subresource."""
    scaling: list[RewardScaling] = Field(default=[], json_schema_extra=list_map("name"))
    """Last decision for each reward, user, tool and runner with autoscaling."""
    avoided_nodes: list[AvoidedNode] = Field(default=[], max_length=MAX_AVOIDED_NODES)
    """Nodes with a broken GPU, by role. Empty after suspend, `kubectl rljob resume --retry` and, for the role,
    `restart`."""
    progress: JobProgress = Field(default=JobProgress())
    """The driver's last report."""
    evaluation: list[EvaluationFigure] = Field(default=[], max_length=MAX_FIGURES)
    """Results of a job with task evaluate that has succeeded, as far as 4,000 bytes have room: 30 or more. The run's
    files have all results, and all samples."""
    start_model: StartModelStatus | None = None
    """With spec.model.source job://: the claim from which the Pods read the model. It stays once the job has
    started, also if the other job is deleted."""
    defaults: Annotated[FreeForm, Field(json_schema_extra={"x-kubernetes-map-type": "atomic"})] = {}
    """What the fields have that spec leaves out, by path, since the job first started. An operator whose defaults are
    others keeps these."""
    retried: str = ""
    """Last processed value of the annotation rljob.dev/retry (`kubectl rljob resume --retry`)."""
    queued_since: datetime | None = None
    """Start of the wait for a complete gang (scheduling.gang)."""
    not_before: datetime | None = None
    """Time of the next attempt to start a gang that released its nodes."""
    start_time: datetime | None = None
    """Time when the operator created the first Pod, which may then wait in a queue. Null while suspended."""
    active_seconds: int = Field(default=0, ge=0)
    """Seconds for which the job has run (Running or Restarting, and not Queued), without the current period.
    spec.activeDeadlineSeconds limits them."""
    active_since: datetime | None = None
    """Start of the current period in which the job runs. Null: it does not run."""
    completion_time: datetime | None = None
    """Time when the job ended."""
