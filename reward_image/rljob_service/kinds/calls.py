"""The simulated user, tools and a runner: each request is one call, each reply has one value."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from rljob_api.errors import UserError
from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, describe_unknown, find_plugins
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import UserModel
from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, EpisodeCall, RowsCall, UserCall
from rljob_api.wire.contract import READ_ROWS, UrlPath
from rljob_service.kinds.base import Endpoint, Kind, ReplyFormat, Request, describe_errors, request_bytes
from rljob_service.results import CallReply, RunnerCallReply, StartupReport, ToolCallReply, UserCallReply, failure
from rljob_service.worker.settings import EPISODES, TOOLS, USER, FunctionSettings

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
