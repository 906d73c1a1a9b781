"""The routes of a server: the token, status codes, and from a request's body to the Executor.

Leaves connections to http, the work to Executor, and what a request must be to the kind of the service. Invariant:
nothing of a request's body is kept before its token and its path have been checked.
"""

import hmac
import json

from rljob_api.wire import contract
from rljob_service.http.server import Request
from rljob_service.kinds import ENDPOINTS
from rljob_service.kinds.base import Endpoint
from rljob_service.results import StartupReport
from rljob_service.server import bodies
from rljob_service.server import metrics as metrics_module
from rljob_service.server.executor import Executor, QueueFullError
from rljob_service.server.metrics import ServerMetrics
from rljob_service.server.served_service import ServedService
from rljob_service.server.traces import begin_request

_TEXT = b"text/plain; charset=utf-8"


class App:
    """The http.Handler of this server."""

    def __init__(
        self, service: ServedService, report: StartupReport, executor: Executor, metrics: ServerMetrics, token: str
    ) -> None:
        self._service = service
        self._refusals = {path: service.kind.refuse_path(path, service.config) for path in ENDPOINTS}
        """By path; empty for those that it serves."""
        self._max_body_bytes = {path: each.max_body_bytes(service.config) for path, each in ENDPOINTS.items()}
        self._report = report
        self._executor = executor
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
        if (endpoint := ENDPOINTS.get(path)) is not None:
            if request.method != b"POST":
                request.reject(405, f"POST a {endpoint.request.__name__}", (b"allow", b"POST"))
            elif refusal := self._refusals[path]:
                request.reject(422, refusal)
            return self._max_body_bytes[path]
        if path not in self._get_routes:
            request.reject(404, "no such path")
        elif request.method not in (b"GET", b"HEAD"):
            request.reject(405, "use GET", (b"allow", b"GET, HEAD"))
        return 0

    def handle(self, request: Request) -> None:
        if (endpoint := ENDPOINTS.get(request.path)) is not None:
            self._execute(endpoint, request)
        else:
            self._get_routes[request.path](request)

    def _execute(self, endpoint: Endpoint, request: Request) -> None:
        traceparent = begin_request(request)
        if self.draining:
            return request.refuse(503, "the server is shutting down; use another replica")
        try:
            message = bodies.parse(endpoint.request, request.body)
            if isinstance(message, bodies.Unscorable):
                return self._executor.reject(message, request)
            if problem := self._service.kind.find_problem(message, self._service.config):
                return request.refuse(422, problem)
            self._executor.submit(message, request.body, request, traceparent)
        except bodies.MalformedError as error:
            request.refuse(422, str(error))
        except QueueFullError as error:
            request.refuse(429, str(error), (b"retry-after", str(error.retry_after_seconds).encode()))

    def _info(self, request: Request) -> None:
        service, report = self._service, self._report
        info = {
            "name": service.config.name,
            "signature": report.signature,
            "entrypoint": report.entrypoint,
            "slots": service.config.slots,
            "reads": report.reads,
            "takes_groups": report.takes_groups,
            "version": service.version,
            "not_enforced": report.missing,
            **service.kind.facts(service.config, report),
        }
        request.respond(200, json.dumps(info).encode())

    def _ready(self, request: Request) -> None:
        if self.draining:
            request.respond(503, b"shutting down\n", content_type=_TEXT)
        elif not self._executor.pool.can_serve:
            request.respond(503, b"no worker is ready\n", content_type=_TEXT)
        else:
            notice = self._executor.pool.notice
            request.respond(200, f"ready{notice and ': '}{notice}\n".encode(), content_type=_TEXT)

    def _live(self, request: Request) -> None:
        """That this is answered shows that the event loop is not blocked."""
        request.respond(200, b"alive\n", content_type=_TEXT)

    def _render_metrics(self, request: Request) -> None:
        request.respond(200, self._metrics.render(), content_type=metrics_module.CONTENT_TYPE.encode())
