"""The driver's status, which the operator reads."""

import enum
from typing import Annotated

from pydantic import AwareDatetime, Field, FiniteFloat

from rljob_api.wire.base import Wire
from rljob_api.wire.text import Count, Line, Name, Paragraph, Seconds, Share, Word, first

SERVING = "serving"
"""Phase of a training service that answers."""
MAX_PROBLEMS = 8
MAX_PROBLEM_LENGTH = 500
MAX_NAMES = 64
"""Rewards or roles of one job: more than a manifest can have."""


class RewardDemand(Wire):
    """Demand for one reward, or for a service of the agent, in the current or the next collection. Input of the
    autoscaler. Of an agent, samples are episodes, and the latency is that of all calls of one episode."""

    samples: Count = 0
    """Samples of the whole collection; for a runner, the episodes that are in flight at once. 0 if there is no further
    collection."""
    expected: Count = 0
    """Samples without a score yet; for the user and tools, calls in flight."""
    holds_slots: bool = False
    """Whether a sample holds its slot for the whole collection, as an episode in a runner does: slots = samples."""
    is_open: bool = False
    """Whether the collection is in progress: from the first prompt to the last score."""
    is_first: bool = False
    """Whether it is the driver's first collection: all times are then estimates from its samples so far."""
    starts_in_seconds: Seconds = 0.0
    """If not in progress: estimated time until it starts, from the last pause."""
    elapsed_seconds: Seconds = 0.0
    """If in progress: time since it started."""
    due_seconds: Seconds | None = None
    """Time after the start at which the GPUs need the last scores: the generation plus, with on-policy mini-batches,
    all updates except the last. Measured in the last collection; in the first one, from the generation so far. Null:
    not measured yet."""
    window_seconds: Seconds | None = None
    """Target time for Little's law: the minimum over time of the time left until due_seconds for the samples not yet
    generated, scaled to all samples. Equals due_seconds if samples arrive evenly."""
    in_flight: Count = 0
    """Requests in flight, queued ones included."""
    waiting: Count = 0
    """Requests that wait for a free replica."""
    oldest_in_flight_seconds: Seconds = 0.0
    """Time since the oldest of the other requests was sent to a replica: a lower bound of its execution time."""
    latency_seconds: Seconds | None = None
    """Mean execution time per sample, including retries, over recent samples."""
    latency_p95_seconds: Seconds | None = None
    """95th percentile of the same."""


FIELD_CHECKPOINT = "spec.checkpoint"
"""`reward` of a problem that is a damaged checkpoint."""


class DriverProblem(Wire):
    """Why samples have no valid score: the first of its kind since the driver started, and how many followed. Or which
    checkpoint is damaged."""

    reward: Name
    """Name of the reward. For an episode that failed: the field of what failed, such as spec.agent.user."""
    reason: Word
    """An InvalidReason, context (the prompt leaves no room for an answer), damaged, or one of a newer driver."""
    message: Line = ""
    """Message of the first sample: for an exception its file, line, type and text."""
    step: Count = 0
    """Step of the first sample. 0: an evaluation before the first step."""
    count: Count = 1
    """Samples so far."""


class LearningReason(enum.StrEnum):
    """Reasons of the condition Learning."""

    ADVANTAGES_FOUND = "AdvantagesFound"
    NO_ADVANTAGES = "NoAdvantages"
    """The samples of each group have the same score."""
    NO_VALID_SAMPLES = "NoValidSamples"


class Learning(Wire):
    """Whether the last steps gave the model anything to learn from."""

    is_learning: bool | None = None
    """Null: not known before the first step of RL. False: not for schedule.maxStepsWithoutSignal steps in a row."""
    reason: Word = ""
    """A LearningReason, or one of a newer driver. Empty if null."""
    message: Paragraph = ""
    """Why not, and what to do."""


MAX_GPU_FAULTS = 8


class GpuFault(Wire):
    """A GPU of a trainer that does not work."""

    address: Word
    """Address of its Pod."""
    at: AwareDatetime
    """By the driver's clock. A Pod that was created later only has the same address."""
    message: Line
    """CUDA's or the driver's text."""


