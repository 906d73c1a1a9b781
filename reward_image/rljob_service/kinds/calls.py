"""What the simulated user, tools and a runner have in common: each request is one call, each reply has one value."""

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import TypeAdapter, ValidationError

from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import UserModel
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, EpisodeCall, RowsCall, UserCall
from rljob_api.wire.contract import UrlPath
from rljob_service.kinds.base import Endpoint, Kind, ReplyFormat, Request, describe_errors, request_bytes
from rljob_service.results import CallReply, StartupReport, failure

Arguments = type[UserCall] | type[EpisodeCall] | type[RowsCall]
_MAX_VALUE_BYTES: Final = 16 << 20
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
