"""The models that a service asks: a sequence classifier, a chat model that judges or plays the user, or a teacher.

vLLM serves the model as a sidecar of the server, or in the trainer's Pods. A chat model may be behind an external
OpenAI-compatible endpoint instead.

The regular expressions of judges are RE2's, whose time is linear in the answer, so that no answer can block a server.
`rljob validate` and the reward server both compile them here, and so accept the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest.base import (
    FreeForm,
    LongText,
    PathText,
    Rule,
    ShortText,
    Spec,
    Url,
    exactly_one,
    yaml_fields,
)
from rljob_api.manifest.quantity import Size
from rljob_api.manifest.roles import KV_CACHE_FITS, OWN_GPU, Placement, Resources
from rljob_api.manifest.sources import ChatTemplateArguments, ModelSource, SecretKeyRef

SHARED_GPU: Final = 0.2
"""vLLM's fraction of a GPU that it shares with rollouts and a rank."""
_STARTUP_SECONDS: Final = 1800
"""A large model takes minutes to load."""


def _in_trainer(field: str, is_left_out: Callable[[ServedModel], bool], cel: str) -> Rule:
    """The rule that a field of vLLM's container is left out if it has none. `cel` is over the model."""
    return Rule(
        (field, "placement"),
        "must be left out with placement trainer: vLLM runs in the trainer's Pods",
        f"set spec.trainer.{field}, or remove placement",
        lambda model: model.placement == "separate" or is_left_out(model),
        f"!has(self.placement) || self.placement == 'separate' || {cel}",
    )


class ServedModel(ModelSource):
    """A checkpoint that vLLM serves as a sidecar of the reward server, or in the trainer's Pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *ModelSource.RULES,
        KV_CACHE_FITS,
        _in_trainer("image", lambda model: model.image is None, "!has(self.image)"),
        _in_trainer(
            "resources",
            lambda model: model.resources == Resources(),
            "!has(self.resources) || ((!has(self.resources.requests) || self.resources.requests.size() == 0) && "
            "(!has(self.resources.limits) || self.resources.limits.size() == 0))",
        ),
    )

    placement: Placement = "separate"
    """Where vLLM runs. separate: next to the server. trainer: in the trainer's Pods, on its GPUs; it sleeps while the
    trainer works. It needs rollout.placement trainer. Immutable unless the job is suspended, as all of such a model."""
    chat_template_arguments: ChatTemplateArguments = {}
    """Variables of the model's chat template in each request, such as `{enable_thinking: false}`."""
    gpus_per_replica: int = Field(default=0, ge=0, le=16)
    """GPUs per Pod for the model, used for tensor parallelism. 0: vLLM's CPU backend."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights. auto: the checkpoint's type, with float32 reduced to float16 or bfloat16; with
    `rljob run` on CPUs without bfloat16, float32."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of a text in tokens. Null: the model's limit."""
    max_batched_tokens: int | None = Field(default=None, ge=16)
    """Maximum tokens per forward pass; vLLM batches waiting requests up to this size. Null: vLLM's default."""
    kv_cache_memory: Size = Size("1Gi")
    """Memory for the KV cache on CPUs, such as 512Mi."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM uses. Null: 0.9; with placement trainer 0.2, next to the rollouts."""
    image: PathText | None = None
    """Image of vLLM's container. Null: the operator's trainer image. Ignored by `rljob run`."""
    resources: Resources = Resources()
    """Requests and limits of vLLM's container."""
    startup_timeout_seconds: int | None = Field(default=None, ge=10, le=86400)
    """Seconds from the Pod's start until the reward server listens, which waits for vLLM. Then the server's container
    restarts. With placement trainer, of vLLM. Null: 1800. A change replaces the Pods."""
    extra_args: list[PathText] = Field(default=[], max_length=64)
    """Additional arguments of vLLM's API server. They override RLJob's arguments."""

    @property
    def gpu_share(self) -> float:
        """gpuMemoryUtilization, and what null means."""
        return self.gpu_memory_utilization or (SHARED_GPU if self.placement == "trainer" else OWN_GPU)

    @property
    def startup_seconds(self) -> int:
        """startupTimeoutSeconds, and what null means."""
        return self.startup_timeout_seconds or _STARTUP_SECONDS


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


