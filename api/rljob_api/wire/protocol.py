"""JSON messages over HTTP: the reward protocol, weight synchronization, and the driver's status.

Status codes of a reward server: 200 for every executed request, valid or not; 401 without the token; 422 with a reason
if the request is malformed; 429 with Retry-After if the queue is full; 503 while it drains.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, SkipValidation, model_validator

from rljob_api.wire.contract import MAX_COMPONENTS, MAX_ROWS_OF_PAGE, MAX_TRAJECTORIES
from rljob_api.wire.text import Count, Line, Name, Paragraph, Seconds, Share, Word, first

Lane = Literal["train", "eval"]
Message = dict[str, Any]
"""One chat message: role and content."""


class Wire(BaseModel):
    # Built at the first use: each program has messages of its own.
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, defer_build=True)


class InvalidReason(enum.StrEnum):
    """Why a result has no score."""

    EXCEPTION = "exception"
    """The function raised."""
    TIMEOUT = "timeout"
    """Execution exceeded timeoutSeconds and was killed."""
    NOT_FINITE = "not_finite"
    """NaN or infinity."""
    BAD_RETURN = "bad_return"
    """The signature does not allow the return value."""
    WORKER_DIED = "worker_died"
    """The worker process ended (crash, os._exit, out of memory) or closed its pipe."""
    BAD_REQUEST = "bad_request"
    """The request's data cannot be used, so a retry would fail, too. Half a surrogate pair, or JSON that is nested too
    deeply. For a tool: the policy called a function that does not exist, or with wrong arguments; the message is
    written for the policy."""
    ABSTAINED = "abstained"
    """The function returned None: it does not score this sample."""
    REFUSED = "refused"
    """The model that judges or plays the user refused to answer."""
    CONTENT_FILTER = "content_filter"
    """A filter of the model's endpoint withheld the answer."""
    EMPTY = "empty"
    """The model's answer has no text, or its reasoning alone."""
    UNREACHABLE = "unreachable"
    """Client side: no replica answered within the sample's deadline. Server side: the endpoint of the model that judges
    or plays the user is away; the driver waits for it."""
    DEADLINE = "deadline"
    """Client side: no result within deadlineSeconds."""
    CANCELLED = "cancelled"
    """The server shut down, or the client disconnected, before execution ended."""
    INTERRUPTED = "interrupted"
    """Another request of the same process ended it (episodesPerProcess). The client sends this one again: it is no
    attempt of the function."""


Part = Literal["whole", "rendered", "tokens"]
"""What a request has only for a server whose /v1/info names it in `reads`: texts and token ids of a long conversation
are several times as long as the rest."""
PARTS: Final[tuple[Part, ...]] = get_args(Part)


class WholeCompletion(Wire):
    """All that followed the prompt in the episode of an agent, in the forms in which projects pass it to rewards."""

    text: str
    """From the first sampled token to the end, with all that is between the answers, without special tokens."""
    messages: list[Message]
    """The answers, the results of tools and the replies of the user, as OpenAI's API has them. With tools, an answer's
    reasoning is `reasoning_content`, and no part of its content."""
    prompt_ids: SkipValidation[list[int] | None] = None
    """Token ids up to the first sampled one. Part tokens."""
    completion_ids: SkipValidation[list[int] | None] = None
    """Those from there to the end, as one sequence, also where the chat template rewrites the history. Part tokens."""


class Rendered(Wire):
    """Texts with all special tokens, as the engine got and sampled them."""

    prompt: str
    query: str
    """Begins with the prompt."""


class ScoreRequest(Wire):
    """One finished trajectory to score."""

    id: str = Field(min_length=1, max_length=256)
    """Unique per sample. A retry has the same id."""
    lane: Lane = "train"
    """train or eval. Each lane has its own queue."""
    prompt: str | list[Message]
    """Input of the model, before tokenization."""
    completion: str
    """Output of the model, without special tokens; of an agent the last answer, unless agent.completion is all."""
    ground_truth: Any = None
    """Value of the answer column."""
    answer_column: str = ""
    """Name of that column: a parameter with this name gets ground_truth. Empty: none."""
    data_source: str = ""
    """Argument data_source of verl functions."""
    extra_info: dict[str, Any] = {}
    """Other columns of the row, and `index`, `split`, `truncated` (the token limit was reached), `num_tokens`."""
    whole: WholeCompletion | None = None
    """The whole completion of an agent's episode. Part whole. Null: `completion` is all, as agent.completion says."""
    rendered: Rendered | None = None
    """Part rendered: of the whole completion, if there is one."""
    prompt_ids: SkipValidation[list[int] | None] = None
    """Token ids of the prompt. Part tokens."""
    completion_ids: SkipValidation[list[int] | None] = None
    """Token ids of the completion, with the end-of-sequence token. Part tokens."""


