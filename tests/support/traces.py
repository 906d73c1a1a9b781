"""Spans that tests record and read: in this process, or by a collector of OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.table import Table
from rich.text import Text

from rljob_api.tracing import spans
from rljob_api.tracing.recording import OpenTelemetryRecorder, build_provider
from tests.support.waiting import wait_for


@dataclass(frozen=True)
class Seen:
    """A span that has ended."""

    name: str
    trace: str
    id: str
    parent: str
    """Empty: it is the root of its trace."""
    started_at: int
    ended_at: int
    """Nanoseconds."""
    kind: str
    attributes: Mapping[str, Any]
    links: tuple[str, ...] = ()
    """Ids of spans."""
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    service: str = ""
    resource: Mapping[str, Any] = field(default_factory=dict)
    scope: tuple[str, str, str] = ("", "", "")
    """Name and version of what made it, and the URL of the schema that it follows."""
    failed: bool = False


@dataclass
class Trace:
    """The spans of one trace as a tree."""

    spans: list[Seen] = field(default_factory=list)

    @property
    def root(self) -> Seen:
        [root] = [each for each in self.spans if not each.parent]
        return root

    def children(self, of: Seen) -> list[Seen]:
        """In the order of their begin."""
        return sorted((each for each in self.spans if each.parent == of.id), key=lambda each: each.started_at)

    def named(self, name: str) -> list[Seen]:
        return [each for each in self.spans if each.name == name]

    def names(self, of: Seen | None = None) -> Any:
        """Return the tree as [name, children...], or a name alone."""
        of = of or self.root
        children = [self.names(each) for each in self.children(of)]
        return [of.name, *children] if children else of.name

    def render(self) -> str:
        """Return the tree as text: seconds since its begin, duration, service and the most telling attributes."""
        lines = []

        def add(span: Seen, depth: int) -> None:
            offset, seconds = (span.started_at - self.root.started_at) / 1e9, (span.ended_at - span.started_at) / 1e9
            known = [name for name in _SHOWN if name in span.attributes]
            shown = [f"{name.rpartition('.')[2]}={span.attributes[name]}" for name in known]
            name = f"{'  ' * depth}{span.name}"
            lines.append(f"{offset:7.3f} {seconds:7.3f}  {name:<38} {span.service:<12} {' '.join(shown)}".rstrip())
            for child in self.children(span):
                add(child, depth + 1)

        add(self.root, 0)
        return "\n".join(lines)

    def draw(self) -> Table:
        """Return the tree with a bar for the time of each span, coloured by its program."""
        begin, end = self.root.started_at, max(each.ended_at for each in self.spans)
        table = Table("span", "program", "", "seconds", box=None, header_style="bold", padding=(0, 1))
        table.columns[-1].justify = "right"

        def add(span: Seen, depth: int) -> None:
            first, last = ((at - begin) * _BAR_COLUMNS // (end - begin) for at in (span.started_at, span.ended_at))
            colour = _COLOURS.get(span.service, "white")
            bar = Text(" " * first) + Text("━" * max(1, last - first), style=colour)
            seconds = f"{(span.ended_at - span.started_at) / 1e9:.3f}"
            table.add_row(Text(f"{'  ' * depth}{span.name}"), Text(span.service, style=colour), bar, seconds)
            for child in self.children(span):
                add(child, depth + 1)

        add(self.root, 0)
        return table


_BAR_COLUMNS = 60
_COLOURS = {"rljob-head": "cyan", "rljob-reward": "yellow", "rljob-agent": "green"}
_SHOWN = (
    *("rljob.lane", "rljob.step", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.response.model"),
    *("http.response.status_code", "rljob.score", "rljob.valid", "rljob.reason", "rljob.cancelled", "error.type"),
)


def group_traces(found: list[Seen]) -> list[Trace]:
    """Return the traces of spans. A trace without its root is an error of the test's caller."""
    traces: dict[str, Trace] = {}
    for each in found:
        traces.setdefault(each.trace, Trace()).spans.append(each)
    return list(traces.values())


class Recorded:
    """What was recorded in this process, and which spans have not ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.open: dict[int, str] = {}

    def spans(self) -> list[Seen]:
        return [_read_own(each) for each in self.exporter.get_finished_spans()]

    def traces(self, root: str = "episode") -> list[Trace]:
        return [each for each in group_traces(self.spans()) if each.root.name == root]


class _Watch(SimpleSpanProcessor):
    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded.exporter)
        self._open = recorded.open

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._open[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        assert self._open.pop(span.context.span_id, None), f"{span.name} ended twice"
        super().on_end(span)


@contextmanager
def recording(ratio: float = 1.0, clock: Any = None) -> Iterator[Recorded]:
    """Record the spans of this process, in memory."""
    recorded = Recorded()
    provider = build_provider({"service.name": "test"}, ratio, None, _Watch(recorded))
    spans.use(OpenTelemetryRecorder(provider.get_tracer("test"), *([clock] if clock else [])))
    try:
        yield recorded
    finally:
        spans.use(None)
    assert not recorded.open, f"spans without an end: {sorted(recorded.open.values())}"


def _read_own(span: ReadableSpan) -> Seen:
    return Seen(
        name=span.name,
        trace=f"{span.context.trace_id:032x}",
        id=f"{span.context.span_id:016x}",
        parent=f"{span.parent.span_id:016x}" if span.parent else "",
        started_at=span.start_time or 0,
        ended_at=span.end_time or 0,
        kind=span.kind.name.lower(),
        attributes=dict(span.attributes or {}),
        links=tuple(f"{link.context.span_id:016x}" for link in span.links),
        events=tuple((event.name, dict(event.attributes or {})) for event in span.events),
        service=str(span.resource.attributes["service.name"]),
        failed=not span.status.is_ok and span.status.status_code.name == "ERROR",
    )


class Collector:
    """A receiver of OTLP over HTTP, as protobuf: what any collector takes."""

    def __init__(self, address: str) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, dict(self.headers), body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.headers: list[dict[str, str]] = []
        self._spans: list[Seen] = []
        self._server = ThreadingHTTPServer((address, 0), Handler)
        self.url = f"http://{address}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces", path
        request = ExportTraceServiceRequest.FromString(body)
        self.headers.append(headers)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                made_by = (scope.scope.name, scope.scope.version, scope.schema_url)
                self._spans += [_read_sent(each, resource, made_by) for each in scope.spans]

    def spans(self) -> list[Seen]:
        return list(self._spans)

    def wait_for(self, name: str, count: int = 1) -> list[Seen]:
        """Return all spans once `count` with this name have arrived."""
        wait_for(lambda: sum(each.name == name for each in self._spans) >= count, f"{count} spans {name}")
        return self.spans()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _read_sent(span: Any, resource: Mapping[str, Any], scope: tuple[str, str, str]) -> Seen:
    return Seen(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        started_at=span.start_time_unix_nano,
        ended_at=span.end_time_unix_nano,
        kind={1: "internal", 2: "server", 3: "client"}.get(span.kind, str(span.kind)),
        attributes=_attributes(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        events=tuple((event.name, _attributes(event.attributes)) for event in span.events),
        service=str(resource.get("service.name", "")),
        resource=resource,
        scope=scope,
        failed=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found
