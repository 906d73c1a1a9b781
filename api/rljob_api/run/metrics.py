"""The lines of metrics.jsonl: one for each step and for each evaluation, in the order of the run.

Invariants: means are over valid samples only; the file holds one history, since a restart truncates it to the
checkpoint. Only its last line may be incomplete: the driver is writing it, and a reader leaves it for the next read.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rljob_api.run.base import Count, Label, Nats, Record, Score, Seconds, Share, Tokens, Unit


class ToolNumbers(Record):
    """The calls of one tool."""

    calls: Count = 0
    """Calls that the policy wrote."""
    errors: Count = 0
    """Those without a result."""
    seconds_mean: Seconds | None = None
    """Mean time of a call, with waits and retries."""
    seconds_max: Seconds | None = None
    """Time of the slowest call."""


class AgentNumbers(Record):
    """What the turns, the tools and the simulated user did, with conversations. A mean over nothing is null."""

    turns_mean: Annotated[float, Unit("answers")] | None = None
    """Answers of the policy per episode."""
    turn_reward_mean: Score | None = None
    """Mean over the answers that got a reward from the simulated user, the environment or the program."""
    user_seconds_mean: Seconds | None = None
    """Mean time from an answer to the user's reply, with waits and retries."""
    user_seconds_max: Seconds | None = None
    """Time of the slowest reply."""
    tool_calls_mean: Annotated[float, Unit("calls")] | None = None
    """Calls per episode."""
    tools: Annotated[dict[str, ToolNumbers], Label("tool")] = {}
    """By tool. `_none` stands for calls that were not made: no function has their name, or they are unreadable."""
    segments_mean: Annotated[float, Unit("segments")] | None = None
    """Token sequences per episode. More than 1: the chat template rewrites the history."""
    segments_by_cause: Annotated[dict[str, Count], Label("cause", "segments")] = {}
    """Segments after the first one of an episode, by why they were needed."""
    episodes_by_end: Annotated[dict[str, Count], Label("end", "episodes")] = {}
    """Episodes, by what ended them."""
    failures: Annotated[dict[str, Count], Label("service")] = {}
    """Episodes that failed, by what failed: the name of a service, or `agent`."""


class Line(Record):
    """Each line, also that of an evaluation."""

    type: str
    """`step` or `eval`."""
    step: Count
    """The step, from 1. Of an evaluation: the finished steps of its weights."""
    time: Annotated[float, Unit("s since 1970")] | None = None
    """When it ended; a step ends once its weights are published."""


class EpisodeNumbers(Record):
    """The episodes of a step or an evaluation."""

    num_samples: Count = 0
    """Samples, valid or not. With seats, each trajectory is one."""
    num_invalid: Count = 0
    """Results of rewards without a valid score, and episodes that failed."""
    invalid_by_reason: Annotated[dict[str, Count], Label("reason", "invalid")] = {}
    """These, by reason."""
    response_tokens_mean: Tokens | None = None
    """Sampled tokens per episode."""
    response_tokens_max: Annotated[int, Unit("tokens")] | None = None
    """Sampled tokens of the longest episode."""
    truncated_share: Share | None = None
    """Share of the episodes that a limit of tokens cut."""
    seat_rewards: Annotated[dict[str, Score | None], Label("seat")] = {}
    """Mean of what training raises, by seat, in episodes with several seats ([self-play](self-play.md))."""
    agent: AgentNumbers | None = Field(default=None, exclude_if=lambda value: value is None)
    """The conversations; absent if no episode is one."""


class SourceNumbers(Record):
    """The groups of a step whose prompts are of one source."""

    share: Share = 0.0
    """Share of the step's groups."""
    reward: Score | None = None
    """Mean of what training raises, over its valid samples."""
    success: Share | None = None
    """Share of its valid samples whose reward reaches `data.curriculum.success`. Null: no curriculum."""
    zero_signal_share: Share | None = None
    """Share of its groups without an advantage."""