class ScoreResult(Wire):
    """The outcome: valid with a score, or invalid with a reason. A failure is never reported as a zero score."""

    id: str
    valid: bool
    score: float | None = None
    """Finite if valid, else null."""
    components: dict[str, float] = Field(default={}, max_length=MAX_COMPONENTS)
    """Additional finite numbers that the function returned (bools as 0 and 1)."""
    pred: str | None = None
    """The answer that the reward read in the completion: what the function returned as `pred`, at most 1,000
    characters. Samples of a prompt with the same text give the same answer (maj@n). Null: it named none."""
    reason: InvalidReason | None = None
    message: str = ""
    """Human-readable: the exception's last line, or the cause. At most 2,000 characters."""
    queue_seconds: float = 0.0
    """From arrival to the start of execution."""
    execute_seconds: float = 0.0
    """From the start of execution to its end."""
    version: str = ""
    """Digest of the reward's source and settings."""

    @model_validator(mode="after")
    def _valid_xor_reason(self) -> ScoreResult:
        finite = self.score is not None and math.isfinite(self.score)
        if self.valid != finite or self.valid != (self.reason is None):
            raise ValueError("a result must be valid with a finite score and no reason, or invalid with a reason")
        return self


class GroupRequest(Wire):
    """The trajectories of one prompt, to be scored together."""

    id: str = Field(min_length=1, max_length=256)
    """Unique per group. A retry has the same id."""
    lane: Lane = "train"
    samples: list[ScoreRequest] = Field(min_length=1, max_length=4096)
    """In the order of the group. Their lanes equal the group's."""
    results: list[ScoreResult] | None = None
    """With scope sampleThenGroup: the valid result of each sample. With scope group: null."""

    @model_validator(mode="after")
    def _one_result_per_sample(self) -> GroupRequest:
        if self.results is not None and [r.valid for r in self.results] != [True] * len(self.samples):
            raise ValueError("results must be null or have one valid result per sample")
        return self


class GroupResult(Wire):
    """The outcome of each sample of a group."""

    id: str
    results: list[ScoreResult]
    """[samples] In the order of the request. If the whole group failed, all samples have the same reason."""


class CallRequest(Wire):
    """One call of a function that an agent uses: of the simulated user, or of a tool; or an episode of a runner."""

    id: str = Field(min_length=1, max_length=256)
    """Unique per call. A retry has the same id."""
    lane: Lane = "train"
    function: str = Field(default="", max_length=256)
    """Name of the tool's function. Empty for the simulated user and for an episode."""
    episode: str = Field(default="", max_length=256)
    """Episode of the call: calls of one episode share its sandbox."""
    arguments: dict[str, Any]
    """For a tool: what the policy wrote. For the simulated user: the fields of UserCall. For a runner: of EpisodeCall,
    or of RowsCall."""


class CallResult(Wire):
    """The outcome of a call: valid with a JSON value, or invalid with a reason."""

    id: str
    valid: bool
    value: Any = None
    """For a tool: what the function returned, as text. For the simulated user: the fields of UserReply. For a runner:
    of EpisodeReply, or of RowsReply."""
    reason: InvalidReason | None = None
    message: str = ""
    """Human-readable: the exception's last line, or the cause. At most 2,000 characters."""
    queue_seconds: float = 0.0
    execute_seconds: float = 0.0
    version: str = ""
    """Digest of the source and its settings."""


class UserCall(Wire):
    """What the simulated user knows when it is its turn."""

    messages: list[Message]
    """The conversation so far. The last message is the policy's answer."""
    state: dict[str, Any] = {}
    """What the user returned at its last turn of this episode. Empty at its first. Calls share nothing else: each may
    run in another process."""
    turn: int = 0
    """Number of its earlier turns in this episode."""
    episode: str = ""
    """Identifies the episode."""
    prompt: str | list[Message]
    ground_truth: Any = None
    """Value of the answer column."""
    data_source: str = ""
    extra_info: dict[str, Any] = {}
    """Other columns of the row."""


