"""The kinds of services that a server can host, by the argument of --serves.

Of the simulated user, tools and a runner, each request is one call, each reply has one value; of a reward, a request is
a sample or a group, the reply a score for each sample. Invariant: nothing else of the server asks which kind it hosts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from rljob_api.errors import UserError
from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, describe_unknown, find_plugins
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import JudgeReward, ModelReward, TeacherReward, UserModel
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, EpisodeCall, RowsCall, UserCall
from rljob_api.wire.contract import MAX_RESULT_BYTES, READ_ROWS, UrlPath
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.results import (
    CallReply,
    ExecutionResult,
    RunnerCallReply,
    SampleReply,
    StartupReport,
    ToolCallReply,
    UserCallReply,
    failure,
)
from rljob_service.worker.settings import EPISODES, SCORE, TOOLS, USER, FunctionSettings

Request = ScoreRequest | GroupRequest | CallRequest
RequestType = type[ScoreRequest] | type[GroupRequest] | type[CallRequest]
Model = JudgeReward | ModelReward | TeacherReward | UserModel
"""What answers in place of a function."""
S = TypeVar("S", Reward, CallService)
_MAX_PROBLEMS, _MAX_PLACE = 8, 200
"""Limits of an error: its number of problems, and how long the name of a place is."""


class Endpoint(NamedTuple):
    request: RequestType
    max_body_bytes: Callable[[ServiceSettings], int]


class ReplyFormat(NamedTuple):
    """What a worker answers."""

    adapter: TypeAdapter[Any]
    max_bytes: int
    """For each sample, or for the call."""
    too_long: ExecutionResult


class Kind(ABC, Generic[S]):
    name: ClassVar[str]
    """The argument of --serves."""
    noun: ClassVar[str]
    """In the log."""
    settings_type: type[S]
    """The type of the file that the server reads."""
    endpoints: ClassVar[Mapping[bytes, Endpoint]]
    """By path."""
    replies: ClassVar[ReplyFormat]
    has_teardown: ClassVar[bool] = False
    """Whether a request that must end may first release what it holds."""
    version_neutral: ClassVar[tuple[str, ...]] = ()
    """Fields of FunctionSettings that never enter the version of a service of this kind."""

    @abstractmethod
    def find_model(self, settings: S) -> Model | None:
        """Return the model that answers; None if a function does."""

    @abstractmethod
    def describe_missing(self, settings: S) -> str:
        """Return what a file without a model and a function must have."""

    def complete(self, function: FunctionSettings, settings: S, framework: str) -> FunctionSettings:
        """Return the settings of workers with what this kind adds. `framework`: the argument of the server."""
        return function

    def caches(self, settings: S) -> bool:
        """Return whether equal requests share their result."""
        return False

    @abstractmethod
    def refuse_path(self, path: bytes, settings: S) -> str:
        """Return where a request to a path of ENDPOINTS belongs that this service does not serve; empty if it does."""

    def find_problem(self, request: Request, settings: S) -> str:
        """Return why the service cannot execute a well-formed request; empty if it can."""
        return ""

    def facts(self, settings: S, report: StartupReport) -> dict[str, Any]:
        """Return what /v1/info has of this kind alone."""
        return {}

    @abstractmethod
    def describe_started(self, settings: S, report: StartupReport) -> str:
        """Return what the log has about a service that has started."""


def request_bytes(settings: ServiceSettings) -> int:
    """Return how long the body of one sample or call may be."""
    return settings.max_request_size.num_bytes


def describe_errors(error: ValidationError, whole: str = "body") -> str:
    """Return the problems as one line. `whole`: what has the problems that are of no single field."""
    problems = error.errors(include_url=False, include_input=False)
    shown = [f"{'.'.join(map(str, e['loc']))[:_MAX_PLACE] or whole}: {e['msg']}" for e in problems[:_MAX_PROBLEMS]]
    return "; ".join(shown + [f"and {len(problems) - _MAX_PROBLEMS} more"] * (len(problems) > _MAX_PROBLEMS))


_MAX_GROUP_BYTES = 60 << 20
"""Less than MAX_FRAME_BYTES of a worker."""
_SAMPLES, _GROUPS = UrlPath.SCORE.encode(), UrlPath.SCORE_GROUP.encode()
_PATHS = {
    _SAMPLES: (("sample", "sampleThenGroup"), f"POST whole groups to {UrlPath.SCORE_GROUP}, or set scope: sample"),
    _GROUPS: (("group", "sampleThenGroup"), f"POST each sample to {UrlPath.SCORE}, or set scope: group"),
}
"""The scopes of the rewards that serve it, and the remedy for a request to others."""


def _group_bytes(settings: ServiceSettings) -> int:
    return min(3 * settings.max_request_size.num_bytes, _MAX_GROUP_BYTES)


class Score(Kind[Reward]):
    name = SCORE
    noun = "reward"
    settings_type = Reward
    endpoints = {_SAMPLES: Endpoint(ScoreRequest, request_bytes), _GROUPS: Endpoint(GroupRequest, _group_bytes)}
    replies = ReplyFormat(
        TypeAdapter(list[SampleReply]),
        MAX_RESULT_BYTES,
        failure(
            InvalidReason.BAD_RETURN,
            f"the function's result has more than {MAX_RESULT_BYTES >> 10} KiB per sample as JSON",
        ),
    )
    # Scores stay comparable with those of servers without these fields.
    version_neutral = ("serves", "framework")

    def find_model(self, settings: Reward) -> JudgeReward | ModelReward | TeacherReward | None:
        return settings.judge or settings.model or settings.teacher

    def describe_missing(self, settings: Reward) -> str:
        return f"reward {settings.name} must have a function, model, judge or teacher"

    def complete(self, function: FunctionSettings, settings: Reward, framework: str) -> FunctionSettings:
        return function._replace(
            scope=settings.scope, signatures=find_plugins(SIGNATURES), per_process=settings.episodes_per_process
        )

    def caches(self, settings: Reward) -> bool:
        return settings.cache

    def refuse_path(self, path: bytes, settings: Reward) -> str:
        scopes, remedy = _PATHS.get(path, ((), f"POST samples to {UrlPath.SCORE}"))
        return "" if settings.scope in scopes else f"this reward has scope: {settings.scope}; {remedy}"

    def find_problem(self, request: Request, settings: Reward) -> str:
        if not isinstance(request, GroupRequest):
            return ""
        if settings.scope == "sampleThenGroup" and request.results is None:
            return f"results: must be the result of each sample from {UrlPath.SCORE} (scope: sampleThenGroup)"
        if settings.scope == "group" and request.results is not None:
            return "results: must be null; with scope: group samples have no individual results"
        return ""

    def facts(self, settings: Reward, report: StartupReport) -> dict[str, Any]:
        return {"scope": settings.scope}

    def describe_started(self, settings: Reward, report: StartupReport) -> str:
        return f"{report.signature}, scope {settings.scope}"


Arguments = type[UserCall] | type[EpisodeCall] | type[RowsCall]
_MAX_VALUE_BYTES = 16 << 20
"""Limit of a call's frame. Each character of a tool's result may take 12 bytes; workers shorten it before."""


def reply_format(reply: type[CallReply]) -> ReplyFormat:
    message = f"the value has more than {_MAX_VALUE_BYTES >> 20} MiB as JSON"
    return ReplyFormat(TypeAdapter(list[reply]), _MAX_VALUE_BYTES, failure(InvalidReason.BAD_RETURN, message))  # type: ignore[valid-type]


class CallKind(Kind[CallService]):
    settings_type = CallService
    endpoints = {UrlPath.CALL.encode(): Endpoint(CallRequest, request_bytes)}
    arguments: ClassVar[Arguments | None] = None
    """What the arguments of a call must be. None: the function decides."""
    arguments_of: ClassVar[Mapping[str, Arguments]] = {}
    """The same for calls with these `function`s."""

    def find_model(self, settings: CallService) -> UserModel | None:
        return None

    def describe_missing(self, settings: CallService) -> str:
        return f"{settings.name} must have a function, which --serves {self.name} calls"

    def refuse_path(self, path: bytes, settings: CallService) -> str:
        return "" if path in self.endpoints else f"this server serves {self.name}; POST each call to {UrlPath.CALL}"

    def find_problem(self, request: Request, settings: CallService) -> str:
        if not isinstance(request, CallRequest):
            return ""
        expected = self.arguments_of.get(request.function, self.arguments)
        if expected is None:
            return ""
        try:
            expected.model_validate(request.arguments)
        except ValidationError as error:
            return f"arguments: {describe_errors(error)}"
        return ""

    def describe_started(self, settings: CallService, report: StartupReport) -> str:
        return report.entrypoint


class Episodes(CallKind):
    """A call is an episode, which an environment or a program plays against the policy, or asks for rows that it has.
    An episode may release what it holds before it ends, and its workers reach the model's gateway."""

    name = EPISODES
    noun = "runner"
    arguments = EpisodeCall
    arguments_of: ClassVar = {READ_ROWS: RowsCall}
    replies = reply_format(RunnerCallReply)
    has_teardown = True

    def complete(self, function: FunctionSettings, settings: CallService, framework: str) -> FunctionSettings:
        # Only the network policy of its Pod says what else it reaches.
        folder = (function.factory_args or {}).get("working_dir") if function.module == COMMAND_MODULE else None
        adapter = _find_adapter(framework) if framework else ""
        folders = (folder,) if folder else ()
        seats = None if settings.seats is None else tuple(settings.seats)
        function = function._replace(network=True, folders=folders, framework=framework, adapter=adapter, seats=seats)
        return function._replace(per_process=settings.episodes_per_process)


