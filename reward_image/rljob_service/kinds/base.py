"""What one kind of service is: its name, its requests and replies, and what of its settings its slots run.

One subclass per kind. Invariant: nothing else of the server asks which kind it hosts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import JudgeReward, ModelReward, UserModel
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.calls import CallRequest
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.results import ExecutionResult, StartupReport
from rljob_service.worker.settings import FunctionSettings

Request = ScoreRequest | GroupRequest | CallRequest
RequestType = type[ScoreRequest] | type[GroupRequest] | type[CallRequest]
Model = JudgeReward | ModelReward | UserModel
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
