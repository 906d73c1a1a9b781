"""Rewards that a model gives: a sequence classifier, or a chat model that judges.

Owns what the user says of them; `reward` makes them kinds of a reward. The model runs under vLLM beside the reward
server, in the same Pod; a judge may be somebody else's OpenAI-compatible endpoint instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue

from rljob_api.manifest.base import URL_PATTERN, ClusterRule, LongText, PathText, Rule, ShortText, Spec
from rljob_api.manifest.roles import Resources
from rljob_api.manifest.source_rules import SOURCE_FORM, SOURCE_ON_A_CLUSTER

_PRESERVE_UNKNOWN_FIELDS: dict[str, JsonValue] = {"x-kubernetes-preserve-unknown-fields": True}


class ServedModel(Spec):
    """A checkpoint that vLLM serves beside the reward server, for that server alone."""

    RULES: ClassVar[tuple[Rule, ...]] = (SOURCE_FORM,)
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (SOURCE_ON_A_CLUSTER,)

    source: PathText
    """A Hugging Face folder: `hf://org/name`, `pvc://claim/path`, `/path`, or a path relative to the job file
    (`./path`, `../path`; for `rljob run` alone)."""
    revision: ShortText | None = None
    """Branch, tag or commit of an hf:// source."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    gpus: int = Field(default=0, ge=0, le=16)
    """GPUs of each Pod for the model, used as tensor parallelism. 0 means vLLM's CPU backend."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights. auto: that of the checkpoint; float32 becomes float16 or bfloat16."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest text, in tokens. Null means the model's own limit."""
    max_batched_tokens: int | None = Field(default=None, ge=16)
    """Tokens of one forward pass: vLLM fills it with as many waiting requests as fit. Null means vLLM's default."""
    kv_cache_gib: float | None = Field(default=None, gt=0, alias="kvCacheGiB")
    """KV-cache memory on CPUs, in GiB. Null means 1."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes."""
    image: PathText | None = None
    """Image of vLLM's container; null means the operator's trainer image. Ignored by `rljob run`."""
    resources: Resources = Resources()
    """Requests and limits of vLLM's container."""
    extra_args: list[PathText] = Field(default=[], max_length=64)
    """Further arguments of vLLM's API server. They win over ours."""


class ModelReward(ServedModel):
    """A sequence-classification checkpoint (a reward model). vLLM batches the requests by itself."""

    template: Literal["chat", "text"] = "chat"
    """chat: prompt and completion as a conversation, by the checkpoint's chat template. text: the prompt and, right
    after it, the completion, with the tokenizer's special tokens."""
    label: int | None = Field(default=None, ge=0, le=4095)
    """Number of the output that is the score, from 0 (the keys of the checkpoint's id2label). Null: the only one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What becomes of the logits: nothing, sigmoid of the label's own, or softmax over all labels."""
    too_long: Literal["invalid", "truncateLeft", "truncateRight"] = "invalid"
    """A text longer than maxModelLen gives an invalid result, or loses tokens at its beginning (truncateLeft) or at its
    end (truncateRight, which is the end of what is to be scored)."""


class SecretKeyRef(Spec):
    """A key of a Secret in the reward's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in it. Under `rljob run` the environment variable of this name stands for it."""


class EndpointLimits(Spec):
    """What an endpoint may be asked, by all replicas of the reward together. Waiting for it is waiting in the queue and
    counts for no time-out."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests in any minute. Null is no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Most tokens a minute, of prompts and answers, over some minutes. Null is no limit."""
    concurrency: int | None = Field(default=None, ge=1)
    """Most requests in flight. Null: only slots bound it."""


class JudgeEndpoint(Spec):
    """An OpenAI-compatible endpoint that is not ours."""

    url: str = Field(pattern=URL_PATTERN, max_length=2048)
    """Base URL; /chat/completions is added. https://api.openai.com/v1"""
    model: ShortText
    """The `model` of every request."""
    api_key_secret_ref: SecretKeyRef | None = None
    """The key that is sent as bearer token. Null: none is sent."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls the bound on an answer's tokens."""
    limits: EndpointLimits = EndpointLimits()
    """What it may be asked."""


class JudgeParser(Spec):
    """How an answer becomes a score: exactly one of regex and jsonSchema."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("",),
            "must have exactly one of regex, jsonSchema",
            "say in one way how an answer is read",
            lambda parser: (parser.regex is None) != (parser.json_schema is None),
            "has(self.regex) != has(self.jsonSchema)",
        ),
    )

    regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Python regular expression; its group `score`, else its first group, in the last match of the answer."""
    json_schema: dict[str, Any] | None = Field(default=None, json_schema_extra=_PRESERVE_UNKNOWN_FIELDS)
    """Schema that the answer must have: sent as structured output (response_format), so that the model cannot write
    anything else."""
    score_path: ShortText = "score"
    """Where the score is in such an answer: keys and indices, joined by dots. Other numbers beside it become
    components."""
    scores: dict[str, float] = Field(default={}, max_length=64)
    """Words and their scores, for answers that are no numbers (`{good: 1, bad: 0}`; case does not matter)."""


