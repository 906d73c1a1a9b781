"""Rewards that a model computes: a sequence classifier, or a chat model that judges.

vLLM serves the model as a sidecar of the reward server. A judge may use an external OpenAI-compatible endpoint instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rljob_api.manifest.base import FreeForm, LongText, PathText, Rule, ShortText, Spec, Url, exactly_one
from rljob_api.manifest.judge_regex import compile_judge_regex
from rljob_api.manifest.roles import Resources
from rljob_api.manifest.sources import ModelSource, SecretKeyRef


class ServedModel(ModelSource):
    """A checkpoint that vLLM serves as a sidecar of the reward server."""

    gpus: int = Field(default=0, ge=0, le=16)
    """GPUs per Pod for the model (nodePool.gpuResource), used for tensor parallelism. 0 means vLLM's CPU backend."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights. auto: the checkpoint's type, with float32 reduced to float16 or bfloat16; with
    `rljob run` on CPUs without instructions for bfloat16, float32."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of a text in tokens. Null: the model's limit."""
    max_batched_tokens: int | None = Field(default=None, ge=16)
    """Maximum tokens per forward pass; vLLM batches waiting requests up to this size. Null: vLLM's default."""
    kv_cache_gib: float | None = Field(default=None, gt=0, alias="kvCacheGiB")
    """KV-cache memory on CPUs, in GiB. Null means 1."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM uses."""
    image: PathText | None = None
    """Image of vLLM's container. Null: the operator's trainer image. Ignored by `rljob run`."""
    resources: Resources = Resources()
    """Requests and limits of vLLM's container."""
    startup_timeout_seconds: int | None = Field(default=None, ge=10, le=86400)
    """Seconds from the Pod's start until the reward server listens, which waits for vLLM; then the server's container
    restarts. Null: 1800. A change replaces the Pods."""
    extra_args: list[PathText] = Field(default=[], max_length=64)
    """Additional arguments of vLLM's API server. They override RLJob's arguments."""


class ModelReward(ServedModel):
    """A sequence-classification checkpoint (a reward model). vLLM batches the requests."""

    template: Literal["chat", "text"] = "chat"
    """chat: prompt and completion as a conversation, formatted by the checkpoint's chat template. text: the completion
    appended to the prompt, with the tokenizer's special tokens."""
    label: int | None = Field(default=None, ge=0, le=4095)
    """Index of the output that is the score, from 0 (the keys of the checkpoint's id2label). Null: the only output."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Function applied to the logits: none, sigmoid of the label's logit, or softmax over all labels."""
    too_long: Literal["invalid", "truncateLeft", "truncateRight"] = "invalid"
    """Handling of texts longer than maxModelLen. invalid: the result is invalid. truncateLeft: tokens are cut at the
    start. truncateRight: tokens are cut at the end, which is the end of the completion."""


class EndpointLimits(Spec):
    """Rate limits of an endpoint, shared by all replicas of the reward. Time spent waiting for a limit does not count
    towards timeoutSeconds."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    """Maximum requests in any minute. Null: unlimited."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Maximum mean tokens per minute, of prompts and answers. Null: unlimited."""
    concurrency: int | None = Field(default=None, ge=1)
    """Maximum requests in flight. Null: limited only by slots."""


class JudgeEndpoint(Spec):
    """An external OpenAI-compatible endpoint."""

    url: Url
    """Base URL, such as https://api.openai.com/v1. RLJob appends /chat/completions."""
    model: ShortText
    """The `model` of every request."""
    api_key_secret_ref: SecretKeyRef | None = None
    """API key, sent as a bearer token. Null: no key is sent."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of the request field that limits the tokens of an answer."""
    limits: EndpointLimits = EndpointLimits()


class JudgeParser(Spec):
    """How an answer becomes a score: exactly one of regex and jsonSchema."""

    RULES: ClassVar = (exactly_one("regex", "jsonSchema", remedy="set one and remove the other"),)

    regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Regular expression in RE2's syntax (no look-around, no back-references). The score is the group `score`, else the
    first group, of the last match in the answer without trailing white space."""
    json_schema: FreeForm | None = None
    """JSON schema of the answer, sent as structured output (response_format)."""
    score_path: ShortText = "score"
    """Path of the score in a jsonSchema answer: keys and indices joined by dots. Other numbers on the same level become
    components."""
    scores: dict[str, float] = Field(default={}, max_length=64)
    """Scores of words, for answers that are not numbers: `{good: 1, bad: 0}`. Case-insensitive."""


class JudgeSampling(Spec):
    """How answers are sampled."""

    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature. 0 is greedy."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of an answer, including its reasoning."""
    extra_body: FreeForm = {}
    """Additional fields of each request (top_p, seed, reasoning_effort)."""


