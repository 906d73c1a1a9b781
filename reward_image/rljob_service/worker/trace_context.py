"""The trace that a request belongs to, for the user's code and the programs that it starts. Standard library only.

The code finds the W3C `traceparent` in the variable TRACEPARENT, and if it has imported OpenTelemetry, as the current
context. Its own exporter sends its spans, with variables of the job (`env`): the worker has no address of a collector.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

VARIABLE = "TRACEPARENT"


@contextlib.contextmanager
def within(traceparent: str, *, is_alone: bool = True) -> Iterator[None]:
    """Work for a span; with an empty text, for none. `is_alone`: no other request runs in this process, so the variable
    is of this one."""
    if not traceparent:
        yield
        return
    if is_alone:
        os.environ[VARIABLE] = traceparent
    try:
        with _use_opentelemetry(traceparent):
            yield
    finally:
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
