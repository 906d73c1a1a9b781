"""The rows of the trajectory log: one for each sample, in one Parquet file per step and lane.

The docstrings document the columns. Texts that are not strings are JSON. Invariants: an invalid result has a reason and
no score; an unknown value is null.

The head serves those of the samples that were scored last, before the trajectory log has their step.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator

from rljob_api.run.base import Count, Record

FORMAT_KEY, FORMAT = "rljob.trajectories", "1"
"""In each file's metadata. Change FORMAT when a column is removed or changes its meaning."""


class Int64:
    """Marks a column of 64 bits; other integers have 32."""


class Float32:
    """Marks a column whose numbers have 32 bits; others have 64."""


def _as_list(value: Any) -> Any:
    return value or []


def _as_map(pairs: Any) -> Any:
    """pyarrow returns a map as pairs, six times as fast as a dict."""
    return dict(pairs or ())


class ResultRow(Record):
    """The result of one reward for a sample."""

    name: str
    """The reward; of a failed episode in a report, the field of the job that failed."""
    valid: bool
    """Whether it has a score."""
    score: float | None = None
    """Unweighted. Null: invalid."""
    components: Annotated[dict[str, float], BeforeValidator(_as_map)] = {}
    """Whatever else the reward returned; keys may differ by sample."""
    reason: str | None = None
    """Why it is invalid, or failed and has the score of `failurePolicy.scores`. Null: neither."""
    message: str = ""
    """The error, or what the reward said."""
    version: str = ""
    """Version of the reward. Empty: it has none."""
    attempts: int | None = None
    """Requests for the result. Null: unknown."""
    queue_seconds: float | None = None
    """Wait in the server, of the last attempt."""
    execute_seconds: float | None = None
    """Execution, of the last attempt."""
    latency_seconds: float | None = None
    """From the end of the episode to the result, with waits and retries."""


class ToolCallRow(Record):
    """A call that the policy wrote."""

    id: str
    """As in the messages."""
    name: str
    """The function."""
    tool: str | None = None
    """The tool of the job. Null: none has the function, or a program made the call."""
    arguments: str | None = None
    """JSON object. Null: what the policy wrote is none."""
    error: str | None = None
    """Null: the call has a result."""
    seconds: float | None = None
    """With waits and retries."""


class TurnRow(Record):
    """One answer of the policy."""

    text: str
    """Without special tokens at its end."""
    reward: float | None = None
    """Null: none."""
    advantage: float | None = None
    """Mean over its tokens. Null: not trained."""
    truncated: bool = False
    """Whether the limit of tokens cut it."""
    user_seconds: float | None = None
    """Until the simulated user replied. Null: it was not asked."""
    user_info: str | None = None
    """JSON object that the user returned for the log. Null: none."""
    tool_calls: Annotated[list[ToolCallRow], BeforeValidator(_as_list)] = []
    """The calls in the answer."""


class SpanRow(Record):
    """A run of tokens of one kind."""

    start: int
    """First token."""
    end: int
    """Token after the last one."""
    turn: int
    """Index into `turns`; -1: context, which the policy did not sample. A turn with an advantage is trained."""
    text: str | None = None
    """With special tokens."""


class SegmentRow(Record):
    """A sequence of tokens that is trained as one row."""

    num_tokens: int
    """Context and answers."""
    cause: str | None = None
    """Why it does not continue the segment before. Null: it is the first."""
    difference: str | None = None
    """Where the two differ first."""
    spans: Annotated[list[SpanRow], BeforeValidator(_as_list)] = []
    """All tokens, in order."""


class SampleRow(Record):
    """One sample with all of its scores. `messages`, `state`, `turns` and `segments` are of conversations: null with
    single turns."""

    step: int
    """The step; of an evaluation, the finished steps of its weights."""
    lane: str
    """train or eval."""
    set: str | None = None
    """Name of the evaluation set. Null: training."""
    group: int
    """Samples of one prompt in a step have the same."""
    sample: int
    """Position in the group: the number of the episode."""
    seat: str | None = None
    """Whose trajectory it is, of an episode with several seats. Null: the episode has one."""
    trajectory: int = 0
    """Position among the trajectories of the episode."""
    within_episode: bool = False
    """Whether its rewards are compared with those of its seat in the same episode. False: in the whole group."""
    prompt_index: Annotated[int, Int64]
    """Row of the data."""
    data_source: str = ""
    """As the rewards get it."""
    prompt: str
    """Text, or the messages of the data."""
    ground_truth: str | None = None
    """Null: the data has none."""
    completion: str
    """The answer; of a conversation, the last one."""
    truncated: bool = False
    """Whether a limit of tokens cut the sample."""
    num_tokens: int = 0
    """Tokens of prompt and completion."""
    num_sampled_tokens: int = 0
    """Tokens that the policy sampled."""
    weights: str = ""
    """GENERATION:VERSION of the oldest weights that sampled it."""
    score: float | None = None
    """Weighted sum. Null: invalid."""
    advantage: float | None = None
    """Value that the update used. Null: not trained."""
    rewards: Annotated[list[ResultRow], BeforeValidator(_as_list)] = []
    """One result of each reward; empty if the episode failed."""
    end: str | None = None
    """Why it ended: answered, user, max_turns, truncated, context, returned, failed."""
    failure: str | None = None
    """Why it is invalid, with the field of the job: `spec.agent.user: timeout: ...`. Null: it is valid."""
    messages: str | None = None
    """JSON list of all chat messages, prompt first."""
    state: str | None = None
    """JSON object that the simulated user returned last, or the environment or the program at the end."""
    own_reward: float | None = None
    """Reward of the environment or the program for the episode, unweighted. Null: none."""
    info: str | None = None
    """JSON object that the environment or the program returned for the log. Null: none."""
    ignored: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Fields of the program's requests that had no effect, such as temperature."""
    turns: list[TurnRow] | None = None
    """One entry for each answer of the policy."""
    segments: list[SegmentRow] | None = None
    """The sequences of tokens that are trained, one after the other. Also of an episode without messages, if it is not
    one prompt and one answer."""


class RecordedRow(SampleRow):
    """A sample with what its update was computed from, so that a replay repeats it. Null in an evaluation."""

    update: int | None = None
    """The mini-batch of the step that trained its group, from 0."""
    part: int | None = None
    """The call of the trainer within the mini-batch, from 0: gradients of a call are summed in one order."""
    position: int | None = None
    """Place of its group in the step, in the order of training."""
    token_ids: list[int] | None = None
    """What the model saw and sampled. Of a conversation, the tokens of all `segments`, one after the other."""
    logprobs: Annotated[list[float] | None, Float32] = None
    """The rollout's log-probability of each sampled token, as training got it."""
    versions: list[int] | None = None
    """Version of the weights that sampled each sampled token."""


REPLAY_COLUMNS = tuple(name for name in RecordedRow.model_fields if name not in SampleRow.model_fields)
"""Most of a file's bytes, which a reader of samples leaves out."""


class RecentSamples(Record):
    """The last samples after a cursor. They have numbers: the last one has `next - 1`, the one before it `next - 2`."""

    feed: str
    """Id of the numbers: those of a head that was restarted start again."""
    next: Count
    """The cursor of the next request."""
    samples: list[SampleRow] = []
    """In the order in which they were scored. Long texts lack their middle; a conversation has its last answer."""
