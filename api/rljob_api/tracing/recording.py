"""Spans as OpenTelemetry's: their parents, times and ends. Imported only while tracing is on.
And
OpenTelemetry's SDK as RLJob uses it: which traces are recorded, and what the spans of a process have in common.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from typing import Final, Self

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import TraceState
from opentelemetry.util import types

from rljob_api.tracing.spans import HEADER, NOT_RECORDED, STEP, Attributes, Kind, Span

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_KINDS: Final = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
CANCELLED: Final = "rljob.cancelled"
"""Attribute of a span that was cancelled. That is no failure: of two requests of a hedge, one is."""


def read_traceparent(text: str) -> Context:
    """Return a context in which the span is the current one that a `traceparent` names; none is, if it names none."""
    return _PROPAGATOR.extract({HEADER: text}, Context())


def write_traceparent(where: Context | None = None) -> str:
    """Return the `traceparent` of the current span of a context; empty for none. Of its flags, only the one that all
    readers know."""
    span = trace.get_current_span(where).get_span_context()
    flags = span.trace_flags & TraceFlags.SAMPLED
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}" if span.is_valid else ""


@dataclass(eq=False)
class OpenTelemetryRecorder:
    """Implements spans.Recorder.

    `clock`: nanoseconds since 1970.
    """

    _tracer: trace.Tracer
    _clock: Callable[[], int] = time.time_ns

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
        where = context.get_current() if parent is None else read_traceparent(parent)
        if not _span_of(where).trace_flags.sampled:
            return NOT_RECORDED
        span = self._tracer.start_span(
            name,
            where,
            kind=_KINDS[kind],
            attributes=_known(attributes),
            links=[Link(found) for found in map(_span_of, map(read_traceparent, links)) if found.is_valid],
            start_time=self._clock(),
        )
        return _Recorded(span, self._clock)

    def resume(self, traceparent: str) -> Span:
        return _Resumed(read_traceparent(traceparent))

    def current(self) -> str:
        return write_traceparent()


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


class _Recorded(_Resumed):
    def __init__(self, span: trace.Span, clock: Callable[[], int]) -> None:
        super().__init__(trace.set_span_in_context(span))
        self._span, self._clock = span, clock
        self.traceparent = write_traceparent(self._where) if span.is_recording() else ""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, asyncio.CancelledError):
            self.set({CANCELLED: True})
        elif error is not None:
            self.fail(type(error).__name__)
        self.end()


def _span_of(where: Context) -> SpanContext:
    return trace.get_current_span(where).get_span_context()


def _known(attributes: Attributes) -> dict[str, types.AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}


def build_provider(
    attributes: Mapping[str, str], ratio: float, queue_spans: int | None, processor: SpanProcessor | None = None
) -> TracerProvider:
    """`queue_spans`: that may wait for the collector; None: as the environment says. `processor`: instead of the one
    that sends spans to the collector."""
    own = {**attributes, **OTELResourceDetector().detect().attributes}
    provider = TracerProvider(ParentBased(_Roots(ratio)), Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=queue_spans))
    return provider


class _Roots(Sampler):
    """All steps, and a part of the episodes."""

    def __init__(self, ratio: float) -> None:
        self._ratio = TraceIdRatioBased(ratio)
        self._all = TraceIdRatioBased(1.0 if ratio else 0.0)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: types.Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        sampler = self._all if name == STEP else self._ratio
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"EpisodeRoots{{{self._ratio.rate}}}"