class RankFailures(Wire):
    """Ends of the trainer group through its own fault: a rank's process failed while its node stayed."""

    count: Count = 0
    """Since this driver started."""
    last: Line = ""
    """The last one's reason."""
    gpu_faults: Annotated[list[GpuFault], first(MAX_GPU_FAULTS)] = []
    """Newest first, one per Pod. The operator avoids their nodes."""


class BusyShares(Wire):
    """Share of the last step's wall time in which each role worked. They overlap: their sum may exceed 1. Null: not
    measured yet, or an older driver."""

    rollouts: Share | None = None
    """At least one generation request was in flight."""
    rewards: Share | None = None
    """At least one reward request was in flight."""
    trainer: Share | None = None
    """The trainer computed gradients, updated, or published weights."""
    users: Share | None = None
    """At least one reply of the simulated user was in flight. Null: the job has none; the same for tools, runners."""
    tools: Share | None = None
    """At least one call of a tool was in flight."""
    runners: Share | None = None
    """At least one episode of a program or an environment was in flight."""

    def describe(self) -> str:
        """Return the known shares as text, such as `rollouts 97%, trainer 31%`."""
        known = ((name, getattr(self, name)) for name in type(self).model_fields)
        return ", ".join(f"{name} {share:.0%}" for name, share in known if share is not None)


class ScheduleStatus(Wire):
    """What the schedule does now. Empty or null: not known yet, or an older driver.

    The staleness of a token is the number of steps finished before the step that trains it, minus the number finished
    when its weights were published.
    """

    type: Word = ""
    """spec.schedule.type."""
    max_staleness: Count | None = None
    """The bound, in steps. 0 is on-policy."""
    staleness: Count | None = None
    """Age of the oldest token that is sampled or scored and not trained yet, if it trained in the current step. Null:
    no such token."""
    trained_staleness_mean: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    """Mean over the tokens of the last step."""
    trained_staleness_max: Count | None = None
    """Maximum over the tokens of the last step."""
    groups_in_flight: Count | None = None
    """Groups that have started and have no score yet."""
    groups_scored: Count | None = None
    """Groups that have their scores and wait to be trained."""
    groups_due: Count | None = None
    """Groups in flight that must train in the current step: what the step waits for."""
    busy: BusyShares = BusyShares()
    prefix_hits: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the last step's requests to rollouts that ran where the beginning of their prompt was cached."""


class AgentStatus(Wire):
    """What the conversations of the last step did. Empty or null: not known yet, or agent.type is singleTurn."""

    turns_mean: FiniteFloat | None = None
    """Answers of the policy per episode."""
    turn_reward_mean: FiniteFloat | None = None
    """Over the answers that got a reward from the simulated user."""
    tool_calls_mean: FiniteFloat | None = None
    """Calls per episode."""
    user_seconds_mean: Seconds | None = None
    """From an answer to the user's reply, with waits and retries."""
    segments_mean: FiniteFloat | None = None
    """Token sequences per episode. More than 1: the chat template rewrites the history."""
    segments_by_cause: Annotated[dict[Word, Count], first(MAX_NAMES)] = {}
    """Why segments after the first one were needed."""
    episodes_by_end: Annotated[dict[Word, Count], first(MAX_NAMES)] = {}
    failures: Annotated[dict[Name, Count], first(MAX_NAMES)] = {}
    """Episodes without a score, by what failed: the name of a service, or agent."""


class HungPart(Wire):
    """A part of the job that finishes nothing, although it has work."""

    role: Word
    """Name of the role, as in status.roles: trainer, rollout, reward-NAME, agent-NAME."""
    name: Line
    """What hangs: a Pod, `rank 3`, a worker of a service."""
    seconds: Seconds
    """Since it finished something, or got its work."""
    limit_seconds: Seconds
    """What its own history allows."""
    doing: Line = ""
    """What it works on, and what it finished last."""
    action: Line = ""
    """What is done about it: `its process is replaced`."""


class Outage(Wire):
    """A service that answered before, and now fails all requests."""

    what: Line
    """The field's path, and the address: `spec.rewards[0].http (http://judge:8000)`."""
    seconds: Seconds
    """Since the first failure after the last success."""
    limit_seconds: Seconds
    """spec.outageSeconds."""
    message: Line = ""
    """The last error."""


