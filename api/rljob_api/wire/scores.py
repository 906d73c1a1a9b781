"""Messages of rewards: a trajectory or a group, and its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from pydantic import Field, SkipValidation, model_validator

from rljob_api.wire.base import InvalidReason, Lane, Messages, Wire
from rljob_api.wire.contract import MAX_COMPONENTS

Part = Literal["whole", "rendered", "tokens", "steps", "segments"]
"""What a request has only for a server whose /v1/info names it in `reads`: texts and token ids of a long conversation
are several times as long as the rest, and steps make equal samples different."""
PARTS: Final[tuple[Part, ...]] = get_args(Part)


class WholeCompletion(Wire):
    """All that followed the prompt in the episode of an agent, in the forms in which projects pass it to rewards."""

    text: str
    """From the first sampled token to the end, with all that is between the answers, without special tokens."""
    messages: Messages
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


class TokenSegment(Wire):
    """One sequence of an episode's tokens, as the model saw and sampled them."""

    token_ids: SkipValidation[list[int]]
    sampled: list[tuple[int, int]]
    """Where each run of sampled tokens begins and ends."""
    texts: SkipValidation[list[str]] = []
    """Text of each token to the policy. Empty: unknown."""


class ScoreRequest(Wire):
    """One finished trajectory to score."""

    id: str = Field(min_length=1, max_length=256)
    """Unique per sample. A retry has the same id."""
    lane: Lane = "train"
    """train or eval. Each lane has its own queue."""
    prompt: str | Messages
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
    segments: list[TokenSegment] | None = None
    """All tokens of the episode. Part segments."""
    finished_steps: int | None = None
    """Steps that had ended when the sample's began. Part steps."""
    total_steps: int | None = None
    """Steps of the job. Part steps."""


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
    abstained: list[str] = []
    """The functions of a list that returned None: the score is the sum of the others."""
    logprobs: list[str] | None = None
    """[segments] A teacher's log-probs of the sampled tokens: little-endian fp32, in base64. With teacher.topK each is
    followed by that many pairs of a token (int32) and its log-prob, the likeliest first. Null: of no teacher."""
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


def list_likeliest(entry: Mapping[str, Any], k: int) -> list[tuple[int, float]]:
    """Return the `k` likeliest tokens of an entry of vLLM's prompt_logprobs, with their log-probs. Raise ValueError if
    it has fewer."""
    pairs = sorted((-each["logprob"], int(token)) for token, each in entry.items())
    if len(pairs) < k:
        raise ValueError(f"{len(pairs)} of {k} likeliest tokens")
    return [(token, -negative) for negative, token in pairs[:k]]