class JudgeReward(Spec):
    """A chat model that judges: exactly one of model (served as a sidecar of the reward server) and endpoint."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one(
            "model", "endpoint", remedy="set model to a checkpoint to serve, or endpoint to an existing endpoint"
        ),
        Rule(
            ("votes", "sampling.temperature"),
            "must be 1 at temperature 0: greedy votes are identical",
            "raise sampling.temperature, or remove votes",
            lambda judge: judge.votes == 1 or judge.sampling.temperature > 0,
            # has(): the API server evaluates rules before it fills in an object's own defaults.
            "!has(self.votes) || self.votes == 1 || "
            "(has(self.sampling) && has(self.sampling.temperature) && self.sampling.temperature > 0.0)",
        ),
        Rule(
            ("compare", "parser.jsonSchema"),
            "must have jsonSchema for ranking and listwise: the answer is a list",
            "set parser.jsonSchema, or compare: pairwise",
            lambda judge: not judge.returns_list or judge.parser.json_schema is not None,
            "!has(self.compare) || self.compare == 'pairwise' || has(self.parser.jsonSchema)",
        ),
    )

    model: ServedModel | None = None
    """A checkpoint to serve."""
    endpoint: JudgeEndpoint | None = None
    """An external OpenAI-compatible endpoint."""
    template: LongText
    """Jinja template (sandboxed) of the user message. Variables: `prompt` (text), `messages` (its turns), `completion`
    (see compare), `ground_truth`, `data_source`, `extra_info`."""
    system_prompt: LongText | None = None
    """System message. Null: not sent."""
    parser: JudgeParser
    """How an answer becomes a score."""
    votes: int = Field(default=1, ge=1, le=64)
    """Answers per question. More than half must be readable; the component `votes` is their number."""
    compare: Literal["pairwise", "ranking", "listwise"] | None = None
    """With scope group: how the completions of a group are compared. pairwise: one question per ordered pair, with
    `first` and `second` in place of `completion`; the answer is the score of the first (1 wins, 0 loses), and a
    sample's score is the mean over its comparisons. ranking: one question with `completions`; the answer (jsonSchema,
    at scorePath) lists their numbers from 1, best first, and scores are spaced evenly from 1 to 0. listwise: the same
    question; the answer lists one score per completion, in order."""
    aggregate: Literal["mean", "majority"] = "mean"
    """How votes are combined. mean: their mean. majority: the most frequent score (on a tie, the mean of the tied)."""
    sampling: JudgeSampling = JudgeSampling()

    @property
    def returns_list(self) -> bool:
        """Whether one answer covers all completions of a group."""
        return self.compare in ("ranking", "listwise")


def find_judge_problems(judge: JudgeReward) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for what types and rules cannot check. The server checks the template."""
    parser = judge.parser
    if parser.regex is not None:
        try:
            if not compile_judge_regex(parser.regex).groups:
                yield "parser.regex", "has no group; put the score in parentheses, as in `Score: (\\d+)`"
        except ValueError as error:
            yield "parser.regex", f"is not a regular expression of RE2: {error}"
    if parser.json_schema is not None:
        problem = _find_path_problem(parser.json_schema, parser.score_path, judge.returns_list)
        if problem:
            yield "parser.scorePath", problem


def _find_path_problem(schema: dict[str, Any], path: str, needs_list: bool) -> str:
    """Return why no answer of this schema has a score at `path`; empty if one may have it."""
    for index, part in enumerate(path.split(".")):
        properties = schema.get("properties")
        if "$ref" in schema or not (isinstance(properties, dict) or "items" in schema):
            return ""
        if isinstance(properties, dict):
            if part not in properties:
                where = ".".join(path.split(".")[:index]) or "jsonSchema"
                return f"refers to {part}, but {where} has {', '.join(properties) or 'no properties'}"
            schema = properties[part]
        else:
            schema = schema["items"]
        if not isinstance(schema, dict):
            return ""
    if not needs_list or "type" not in schema or "array" in schema["type"]:
        return ""
    return f"refers to {path}, which has type {schema['type']}; compare: ranking and listwise need an array there"