class JudgeSampling(Spec):
    """How answers are sampled."""

    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of an answer, its reasoning included."""
    extra_body: dict[str, Any] = Field(default={}, json_schema_extra=_PRESERVE_UNKNOWN_FIELDS)
    """Further fields of each request (top_p, seed, reasoning_effort)."""


class JudgeReward(Spec):
    """A chat model that is asked for a verdict: exactly one of model (served beside the reward server) and endpoint."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("",),
            "must have exactly one of model, endpoint",
            "name a checkpoint that we serve, or an endpoint that is there",
            lambda judge: (judge.model is None) != (judge.endpoint is None),
            "has(self.model) != has(self.endpoint)",
        ),
        Rule(
            ("votes", "sampling.temperature"),
            "must be 1 at temperature 0: greedy votes are all the same",
            "raise sampling.temperature, or remove votes",
            lambda judge: judge.votes == 1 or judge.sampling.temperature > 0,
            # has(): rules see an object before its own defaults are filled in.
            "!has(self.votes) || self.votes == 1 || "
            "(has(self.sampling) && has(self.sampling.temperature) && self.sampling.temperature > 0.0)",
        ),
        Rule(
            ("compare", "parser.jsonSchema"),
            "must have jsonSchema for ranking and listwise: the answer is a list",
            "give parser.jsonSchema, or compare: pairwise",
            lambda judge: judge.compare not in ("ranking", "listwise") or judge.parser.json_schema is not None,
            "!has(self.compare) || self.compare == 'pairwise' || has(self.parser.jsonSchema)",
        ),
    )

    model: ServedModel | None = None
    """A checkpoint that we serve."""
    endpoint: JudgeEndpoint | None = None
    """An endpoint of someone else's."""
    template: LongText
    """Jinja template (sandboxed) of the user's message, over the fields of a ScoreRequest: `prompt` (text), `messages`
    (its turns), `completion` (see compare), `ground_truth`, `data_source`, `extra_info`."""
    system_prompt: LongText | None = None
    """System message. Null: none is sent."""
    parser: JudgeParser
    """How an answer becomes a score."""
    votes: int = Field(default=1, ge=1, le=64)
    """Answers to each question. More than half of them must be readable; `votes` is then a component."""
    compare: Literal["pairwise", "ranking", "listwise"] | None = None
    """With scope group: how the completions of a group are compared. pairwise: each two are asked about in both orders;
    the template has `first` and `second` in place of `completion`, the answer's score is the first one's (1 it wins, 0
    it loses), and a sample's score is the mean of its comparisons. ranking: one question with `completions`; the answer
    (a jsonSchema's, at scorePath) lists their numbers from 1, the best first, and scores go evenly from 1 to 0.
    listwise: the same question; the answer lists a score for each completion in its order."""
    aggregate: Literal["mean", "majority"] = "mean"
    """What the votes come to: their mean, or the score that most of them have (tied ones: their mean)."""
    sampling: JudgeSampling = JudgeSampling()
    """How answers are sampled."""

    @property
    def returns_list(self) -> bool:
        """Whether an answer speaks of all completions of a group."""
        return self.compare in ("ranking", "listwise")


def find_judge_problems(judge: JudgeReward) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it), as far as types and rules cannot tell. Leaves the template to the server."""
    parser = judge.parser
    if parser.regex is not None:
        yield from (("parser.regex", problem) for problem in _find_regex_problems(parser.regex))
    if parser.json_schema is not None:
        problem = _find_path_problem(parser.json_schema, parser.score_path, judge.returns_list)
        if problem:
            yield "parser.scorePath", problem


def _find_regex_problems(pattern: str) -> Iterator[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        yield f"is no regular expression: {error}"
        return
    if not compiled.groups:
        yield "has no group; put the score in parentheses, as in `Score: (\\d+)`"


def _find_path_problem(schema: dict[str, Any], path: str, needs_list: bool) -> str:
    """Why the schema cannot have what is needed at the path; empty where it can, or where it does not say."""
    for index, part in enumerate(path.split(".")):
        properties = schema.get("properties")
        if "$ref" in schema or not (isinstance(properties, dict) or "items" in schema):
            return ""
        if isinstance(properties, dict):
            if part not in properties:
                where = ".".join(path.split(".")[:index]) or "jsonSchema"
                return f"names {part}, but {where} has {', '.join(properties) or 'no properties'}"
            schema = properties[part]
        else:
            schema = schema["items"]
        if not isinstance(schema, dict):
            return ""
    if not needs_list or "type" not in schema or "array" in schema["type"]:
        return ""
    return f"names {path}, which is of type {schema['type']}; compare: ranking and listwise need an array there"