class User(CallKind):
    """The arguments of a call are the conversation, the reply is its next message. A function or a chat model
    answers."""

    name = USER
    noun = "simulated user"
    arguments = UserCall
    replies = reply_format(UserCallReply)

    def find_model(self, settings: CallService) -> UserModel | None:
        return settings.user_model


class Tools(CallKind):
    """A call names a function and has the arguments that the policy wrote, the reply is text. Their schemas are public,
    because the policy sees them."""

    name = TOOLS
    noun = "tools"
    replies = reply_format(ToolCallReply)

    def facts(self, settings: CallService, report: StartupReport) -> dict[str, Any]:
        return {"tools": [tool.model_dump() for tool in report.tools]}


def _find_adapter(framework: str) -> str:
    adapters = find_plugins(ENVIRONMENTS)
    if framework not in adapters:
        raise UserError(f"agent.environment.framework: {describe_unknown(framework, adapters)}")
    return adapters[framework]


KINDS: Mapping[str, Kind[Any]] = {kind.name: kind for kind in (Score(), User(), Tools(), Episodes())}
ENDPOINTS: Mapping[bytes, Endpoint] = {
    path: endpoint for kind in KINDS.values() for path, endpoint in kind.endpoints.items()
}
"""Endpoints of all kinds, by path: a server knows also the paths of the others, to say where a request belongs."""