class RewardNumbers(Record):
    """The rewards of a step."""

    reward: Score | None = None
    """Mean of what training raises: the score, and the rewards of all turns. Null: no sample is valid."""
    reward_std: Score | None = None
    """Its standard deviation over the samples. Null: fewer than two are valid."""
    components: Annotated[dict[str, Score | None], Label("component")] = {}
    """Means of `score` and of each component; with several rewards those of REWARD and REWARD/COMPONENT."""
    reward_versions: Annotated[dict[str, Count], Label("reward")] = {}
    """Versions among the valid scores, by reward. Results without a version count as one."""
    rewards: Annotated[dict[str, Score | None], Label("reward")] = {}
    """Mean of the valid scores by reward; `runner` is what the environment or the program gave."""
    reward_latency_p50_seconds: Seconds | None = None
    """From the end of an episode to all of its results: the median."""
    reward_latency_p95_seconds: Seconds | None = None
    """The same: the 95th percentile."""
    reward_queue_p95_seconds: Seconds | None = None
    """Wait of a request in the server, before its execution: the 95th percentile."""
    reward_execute_mean_seconds: Seconds | None = None
    """Mean time of an execution."""
    num_masked: Count = 0
    """Samples that were not trained, such as those without a valid score."""
    scored_failures_by_reason: Annotated[dict[str, Count], Label("reason", "scored_failures")] = {}
    """Failed results that `failurePolicy.scores` gave a score, by reason."""
    zero_signal_share: Share | None = None
    """Share of the groups without an advantage. 1: the step teaches nothing."""
    sources: Annotated[dict[str, SourceNumbers], Label("source")] = Field(
        default={}, exclude_if=lambda value: not value
    )
    """By source of the prompts; absent without `data.mix` and `data.curriculum`."""


class UpdateNumbers(Record):
    """The updates of a step: means over them; means over tokens are of the updates that trained some.

    What compares the trainer with rollouts is of the first update: later ones differ from the rollout on purpose. Null:
    no update has such a number.
    """

    loss: float | None = None
    """Policy loss, with the KL penalty and the entropy bonus; the cross-entropy in the warm start."""
    policy_loss: float | None = None
    """Policy loss alone."""
    grad_norm: float | None = None
    """Norm of the gradient before clipping. Null: it was not finite."""
    kl: Nats | None = None
    """KL to the reference, per token, by the chosen estimator. Null: no reference is loaded."""
    entropy: Nats | None = None
    """Entropy of the policy, per token."""
    clip_fraction: Share | None = None
    """Share of tokens whose ratio was clipped."""
    corrected_share: Share | None = None
    """Share of tokens whose importance weight (by `correction.level`) was cut or masked."""
    rejected_share: Share | None = None
    """Share of tokens that `correction.rejection` left out."""
    effective_sample_share: Share | None = None
    """(sum of weights)² / (n x sum of squared weights), over tokens; 1 is on-policy."""
    critic_loss: Annotated[float, Unit("squared error / 2")] | None = None
    """Loss of the critic. Null: there is none."""
    logprob_difference: Nats | None = None
    """Mean difference of a token's log-prob between trainer and rollout, first update."""
    mismatch_kl: Nats | None = None
    """Mean k3 estimate of KL(rollout ‖ trainer), first update."""
    mismatch_max: Nats | None = None
    """Largest difference of a token's log-prob, first update."""
    num_skipped_updates: Count = 0
    """Updates left out, because the gradient was not finite."""
    learning_rate: float | None = None
    """Learning rate of the last update."""
    num_tokens: Annotated[int, Unit("tokens")] = 0
    """Sampled tokens of all updates."""
    trained_share: Share | None = None
    """Share of `num_tokens` in rows with an advantage. Without a KL penalty, an entropy bonus or a critic only these
    are computed."""
    num_micro_batches: Count = 0
    """Micro-batches on the busiest rank, of all updates."""