class UserReply(Wire):
    """The simulated user's turn."""

    text: str | None = None
    """Its message. Null: it ends the conversation."""
    reward: FiniteFloat | None = None
    """Reward of the policy's last answer. Null: none, which is not 0."""
    state: dict[str, Any] = {}
    """For its next turn."""
    info: dict[str, Any] = {}
    """For the trajectory log."""


class ModelAccess(Wire):
    """How a program calls the policy during one attempt of an episode."""

    url: str
    """Address of the gateway, without a path: `http://10.0.0.7:8300`. OpenAI's clients get `URL/v1`, Anthropic's the
    URL."""
    api_key: str
    """Valid for this attempt alone: a later attempt, and the end of the episode, make it 410."""
    name: str = "policy"
    """The `model` of requests that train."""


class EpisodeCall(Wire):
    """What a runner knows of the episode that it runs: the `arguments` of its CallRequest."""

    episode: str
    """Identifies the episode."""
    attempt: int
    """0, 1, ...: a later one supersedes the earlier ones."""
    model: ModelAccess
    prompt: list[Message]
    ground_truth: Any = None
    """Value of the answer column."""
    data_source: str = ""
    extra_info: dict[str, Any] = {}
    """Other columns of the row, with `index` and `split`."""
    seed: int
    max_turns: int
    """Answers of the policy, or of each trajectory in an episode with seats; the gateway refuses more."""
    deadline_seconds: float
    """Until the episode is invalid."""
    seats: list[str] | None = None
    """agent.seats: the names of those that train. Null: the environment decides."""


Baseline = Literal["group", "episode"]
"""With what the rewards of a trajectory are compared: those of its seat in all episodes of the group, or those of its
seat in the same episode, such as several answers to a problem that another seat has posed."""


class SeatReply(Wire):
    """How one trajectory of an episode with seats ended."""

    seat: str
    session: str = ""
    """The header X-Session-ID of its requests: which of the seat's trajectories. Empty: that without the header."""
    reward: FiniteFloat | None = None
    """Null: EpisodeReply.reward."""
    rewards: dict[str, FiniteFloat | None] = {}
    """As EpisodeReply.rewards. Turns count from the first one of this trajectory."""
    baseline: Baseline = "group"
    info: dict[str, Any] = {}
    """For the trajectory log."""


class EpisodeReply(Wire):
    """How an episode ended: the `value` of its CallResult."""

    reward: FiniteFloat | None = None
    """Reward of the whole episode; with seats, of each one without its own. Null: none, which is not 0."""
    rewards: dict[str, FiniteFloat | None] = {}
    """Rewards of single answers, by the id of the completion, or by the number of the turn ("0" is the first)."""
    seats: list[SeatReply] = Field(default=[], max_length=MAX_TRAJECTORIES)
    """The trajectories of an episode with several seats. Those that are not here got no reward of their own."""
    state: dict[str, Any] = {}
    """State of the environment at the end, for rewards and the trajectory log."""
    info: dict[str, Any] = {}
    """For the trajectory log."""


class RowsCall(Wire):
    """Which rows of a runner's environment or program to return: the `arguments` of a CallRequest for READ_ROWS."""

    split: str = Field(min_length=1, max_length=63)
    start: int = Field(ge=0)
    """Number of the first row, from 0."""
    count: int = Field(ge=1, le=MAX_ROWS_OF_PAGE)
    """Rows at most. There may be fewer, since a page has limits of size and time."""


class RowsReply(Wire):
    """A page of rows: the `value` of the CallResult."""

    rows: list[dict[str, Any]] = Field(max_length=MAX_ROWS_OF_PAGE)
    """As the environment has them, each with its number as `index` unless it has one."""
    total: int | None = Field(default=None, ge=0)
    """Rows of the split. Null: not known before they have all been made."""
    is_last: bool
    """Whether no row follows."""


class ToolSchema(Wire):
    """A function that the policy may call, as chat templates and OpenAI's API describe it."""

    name: str = Field(min_length=1, max_length=64)
    description: str = ""
    parameters: dict[str, Any]
    """JSON schema of the arguments: an object."""


class WeightVersion(Wire):
    """Identifies weights."""

    generation: str
    """Identifies one incarnation of the trainer group. Versions of different generations are not comparable."""
    version: int
    """Incremented by each update within a generation."""

    @property
    def key(self) -> str:
        return f"{self.generation}:{self.version}"


