"""The trace that a request belongs to, for the user's code and the programs that it starts. Standard library only.

The code finds the W3C `traceparent` in the variable TRACEPARENT, and if it has imported OpenTelemetry, as the current
context. Its own exporter sends its spans, with variables of the job (`env`): the worker has no address of a collector.
With episodesPerProcess, os.environ shows each episode its own; rewards, users and tools that share a process have the
context alone.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar

VARIABLE = "TRACEPARENT"
_CURRENT: ContextVar[str] = ContextVar("rljob_traceparent", default="")


def current() -> str:
    """Return the traceparent of the request whose code runs; empty without one."""
    return _CURRENT.get()


@contextlib.contextmanager
def within(traceparent: str, *, is_alone: bool = True) -> Iterator[None]:
    """Work for a span; with an empty text, for none. `is_alone`: no other request runs in this process, so the variable
    is of this one."""
    if not traceparent:
        yield
        return
    token = _CURRENT.set(traceparent)
    if is_alone:
        os.environ[VARIABLE] = traceparent
    try:
        with _use_opentelemetry(traceparent):
            yield
    finally:
        _CURRENT.reset(token)
        if is_alone:
            os.environ.pop(VARIABLE, None)


@contextlib.contextmanager
def _use_opentelemetry(traceparent: str) -> Iterator[None]:
    """Make the span the current one of the user's OpenTelemetry, of whatever version; without it, do nothing."""
    if "opentelemetry" not in sys.modules:
        yield
        return
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:  # another package of that name
        yield
        return
    token = context.attach(TraceContextTextMapPropagator().extract({VARIABLE.lower(): traceparent}))
    try:
        yield
    finally:
        context.detach(token)
