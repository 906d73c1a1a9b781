"""The routes of a server: the token, status codes, and from a request's body to the Scorer.

Leaves connections to http and the work to Scorer. Invariant: nothing of a request's body is kept before its token and
its path have been checked.
"""

from __future__ import annotations

import hmac
import json
from typing import NamedTuple

from rljob_api.wire import contract
from rljob_api.wire.protocol import CallRequest, EpisodeCall, GroupRequest, ScoreRequest, UserCall
from rljob_reward.results import StartupReport
from rljob_reward.server import bodies
from rljob_reward.server import metrics as metrics_module
from rljob_reward.server.execution import RequestType
from rljob_reward.server.http import Request
from rljob_reward.server.metrics import ServerMetrics
from rljob_reward.server.scoring import QueueFullError, Scorer
from rljob_reward.server.served_reward import ServedReward
from rljob_reward.worker.settings import EPISODES, SCORE, TOOLS, USER

_TEXT = b"text/plain; charset=utf-8"


class Endpoint(NamedTuple):
    request: RequestType
    max_body_bytes: int
    scopes: tuple[str, ...]
    """Scopes of the rewards that serve this path; what other servers serve."""
    remedy: str
    """For a request to a reward of another scope."""


_ENDPOINTS = {
    contract.UrlPath.SCORE.encode(): Endpoint(
        ScoreRequest,
        16 << 20,
        ("sample", "sampleThenGroup"),
        f"POST whole groups to {contract.UrlPath.SCORE_GROUP}, or set scope: sample",
    ),
    contract.UrlPath.SCORE_GROUP.encode(): Endpoint(
        GroupRequest,
        48 << 20,  # less than MAX_FRAME_BYTES of a worker
        ("group", "sampleThenGroup"),
        f"POST each sample to {contract.UrlPath.SCORE}, or set scope: group",
    ),
    contract.UrlPath.CALL.encode(): Endpoint(
        CallRequest, 16 << 20, (USER, TOOLS, EPISODES), f"POST samples to {contract.UrlPath.SCORE}"
    ),
}

_CALLS: dict[str, type[UserCall] | type[EpisodeCall]] = {USER: UserCall, EPISODES: EpisodeCall}
"""What `arguments` must be, by what the server serves."""


class App:
    """The http.Handler of this server."""

    def __init__(
        self, reward: ServedReward, report: StartupReport, scorer: Scorer, metrics: ServerMetrics, token: str
    ) -> None:
        self._reward = reward
        self._serves = reward.config.scope if reward.serves == SCORE else reward.serves
        self._report = report
        self._scorer = scorer
        self._metrics = metrics
        self._authorization = f"Bearer {token}".encode()
        self.draining = False
        self.record_response = metrics.record_response
        self._open_routes = {
            contract.UrlPath.READY.encode(): self._ready,
            contract.UrlPath.LIVE.encode(): self._live,
            contract.UrlPath.METRICS.encode(): self._render_metrics,
        }
        self._get_routes = self._open_routes | {contract.UrlPath.INFO.encode(): self._info}

    def admit(self, request: Request) -> int:
        path = request.path
        if path not in self._open_routes:
            if not hmac.compare_digest(request.authorization, self._authorization):
                request.reject(401, "needs `Authorization: Bearer $RLJOB_TOKEN`")
                return 0
            request.record_authenticated()
        if (endpoint := _ENDPOINTS.get(path)) is not None:
            if request.method != b"POST":
                request.reject(405, f"POST a {endpoint.request.__name__}", (b"allow", b"POST"))
            elif self._serves not in endpoint.scopes:
                request.reject(422, self._describe_wrong_path(endpoint))
            return endpoint.max_body_bytes
        if path not in self._get_routes:
            request.reject(404, "no such path")
        elif request.method not in (b"GET", b"HEAD"):
            request.reject(405, "use GET", (b"allow", b"GET, HEAD"))
        return 0

    def handle(self, request: Request) -> None:
        if (endpoint := _ENDPOINTS.get(request.path)) is not None:
            self._execute(endpoint, request)
        else:
            self._get_routes[request.path](request)

    def _describe_wrong_path(self, endpoint: Endpoint) -> str:
        if self._reward.serves != SCORE:
            return f"this server serves {self._serves}; POST each call to {contract.UrlPath.CALL}"
        return f"this reward has scope: {self._serves}; {endpoint.remedy}"

    def _execute(self, endpoint: Endpoint, request: Request) -> None:
        if self.draining:
            return request.refuse(503, "the server is shutting down; use another replica")
        try:
            message = bodies.parse(endpoint.request, request.body)
            if isinstance(message, bodies.Unscorable):
                return self._scorer.reject(message, request)
            if problem := _find_problem(message, self._serves):
                return request.refuse(422, problem)
            self._scorer.submit(message, request.body, request)
        except bodies.MalformedError as error:
            request.refuse(422, str(error))
        except QueueFullError as error:
            request.refuse(429, str(error), (b"retry-after", str(error.retry_after_seconds).encode()))

    def _info(self, request: Request) -> None:
        info = {
            "name": self._reward.config.name,
            "signature": self._report.signature,
            "entrypoint": self._report.entrypoint,
            "scope": self._reward.config.scope,
            "slots": self._reward.config.slots,
            "reads_tokens": self._report.reads_tokens,
            "version": self._reward.version,
            "not_enforced": self._report.missing,
        }
        if self._reward.serves == TOOLS:
            info["tools"] = [tool.model_dump() for tool in self._report.tools]
        request.respond(200, json.dumps(info).encode())

    def _ready(self, request: Request) -> None:
        if self.draining:
            request.respond(503, b"shutting down\n", content_type=_TEXT)
        elif not self._scorer.pool.can_serve:
            request.respond(503, b"no worker is ready\n", content_type=_TEXT)
        else:
            notice = self._scorer.pool.notice
            request.respond(200, f"ready{notice and ': '}{notice}\n".encode(), content_type=_TEXT)

    def _live(self, request: Request) -> None:
        """That this is answered shows that the event loop is not blocked."""
        request.respond(200, b"alive\n", content_type=_TEXT)

    def _render_metrics(self, request: Request) -> None:
        request.respond(200, self._metrics.render(), content_type=metrics_module.CONTENT_TYPE.encode())


def _find_problem(request: ScoreRequest | GroupRequest | CallRequest, scope: str) -> str:
    """Return why the server cannot execute a well-formed request; empty if it can."""
    if isinstance(request, ScoreRequest):
        return ""
    if isinstance(request, CallRequest):
        kind = _CALLS.get(scope)
        return bodies.find_problem(kind, request.arguments) if kind else ""
    if scope == "sampleThenGroup" and request.results is None:
        return f"results: must be the result of each sample from {contract.UrlPath.SCORE} (scope: sampleThenGroup)"
    if scope == "group" and request.results is not None:
        return "results: must be null; with scope: group samples have no individual results"
    return ""