class ScheduleNumbers(Record):
    """What the schedule did in a step."""

    staleness_mean: Annotated[float, Unit("steps")] | None = None
    """Steps between the weights that sampled a token and its training: the mean. Null: no token was sampled."""
    staleness_max: Annotated[int, Unit("steps")] | None = None
    """The same: the maximum, at most `schedule.maxStaleness`."""
    staleness_histogram: Annotated[dict[int, Count], Label("staleness", "staleness_tokens")] = {}
    """Trained tokens by staleness."""
    busy_shares: Annotated[dict[str, Share], Label("role")] = {}
    """Share of the step in which each role worked: rollouts, rewards, trainer, users, tools, runners. They overlap."""
    turns_by_prefix: Annotated[dict[str, Count], Label("outcome")] = {}
    """Requests to rollouts since the step before, by where they ran. hit: on the replica that has the beginning of the
    prompt in its cache. spilled: elsewhere, since that one had too much to do, or failed. new: no replica had it."""
    num_replaced_groups: Count = 0
    """Groups without signal that dynamic sampling replaced."""
    num_skipped_prompts: Count = 0
    """Prompts that `data.curriculum` passed over."""

    def prefix_share(self, outcome: str) -> float | None:
        """Return the share of the requests in `turns_by_prefix`, to three digits. None: there were none."""
        total = sum(self.turns_by_prefix.values())
        return round(self.turns_by_prefix.get(outcome, 0) / total, 3) if total else None


class TurnNumbers(Record):
    """The changes of turns of a step, with `rollout.placement: trainer`. Empty or 0 otherwise."""

    turn_seconds: Annotated[dict[str, Seconds], Label("part")] = {}
    """Time of each part: `sleep` (rollouts free their memory), `restore` (the trainer's state returns), `free` (it
    leaves again), `wake` (rollouts get the memory of weights back)."""
    device_bytes: Annotated[dict[str, Annotated[int, Unit("bytes")]], Label("state")] = {}
    """GPU memory of all ranks (`trainer_update`, `trainer_freed`), and what is in use in the rollouts' turn
    (`rollouts_asleep`, `rollouts_awake`: with weights, before the cache; `models_asleep`, `models_awake`: of served
    models). Without GPUs, memory of their processes."""
    num_engine_restarts: Count = 0
    """Restarts of rollouts and of served models in the trainer's Pods, since the Pods began."""


class StepRecord(TurnNumbers, ScheduleNumbers, UpdateNumbers, RewardNumbers, EpisodeNumbers, Line):
    """One step: its samples, its updates, and where its time went."""

    type: Literal["step"] = "step"
    """Always `step`."""
    tokens_per_second: Annotated[float, Unit("tokens/s")] | None = None
    """Sampled tokens per second of generation, of all rollouts. Null: nothing was generated in this step."""
    pause_seconds: Seconds | None = None
    """For how long a rollout paused for its weights: the mean over rollouts."""
    transfer_seconds: Seconds | None = None
    """Time until a rollout had its weights: the mean over rollouts."""
    transfer_bytes: Annotated[float, Unit("bytes")] | None = None
    """Bytes that a rollout got for its weights: the mean over rollouts. 0: it reads the file in place."""
    weight_version: Count = 0
    """Version of the weights after the step."""
    weight_digest: str = ""
    """Digest (hash) of these weights. Equal in two runs: the weights are equal, bit by bit."""
    merged_share: Share | None = None
    """Share of the adapters' update in the published weights ([LoRA](lora.md#what-rollouts-load)). Null: adapters are
    not merged."""
    num_rollouts: Count = 0
    """Rollouts that serve the weights of the last update."""
    phase_seconds: Annotated[dict[str, Seconds], Label("phase")] = {}
    """The driver's time within the step, by phase."""
    step_seconds: Seconds | None = None
    """Wall time of the step."""
    training_share: Share | None = None
    """Share of the run's time that trained; time in a queue is left out ([lost time](#time-that-does-not-train))."""
    lost_seconds: Annotated[dict[str, Seconds], Label("cause")] = {}
    """Time that did not train, since the run began, by cause."""
    prompts: list[int] = []
    """Rows of the dataset that it trained, in the order of dispatch; in the warm start those of `data.warmStart`."""
    prompt_sources: list[str] = Field(default=[], exclude_if=lambda value: not value)
    """Name of the source of each entry of `prompts`; absent as `sources`. `warmStart` in the warm start."""


