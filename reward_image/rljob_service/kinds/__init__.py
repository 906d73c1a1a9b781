"""The kinds of services that a server can host, by the argument of --serves.

Of the simulated user, tools and a runner, each request is one call, each reply has one value; of a reward, a request is
a sample or a group, the reply a score for each sample.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from rljob_api.errors import UserError
from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, describe_unknown, find_plugins
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import JudgeReward, ModelReward, UserModel
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, EpisodeCall, RowsCall, UserCall
from rljob_api.wire.contract import MAX_RESULT_BYTES, READ_ROWS, UrlPath
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.kinds.base import Endpoint, Kind, ReplyFormat, Request, describe_errors, request_bytes
from rljob_service.results import (
    CallReply,
    RunnerCallReply,
    SampleReply,
    StartupReport,
    ToolCallReply,
    UserCallReply,
    failure,
)
from rljob_service.worker.settings import EPISODES, SCORE, TOOLS, USER, FunctionSettings

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

    def find_model(self, settings: Reward) -> JudgeReward | ModelReward | None:
        return settings.judge or settings.model

    def describe_missing(self, settings: Reward) -> str:
        return f"reward {settings.name} must have a function, model or judge"

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

    def complete(self, function: FunctionSettings, settings: CallService, framework: str) -> FunctionSettings:
        return function._replace(signatures=find_plugins(SIGNATURES))


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