HeaderName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]
HeaderValue = Annotated[str, Field(max_length=4096, pattern=r"^[ -~]*$")]


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
    """Base URL, such as https://api.openai.com/v1. RLJob appends /chat/completions, and for a teacher /completions."""
    model: ShortText
    """The `model` of every request."""
    api_key_secret_ref: SecretKeyRef | None = None
    """API key, sent as a bearer token. Null: no key is sent."""
    headers: dict[HeaderName, HeaderValue] = Field(default={}, max_length=64)
    """Additional headers of each request, such as those of an API gateway. The key belongs in apiKeySecretRef."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of the request field that limits the tokens of an answer."""
    limits: EndpointLimits = EndpointLimits()


class JudgeParser(Spec):
    """How an answer becomes a score: exactly one of regex and jsonSchema."""

    RULES: ClassVar = (
        exactly_one("regex", "jsonSchema", remedy="set one and remove the other"),
        Rule(
            ("minScore", "maxScore"),
            "must not be more than maxScore",
            "exchange them",
            lambda parser: parser.min_score is None or parser.max_score is None or parser.min_score <= parser.max_score,
            "!has(self.minScore) || !has(self.maxScore) || self.minScore <= self.maxScore",
            lambda parser: f"{parser.min_score:g} and {parser.max_score:g}",
        ),
    )

    regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Regular expression in RE2's syntax (no look-around, no back-references). The score is the group `score`, else the
    first group, of the last match in the answer without trailing white space."""
    json_schema: FreeForm | None = None
    """JSON schema of the answer. Other answers are invalid, also those of endpoints that do not enforce it."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How jsonSchema is sent. json_schema, json_object: OpenAI's types of response_format, which are structured output,
    and JSON mode without the schema. none: not at all. Without the schema, the template has to describe the answer."""
    score_path: ShortText = "score"
    """Path of the score in a jsonSchema answer: keys and indices joined by dots. Other numbers on the same level become
    components."""
    scores: dict[str, float] = Field(default={}, max_length=64)
    """Scores of words, for answers that are not numbers: `{good: 1, bad: 0}`. Case-insensitive."""
    min_score: float | None = None
    """Smallest number that an answer may have; with a smaller one it is invalid. Null: no limit."""
    max_score: float | None = None
    """Largest number that an answer may have; with a larger one it is invalid. Null: no limit."""


class JudgeSampling(Spec):
    """How answers are sampled."""

    temperature: float | None = Field(default=0.0, ge=0)
    """Softmax temperature. 0 is greedy. Null: not sent, for models that refuse the field."""
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
            lambda judge: judge.votes == 1 or judge.sampling.temperature != 0,
            # has(): the API server evaluates rules before it fills in an object's own defaults.
            "!has(self.votes) || self.votes == 1 || "
            "(has(self.sampling) && (!has(self.sampling.temperature) || self.sampling.temperature > 0.0))",
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


class TeacherModel(ServedModel):
    """A checkpoint that vLLM serves for the log-probs of prompts."""

    max_batched_tokens: int | None = Field(default=2048, ge=16)
    """Maximum tokens per forward pass. Log-probs of prompts take 8 bytes for each of them and each token of the
    vocabulary, beyond gpuMemoryUtilization. Null: vLLM's default."""


class TeacherReward(Spec):
    """A model that the policy learns from, token by token: exactly one of model (served as a sidecar of the reward
    server), endpoint and hint. It needs the policy's tokenizer."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one(
            *("model", "endpoint", "hint"),
            remedy="set model to a checkpoint to serve, endpoint to one that exists, or hint for the policy itself",
        ),
    )

    model: TeacherModel | None = None
    """A checkpoint to serve, such as an export or `job://NAME`. Its context needs one token more than the episodes."""
    endpoint: JudgeEndpoint | None = None
    """One that returns log-probs of a prompt (prompt_logprobs), as vLLM's."""
    hint: Annotated[LongText, Field(min_length=1)] | None = None
    """The teacher is the policy itself, with this text before what it saw. `{solution}` is a column of the row."""
    clip: float = Field(default=20.0, gt=0)
    """Limit of a token's difference or divergence, in both directions."""
    top_k: int = Field(default=0, ge=0, le=20)  # as many as vLLM returns by default (max_logprobs)
    """Likeliest tokens whose KL(teacher || policy) is a term of the loss. 0: the sampled one's advantage."""
    when: Annotated[
        dict[ShortText, Annotated[list[ShortText], Field(min_length=1, max_length=256)]], Field(max_length=16)
    ] = {}
    """Values of columns of the rows that it teaches, such as `{data_source: [math, physics]}`; all columns must match.
    Empty: all rows."""