class EvaluationNumbers(Record):
    """The figures of an evaluation. Bounds are of a 95 % confidence interval over prompts. Null: unknown,
    as with one prompt."""

    accuracy: Score | None = None
    """Mean over the prompts of the mean of `evaluation.accuracy` over their scored episodes, and the failed ones with 0
    (avg@n). Null: none was scored."""
    accuracy_low: Score | None = None
    """Lower bound of the accuracy."""
    accuracy_high: Score | None = None
    """Upper bound of the accuracy."""
    pass_at: Annotated[dict[int, Share], Label("k")] = {}
    """pass@k by k: the probability that one of k answers solves the prompt."""
    pass_at_low: Annotated[dict[int, Share], Label("k")] = {}
    """Lower bounds of pass@k."""
    pass_at_high: Annotated[dict[int, Share], Label("k")] = {}
    """Upper bounds of pass@k."""
    majority: Score | None = None
    """maj@n: accuracy of the answer that most samples of a prompt give. Null: no reward names the answer."""
    majority_low: Score | None = None
    """Lower bound of maj@n."""
    majority_high: Score | None = None
    """Upper bound of maj@n."""
    num_failed: Count = 0
    """Episodes that the agent failed."""
    num_left_out: Count = 0
    """Other episodes without this figure."""


class EvaluationRecord(EvaluationNumbers, EpisodeNumbers, Line):
    """One evaluation of the prompts of one set."""

    type: Literal["eval"] = "eval"
    """Always `eval`."""
    set: str = "eval"
    """Name of the evaluation set; `eval` is that of `data.eval`."""
    samples_per_prompt: Count = 1
    """Answers to each prompt: the n of avg@n and maj@n."""
    num_prompts: Count = 0
    """Prompts of the set."""
    num_results: Count = 0
    """Results of rewards, valid or not."""
    means: Annotated[dict[str, Score | None], Label("component")] = {}
    """Means of `score` and of each component, as `components` of a step."""
    seconds: Seconds = 0.0
    """Time from the first prompt to the last score."""


class CheckpointRecord(Record):
    """One complete checkpoint, for the trackers and /metrics: it has no line in metrics.jsonl."""

    type: Literal["checkpoint"] = "checkpoint"
    step: Count
    wait_seconds: Seconds
    """For how long training waited for it."""
    write_seconds: Seconds
    """For how long it was then written, next to training."""


AnyRecord = StepRecord | EvaluationRecord | CheckpointRecord
_LINE: TypeAdapter[StepRecord | EvaluationRecord] = TypeAdapter(
    Annotated[StepRecord | EvaluationRecord, Field(discriminator="type")]
)
_NO_FIELDS: set[str] = set()
"""In place of the names of the fields that a line has, which take a third of a record's memory and have no reader."""


@dataclass(frozen=True)
class Metrics:
    """The complete lines of a file."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()

    @property
    def records(self) -> tuple[StepRecord | EvaluationRecord, ...]:
        return (*self.steps, *self.evaluations)

    @property
    def prompts_trained(self) -> list[list[int]]:
        """[steps][prompts] Rows of the dataset."""
        return [step.prompts for step in self.steps]

    @property
    def last_step(self) -> int:
        """0 without a step."""
        return self.steps[-1].step if self.steps else 0


def append_records(path: Path, records: Iterable[StepRecord | EvaluationRecord]) -> int:
    """Append the lines of `records`, or nothing if the disk is full. Return the bytes that the file then has. Numbers
    that are not finite become null: JSON has none."""
    line = memoryview(b"".join(record.model_dump_json().encode() + b"\n" for record in records))
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(size)
            raise
        return file.tell()


def read_metrics(path: Path) -> Metrics:
    """Return the complete lines; none if the file does not exist."""
    try:
        return parse_metrics(path.read_bytes().split(b"\n"))
    except FileNotFoundError:
        return Metrics()


def parse_metrics(lines: Iterable[bytes | str]) -> Metrics:
    records = []
    for line in lines:
        with contextlib.suppress(ValidationError):
            records.append(_LINE.validate_json(line))
            object.__setattr__(records[-1], "__pydantic_fields_set__", _NO_FIELDS)
    steps = tuple(record for record in records if isinstance(record, StepRecord))
    return Metrics(steps, tuple(record for record in records if isinstance(record, EvaluationRecord)))
