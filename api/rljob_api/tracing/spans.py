"""Spans of what a program does for an episode. While tracing is off, every call returns an object that does nothing.

The current span is in OpenTelemetry's context, which a task inherits from the one that creates it. `recording` makes
spans, `exporting` sends them. Invariants: only `root` begins a trace, so what belongs to no episode has no span; a span
ends with its block, also by an exception or a cancellation; no text of a prompt, an answer or a call is recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol, Self

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]
"""By name. None: unknown, and left out."""
Kind = Literal["internal", "client", "server"]
HEADER: Final = "traceparent"
"""The header of W3C Trace Context (https://www.w3.org/TR/trace-context/): VERSION-TRACE-SPAN-FLAGS in hexadecimal."""
STEP: Final = "step"
"""Root span of a step. There are few, so all are recorded, and spans of episodes link to them."""


class Span:
    """A span that is not recorded. Use it as a context, in which it is the current one; or call `end`."""

    traceparent = ""
    """By which a span elsewhere becomes its child. Empty: it is not recorded."""

    def set(self, attributes: Attributes) -> None:
        """Add what is known later than its begin."""

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Add an event at this time."""

    def fail(self, kind: str) -> None:
        """Mark it as failed. `kind`: a word with few values, such as a reason or the name of an exception's class: the
        texts of errors have parts of answers and addresses."""

    def record_status(self, status: int) -> None:
        """Add the status of the HTTP response."""
        self.set({"http.response.status_code": status})
        if status != 200:
            self.fail(str(status))

    def end(self) -> None:
        """End it, if it has not ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.end()


NOT_RECORDED: Final = Span()


class Recorder(Protocol):
    """Makes spans. `recording.OpenTelemetryRecorder` implements it."""

    def root(self, name: str, attributes: Attributes) -> Span: ...

    def child(
        self,
        name: str,
        attributes: Attributes,
        kind: Kind,
        parent: str | None,
        links: Sequence[str],
    ) -> Span: ...

    def resume(self, traceparent: str) -> Span: ...

    def current(self) -> str: ...


_recorder: Recorder | None = None


def use(recorder: Recorder | None) -> None:
    """Record spans of this process with `recorder` from now on. None: tracing is off."""
    global _recorder
    _recorder = recorder


def is_on() -> bool:
    return _recorder is not None


def root(name: str, attributes: Attributes) -> Span:
    """Begin a trace, whatever the current span is. Whether the whole trace is recorded is decided here."""
    return NOT_RECORDED if _recorder is None else _recorder.root(name, attributes)


def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    kind: Kind = "internal",
    parent: str | None = None,
    links: Sequence[str] = (),
) -> Span:
    """Begin a child of the current span, or of `parent`; not recorded without one that is. `links`: spans of other
    traces that belong to it."""
    if _recorder is None:
        return NOT_RECORDED
    return _recorder.child(name, attributes or {}, kind, parent, links)


def resume(traceparent: str) -> Span:
    """Return a context in which that span is the current one; with an empty text none is. It ends no span."""
    return NOT_RECORDED if _recorder is None else _recorder.resume(traceparent)


def current() -> str:
    """Return the traceparent of the current span, for what works for it; empty without one."""
    return "" if _recorder is None else _recorder.current()
