"""Messages of what an agent calls: the simulated user, tools, and runners of episodes."""

from typing import Any, Literal

from pydantic import Field, FiniteFloat

from rljob_api.wire.base import InvalidReason, Lane, Messages, Wire
from rljob_api.wire.contract import MAX_ROWS_OF_PAGE, MAX_TRAJECTORIES


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

    messages: Messages
    """The conversation so far. The last message is the policy's answer."""
    state: dict[str, Any] = {}
    """What the user returned at its last turn of this episode. Empty at its first. Calls share nothing else: each may
    run in another process."""
    turn: int = 0
    """Number of its earlier turns in this episode."""
    episode: str = ""
    """Identifies the episode."""
    prompt: str | Messages
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
    prompt: Messages
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
