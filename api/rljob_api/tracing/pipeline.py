"""OpenTelemetry's SDK as RLJob uses it: which traces are recorded, and what the spans of a process have in common."""

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

from rljob_api.tracing.spans import STEP


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
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        sampler = self._all if name == STEP else self._ratio
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"EpisodeRoots{{{self._ratio.rate}}}"
