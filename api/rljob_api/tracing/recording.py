"""Spans as OpenTelemetry's: their parents, times and ends. Imported only while tracing is on."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextvars import Token
from typing import Final, Self

from opentelemetry import context, trace
from opentelemetry.context.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from rljob_api.tracing.spans import NOT_RECORDED, Attributes, Kind, Span

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KINDS: Final = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
CANCELLED: Final = "rljob.cancelled"
"""Attribute of a span that was cancelled. That is no failure: of two requests of a hedge, one is."""


def read_traceparent(text: str) -> SpanContext | None:
    """Return the span that a `traceparent` names; None if it is none."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    flags = TraceFlags(int(match[3], 16) & TraceFlags.SAMPLED)
    found = SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=flags)
    return found if found.is_valid else None


def write_traceparent(span: SpanContext) -> str:
    """Return the `traceparent` of a span; empty for none."""
    flags = span.trace_flags & TraceFlags.SAMPLED
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}" if span.is_valid else ""


class OpenTelemetryRecorder:
    """Implements spans.Recorder."""

    def __init__(self, tracer: trace.Tracer, clock: Callable[[], int] = time.time_ns) -> None:
        """`clock`: nanoseconds since 1970."""
        self._tracer, self._clock = tracer, clock

    def root(self, name: str, attributes: Attributes) -> Span:
        span = self._tracer.start_span(name, Context(), attributes=_known(attributes), start_time=self._clock())
        return _Recorded(span, self._clock)

    def child(
        self,
        name: str,
        attributes: Attributes,
        kind: Kind,
        parent: str | None,
        links: Sequence[str],
    ) -> Span:
        where = context.get_current() if parent is None else _context_of(parent)
        if not trace.get_current_span(where).get_span_context().trace_flags.sampled:
            return NOT_RECORDED
        span = self._tracer.start_span(
            name,
            where,
            kind=_KINDS[kind],
            attributes=_known(attributes),
            links=[Link(found) for each in links if (found := read_traceparent(each)) is not None],
            start_time=self._clock(),
        )
        return _Recorded(span, self._clock)

    def resume(self, traceparent: str) -> Span:
        return _Resumed(_context_of(traceparent))

    def current(self) -> str:
        return write_traceparent(trace.get_current_span().get_span_context())


class _Recorded(Span):
    def __init__(self, span: trace.Span, clock: Callable[[], int]) -> None:
        self._span, self._clock = span, clock
        self.traceparent = write_traceparent(span.get_span_context()) if span.is_recording() else ""
        self._token: Token[Context] | None = None

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_known(attributes))

    def add_event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, _known(attributes), self._clock())

    def fail(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end(self._clock())

    def __enter__(self) -> Self:
        self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        assert self._token is not None
        context.detach(self._token)
        if isinstance(error, asyncio.CancelledError):
            self.set({CANCELLED: True})
        elif error is not None:
            self.fail(type(error).__name__)
        self.end()


class _Resumed(Span):
    """The context of a span that belongs to another place."""

    def __init__(self, where: Context) -> None:
        self._where = where
        self._token: Token[Context] | None = None

    def __enter__(self) -> Self:
        self._token = context.attach(self._where)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        assert self._token is not None
        context.detach(self._token)


def _context_of(traceparent: str) -> Context:
    span = read_traceparent(traceparent)
    return Context() if span is None else trace.set_span_in_context(NonRecordingSpan(span), Context())


def _known(attributes: Attributes) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}