class UserModel(Spec):
    """A chat model that plays the user: exactly one of model (served as a sidecar of the user's server) and
    endpoint."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one(
            "model", "endpoint", remedy="set model to a checkpoint to serve, or endpoint to an existing endpoint"
        ),
    )

    model: ServedModel | None = None
    """A checkpoint to serve."""
    endpoint: JudgeEndpoint | None = None
    """An external OpenAI-compatible endpoint."""
    persona: LongText
    """Jinja template (sandboxed) of the system message: who the user is, what it wants, and when it is satisfied.
    Variables: `prompt` (text), `messages` (the conversation), `ground_truth`, `data_source`, `extra_info`, `turn`
    (number of its earlier replies)."""
    stop: Annotated[str, Field(min_length=1, max_length=256, pattern=r"\S")] | None = None
    """Text with which the model ends the conversation, such as `[DONE]`; the persona must say so. What precedes it is
    not sent to the policy. Null: only the limits of turns end it."""
    sampling: JudgeSampling = JudgeSampling()


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


def limits_suffice(asker: Literal["judge", "model", "teacher"]) -> tuple[Rule, ...]:
    """Return the rules that each replica's share of an endpoint's limits suffices for its smallest execution.

    `asker`: the field that has the endpoint.
    """
    return _limit_suffices(asker, "concurrency", 1), _limit_suffices(asker, "requestsPerMinute", 2)


def _limit_suffices(asker: Literal["judge", "model", "teacher"], name: str, num_requests: int) -> Rule:
    """Return the rule that a share suffices for `num_requests`; of a judge, for each vote of a question."""
    attribute = yaml_fields(EndpointLimits)[name][0]
    has_votes = asker == "judge"

    def holds(service: Any) -> bool:
        asking = getattr(service, asker)
        if asking is None or asking.endpoint is None:
            return True
        limit = getattr(asking.endpoint.limits, attribute)
        replicas = service.autoscaling.max_replicas if service.autoscaling else service.replicas
        return limit is None or limit >= num_requests * (asking.votes if has_votes else 1) * replicas

    field = f"{asker}.endpoint.limits.{name}"
    factors = [*([str(num_requests)] if num_requests > 1 else []), *(["votes"] if has_votes else []), "replicas"]
    votes = " (has(self.judge.votes) ? self.judge.votes : 1) *" if has_votes else ""
    return Rule(
        (field, *(["judge.votes"] if has_votes else []), "replicas"),
        f"must be at least {' x '.join(factors)}: each replica gets an equal share",
        f"raise it, or lower replicas (autoscaling.maxReplicas){' or judge.votes' if has_votes else ''}",
        holds,
        f"!has(self.{asker}) || !has(self.{asker}.endpoint) || !has(self.{asker}.endpoint.limits) || "
        f"!has(self.{field}) || self.{field} >= {num_requests} *{votes} "
        "(has(self.autoscaling) ? self.autoscaling.maxReplicas : has(self.replicas) ? self.replicas : 1)",
    )


_REMEDY = "RE2 has neither look-around nor back-references: https://github.com/google/re2/wiki/Syntax"


def compile_judge_regex(pattern: str) -> Any:
    """Return a regular expression with the methods of Python's. Raise ValueError with what is wrong with it."""
    import re2  # here: most programs that import the manifest's types never need it

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        [detail] = error.args
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        raise ValueError(f"{text}; {_REMEDY}") from None