DigestUnit = Literal["element", "word"]


class LocalFile(Wire):
    """Identifies a file for other processes of the same machine, in any mount namespace."""

    boot_id: str
    """Boot id of the kernel that runs."""
    path: str
    device: int
    inode: int


class WeightManifest(WeightVersion):
    """The newest published weights. The head serves the manifest, rank 0 of the trainer the file. Without a file, each
    rank hands the weights to the engines on its device."""

    url: str = ""
    """URL of the safetensors file. Requires the token. Empty without a file."""
    num_bytes: int
    """Size of the file, or of all weights."""
    file_hash: str = ""
    """Hash of the file, for integrity alone (see the trainer's weights.file_hash). Empty without a file."""
    checksum: str
    """Digest of the parameters, independent of fusing and layout (see the trainer's weights.checksum)."""
    digest_unit: DigestUnit = "element"
    """What the digest of the parameters counts."""
    local: LocalFile | None = None
    """The file, for replicas that can see it."""
    merged_share: float | None = None
    """How much of the adapters' update the merged weights have. Null: nothing was merged, or there is no update yet."""
    peers: list[str] = []
    """Replicas (host:port) that may have parts of the file, at the same path. Empty for a replica that did not announce
    an address with its poll (`peer`): it may be of an earlier version."""


OWN_WEIGHTS: Final = WeightManifest(generation="model", version=0, url="", num_bytes=0, file_hash="", checksum="")
"""What the rollouts of a job without a trainer serve: spec.model, as its files have it. There is no file to pull."""

Bytes = Annotated[int, Field(ge=0)]

MAX_PULL_ERROR_LENGTH = 500


class RolloutWeights(WeightVersion):
    """The weights that one rollout replica serves."""

    generation: str = ""
    """Empty while it serves the initial model."""
    version: int = -1
    file_hash: str = ""
    """Hash of the received file. A file that is read in place has that of the manifest."""
    checksum: str = ""
    """Digest read back from the parameters in the engine."""
    pause_seconds: float = 0.0
    """Time for which the last update paused generation."""
    transfer_seconds: float = 0.0
    """Time until the last update could be loaded: its download, if there was one. Not part of the pause."""
    load_seconds: float = 0.0
    """Time to load the last update into the engine. Part of the pause."""
    error: str = ""
    """Why it does not serve the announced weights; empty while it does, or still tries for the first time."""


class PullReport(Wire):
    """What a rollout replica that does not serve the announced weights does about it. Part of its poll of the head."""

    replica: str = Field(min_length=1, max_length=256)
    """Its address."""
    key: str = Field(min_length=1, max_length=256)
    """GENERATION:VERSION of the announced weights."""
    progress: Bytes = 0
    """Received bytes of the file, and one more once it is loaded into the engine."""
    is_draining: bool = False
    """Whether the update waits for requests in flight (updateMode finish)."""
    error: str = Field(default="", max_length=MAX_PULL_ERROR_LENGTH)
    """Last error; empty without one."""


Turn = Literal["trainer", "rollouts"]
"""Who works on devices that trainer and rollouts share."""


class EngineMemory(Wire):
    """What a rollout replica in a trainer Pod holds after it fell asleep or woke up."""

    num_bytes: Bytes
    """In use on its GPUs, by all processes: ask while the trainer holds nothing. Without GPUs, the private memory in
    RAM of the processes with its weights and cache."""
    seconds: Seconds
    """Which the change took."""


class EnginesReport(Wire):
    """The vLLM engines of one trainer Pod after a change of turns."""

    num_running: Count
    """Those that are awake, or asleep: those that have died count again once they were restarted and are warm."""
    num_restarts: Count
    """Their restarts since the Pod's begin."""
    num_bytes: Bytes
    """Sum of EngineMemory over the rollouts."""
    model_bytes: Bytes | None = None
    """The same over the engines of served models; null without such models."""
    seconds: Seconds
    """Which the change took."""


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
    """Null: not known before the first step. False: not for schedule.maxStepsWithoutSignal steps in a row."""
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
    step: Count = 0
    total_steps: Count = 0
    phase: Word = "starting"
    """starting, evaluate, generate, score, update, publish, checkpoint, done."""
    waits_for: Line = ""
    """Human-readable: what the driver is waiting for. Empty if nothing."""
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
