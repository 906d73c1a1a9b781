"""The spans of a server: one for each request that belongs to a trace, and its wait and execution.

    POST /v1/score        from its arrival to the response, or until the client leaves
      queue               until a slot is free
      execute             in the slot: the current span of what a model's client does, and of the user's code

A request that joins another one's execution has the first span alone. Invariant: what a client sends decides nothing
but whether a span is recorded, and to which trace it belongs.
"""

import os
from contextlib import AbstractContextManager, nullcontext

from rljob_api.manifest.services.reward import Reward
from rljob_api.tracing import spans
from rljob_api.tracing.exporting import exporting, is_configured
from rljob_api.tracing.spans import NOT_RECORDED, Span
from rljob_api.wire.base import Lane
from rljob_service.http.server import LEFT, Request
from rljob_service.results import ExecutionResult
from rljob_service.server.served_service import ServedService


def tracing_requests(service: ServedService) -> AbstractContextManager[None]:
    """Return the context in which requests of traces are recorded. A server begins no trace."""
    if not is_configured(os.environ):
        return nullcontext()
    name = "rljob-reward" if isinstance(service.config, Reward) else "rljob-agent"
    return exporting(name, {"rljob.service": service.config.name, "rljob.version": service.version[:12]})


def begin_request(request: Request) -> str:
    """Begin the span of a request, which its response ends. Return its traceparent; empty if it is not recorded."""
    if not request.traceparent or not spans.is_on():
        return ""
    path = request.path.decode()
    attributes = {"http.request.method": "POST", "url.path": path}
    parent = request.traceparent.decode("latin-1")
    span = spans.span(f"POST {path}", attributes, kind="server", parent=parent)
    if not span.traceparent:
        return ""

    def end(status: int) -> None:
        if status == LEFT:
            span.set({"rljob.cancelled": True})
        else:
            span.record_status(status)
        span.end()

    request.call_at_end(end)
    return span.traceparent


class ExecutionSpans:
    """Those of one execution."""

    def __init__(self, request: str, request_id: str, lane: Lane, num_samples: int) -> None:
        """`request`: traceparent of the request's span; empty: nothing is recorded."""
        self._request, self._execute = request, NOT_RECORDED
        self._attributes: spans.Attributes = {
            "rljob.request": request_id,
            "rljob.lane": lane,
            "rljob.samples": num_samples,
        }
        self._queue = spans.span("queue", parent=request) if request else NOT_RECORDED

    def start(self) -> AbstractContextManager[Span]:
        """A slot is free. Return the context in which it gets the request: what it starts belongs to the execution."""
        self._queue.end()
        if self._request:
            self._execute = spans.span("execute", self._attributes, parent=self._request)
        return spans.resume(self._execute.traceparent)

    def end(self, result: ExecutionResult) -> None:
        """It has a result, perhaps without having started."""
        self._queue.end()
        failed = [reply for reply in result if reply.reason is not None]
        if failed:
            self._execute.set({"rljob.failed_samples": len(failed)})
            self._execute.fail(str(failed[0].reason))
        self._execute.end()


NO_SPANS = ExecutionSpans("", "", "train", 0)
"""Spans of all executions that are not recorded: they keep nothing."""