class TrainerChoices(Wire):
    """What the ranks decided at their start, where the job leaves it to them."""

    recomputation: Word = ""
    """What the backward pass computes again (trainer.gradientCheckpointing): none, selective or full."""
    micro_batch_tokens: Count = 0
    """The most tokens of a micro-batch (trainer.microBatchTokens)."""
    compiled: bool = False
    """Whether decoder layers run compiled (trainer.compile)."""
    weight_transfer: Word = ""
    """How weights come to the rollouts (rollout.weightTransfer): file or device."""


class DriverStatus(Wire):
    """The driver's status, served at /status.

    The operator reads the answers of drivers of every version, and of users' programs. So each field has a bound: too
    long texts and collections are truncated, an impossible number makes the answer invalid.
    """

    run_id: Word = ""
    """Id of the run's folder. A new one has another, and no checkpoint. Empty: not known yet."""
    start_step: Count | None = None
    """Step of the other run whose model this one has begun with (spec.model.source job://). Null: not chosen yet, or
    another source."""
    step: Count = 0
    total_steps: Count = 0
    phase: Word = "starting"
    """starting, evaluate, generate, score, update, publish, checkpoint, done, serving."""
    waits_for: Line = ""
    """Human-readable: what the driver is waiting for; of a service, whom it serves. Empty if nothing."""
    weight_version: Count = 0
    reward: FiniteFloat | None = None
    """Mean score of the last step's valid samples."""
    accuracy: FiniteFloat | None = None
    """Accuracy of the first evaluation set in its last evaluation."""
    accuracies: Annotated[dict[Name, FiniteFloat], first(MAX_NAMES)] = {}
    """The same of each evaluation set, by name."""
    best_step: Count | None = None
    """Finished steps of the best weights by evaluation.best. Null: off, or nothing was evaluated yet."""
    best_value: FiniteFloat | None = None
    """The number that they are the best by."""
    tokens_per_second: FiniteFloat | None = None
    """Sampled tokens per second during the last step's generation."""
    reward_latency_p50_seconds: Seconds | None = None
    reward_latency_p95_seconds: Seconds | None = None
    num_invalid: Count = 0
    """Invalid results so far."""
    step_seconds: Seconds | None = None
    """Wall time of the last step."""
    since_step_seconds: Seconds | None = None
    """Since the last step counted, or since the driver began to train. Outages are not in it."""
    step_limit_seconds: Seconds | None = None
    """The longest time without a step that the job's own steps allow."""
    hung: Annotated[list[HungPart], first(MAX_PROBLEMS)] = []
    """The parts that hang now."""
    outages: Annotated[list[Outage], first(MAX_PROBLEMS)] = []
    """The services that the job waits for."""
    training_share: Share | None = None
    """Share of the run's time, without the queue, that trained: generation, rewards and updates of steps that count."""
    lost_seconds: Annotated[dict[Word, Seconds], first(MAX_NAMES)] = {}
    """Wall time since the run began that did not train, by cause: start, checkpoint, evaluation, restart, hung, outage,
    queue."""
    demand: Annotated[dict[Name, RewardDemand], first(MAX_NAMES)] = {}
    """By reward name."""
    gpu_seconds_per_step: Seconds | None = None
    """Time of generation, updates and weight sync in the last step, without rewards: the minimum of its wall time."""
    restarts: Annotated[dict[Name, Count], first(MAX_NAMES)] = {}
    """Restarts by role that the driver made (trainer group), for whatever reason."""
    rank_failures: RankFailures = RankFailures()
    """Those of the restarts that count against spec.trainer.backoffLimit."""
    choices: TrainerChoices | None = None
    """Null: no trainer group has started."""
    problems: Annotated[list[DriverProblem], first(MAX_PROBLEMS)] = []
    """The first reasons for which samples have no valid score, each once."""
    learning: Learning = Learning()
    schedule: ScheduleStatus = ScheduleStatus()
    agent: AgentStatus = AgentStatus()
