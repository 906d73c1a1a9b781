"""The reward protocol and what the driver, the trainer and the rollouts tell each other, as JSON over HTTP.

A reward server answers 200 to every request that it executed, valid or not; 429 with Retry-After when its queue is
full; 401 without the token; 422 with a reason when the request itself is malformed; 503 while it drains.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Lane = Literal["train", "eval"]
Message = dict[str, Any]
"""One chat message: role, content."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class InvalidReason(enum.StrEnum):
    """Why a result has no score."""

    EXCEPTION = "exception"
    """The function raised."""
    TIMEOUT = "timeout"
    """Execution exceeded timeoutSeconds and was killed."""
    NOT_FINITE = "not_finite"
    """NaN or infinity."""
    BAD_RETURN = "bad_return"
    """The return value is none of the forms that the signature allows."""
    WORKER_DIED = "worker_died"
    """The worker process ended (crash, os._exit, out of memory) or broke its pipe."""
    ABSTAINED = "abstained"
    """The function returned None: it has no opinion on this sample."""
    UNREACHABLE = "unreachable"
    """Client side: no replica answered within the sample's deadline."""
    DEADLINE = "deadline"
    """Client side: deadlineSeconds went by without a result."""
    CANCELLED = "cancelled"
    """The server shut down, or the client left, before execution ended."""


class ScoreRequest(Wire):
    """One finished trajectory to score."""

    id: str = Field(min_length=1, max_length=256)
    """Unique per attempt-independent sample: a retry carries the same id."""
    lane: Lane = "train"
    """train or eval; the lanes never queue behind each other."""
    prompt: str | list[Message]
    """What the model was given, before tokenization."""
    completion: str
    """What it wrote, special tokens left out."""
    ground_truth: Any = None
    """The answer column."""
    data_source: str = ""
    """What verl's functions get as data_source."""
    extra_info: dict[str, Any] = {}
    """Other columns of the row, and `index`, `split`, `truncated` (the token limit was hit), `num_tokens`."""


class ScoreResult(Wire):
    """The outcome: valid with a score, or invalid with a reason. Never a zero in place of a failure."""

    id: str
    valid: bool
    score: float | None = None
    """Finite when valid, else null."""
    components: dict[str, float] = {}
    """Further finite numbers that the function returned (bools as 0 and 1)."""
    reason: InvalidReason | None = None
    message: str = ""
    """For people: the exception's last line, or what was wrong. At most 2,000 characters."""
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
            raise ValueError("a result is valid with a finite score and no reason, or invalid with a reason")
        return self


class GroupRequest(Wire):
    """The trajectories of one prompt, to be scored together."""

    id: str = Field(min_length=1, max_length=256)
    """Unique per attempt-independent group: a retry carries the same id."""
    lane: Lane = "train"
    samples: list[ScoreRequest] = Field(min_length=1, max_length=4096)
    """In the order of the group. Their lanes are the group's."""
    results: list[ScoreResult] | None = None
    """What each sample got when it was scored alone (scope: sampleThenGroup): as many as samples, all of them valid.
    Null where nothing was (scope: group)."""

    @model_validator(mode="after")
    def _one_result_a_sample(self) -> GroupRequest:
        if self.results is None:
            return self
        if len(self.results) != len(self.samples) or not all(result.valid for result in self.results):
            raise ValueError("results has one valid result for each of samples, or is null")
        return self


class GroupResult(Wire):
    """The outcome of each sample of a group."""

    id: str
    results: list[ScoreResult]
    """[samples] In the order of the request's. A group that failed as a whole gives each sample the same reason."""


class WeightManifest(Wire):
    """The newest published weights. Served by the head; the file by the trainer's rank 0."""

    generation: str
    """Names one incarnation of the trainer group. Versions of different generations do not compare."""
    version: int
    """Counts up by one with each update within a generation, as steps do."""
    url: str
    """Where the safetensors file is. Needs the token."""
    num_bytes: int
    """Size of the file."""
    sha256: str
    """Digest of the file."""
    checksum: str
    """Digest of the parameters themselves, independent of how they are fused or laid out (see weights.py)."""

    @property
    def key(self) -> str:
        return f"{self.generation}:{self.version}"


class RolloutWeights(Wire):
    """What one rollout replica serves."""

    generation: str = ""
    """Empty while it serves the model that it started from."""
    version: int = -1
    sha256: str = ""
    """Digest of the file that it received."""
    checksum: str = ""
    """Digest read back from the parameters in the engine."""
    pause_seconds: float = 0.0
    """Time in which the last update kept the engine from generating."""
    transfer_seconds: float = 0.0
    """Time of the download of the last update. Not part of the pause."""
    load_seconds: float = 0.0
    """Time of loading into the engine; part of the pause."""

    @property
    def key(self) -> str:
        return f"{self.generation}:{self.version}"


class RewardDemand(Wire):
    """What one reward is asked for, for the autoscaler: of the collection under way, or of the one to come."""

    samples: int = 0
    """Samples of the whole collection; 0 when none is to come."""
    expected: int = 0
    """Those of them that are still to be scored."""
    is_open: bool = False
    """Whether it is under way: from the first prompt to the last score."""
    is_first: bool = False
    """Whether it is the first one of this driver: all that is said of its times is by its own part so far."""
    starts_in_seconds: float = 0.0
    """When not under way: time until it begins, by how long the last pause took."""
    elapsed_seconds: float = 0.0
    """When under way: time since it began."""
    due_seconds: float | None = None
    """When after its begin the GPUs want the last scores: the generation and, of on-policy mini-batches, the updates
    but the last one's. By the last collection; in the first one by the generation so far. Null: not known yet."""
    window_seconds: float | None = None
    """The target of Little's law: the shortest time, over all moments, that the samples which had not been generated
    yet had until due_seconds, as if all of them had it. It is due_seconds itself when they come evenly."""
    in_flight: int = 0
    """Requests under way."""
    waiting: int = 0
    """Requests for which no replica is there or free."""
    oldest_in_flight_seconds: float = 0.0
    """For how long the oldest of the others has been with a replica: its execution takes that long at least."""
    latency_seconds: float | None = None
    """Mean execution time of a sample, its retries included, over the newest ones."""
    latency_p95_seconds: float | None = None
    """The same, 95th percentile."""


class DriverStatus(Wire):
    """What the driver says of itself at /status."""

    step: int = 0
    total_steps: int = 0
    phase: str = "starting"
    """starting, evaluate, generate, score, update, publish, checkpoint, done."""
    waits_for: str = ""
    """In words what it waits for; empty when nothing."""
    weight_version: int = 0
    reward: float | None = None
    """Mean score of the last step's valid samples."""
    accuracy: float | None = None
    """Last evaluation."""
    tokens_per_second: float | None = None
    """Sampled tokens a second during the last step's generation."""
    reward_latency_p50_seconds: float | None = None
    reward_latency_p95_seconds: float | None = None
    num_invalid: int = 0
    """Invalid results so far."""
    step_seconds: float | None = None
    """Wall time of the last step."""
    demand: dict[str, RewardDemand] = {}
    """By reward name."""
    gpu_seconds_per_step: float | None = None
    """Time that generation, updates and the weights' way to the rollouts took in the last step, whatever the rewards
    did: the floor of its wall time."""
    restarts: dict[str, int] = {}
    """Restarts by role that the driver itself made (trainer group)."""
