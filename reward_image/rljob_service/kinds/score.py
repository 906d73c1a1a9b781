"""A reward: a request is a sample or a group, the reply a score for each sample."""

from typing import Any

from pydantic import TypeAdapter

from rljob_api.functions.plugins import SIGNATURES, find_plugins
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.models import JudgeReward, ModelReward
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import MAX_RESULT_BYTES, UrlPath
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.kinds.base import Endpoint, Kind, ReplyFormat, Request, request_bytes
from rljob_service.results import SampleReply, StartupReport, failure
from rljob_service.worker.settings import SCORE, FunctionSettings

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
