"""Sends the spans of a process to a collector: OTLP over HTTP, in batches, from a thread of its own.

OpenTelemetry's SDK reads the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, _TIMEOUT, _CERTIFICATE,
OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*). Invariant: a collector that is away costs the job nothing but its spans: the
queue is bounded, and the end of the process waits at most _CLOSE_SECONDS.
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Final

from rljob_api.tracing import spans
from rljob_api.wire.contract import ENV_OTLP_ENDPOINT

log = logging.getLogger(__name__)

_ENV_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENV_DISABLED: Final = "OTEL_SDK_DISABLED"
_ENV_QUEUE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
_QUEUE_SPANS: Final = 16_384
"""Spans that wait for the collector, of about 2 KiB each. More are dropped."""
_CLOSE_SECONDS: Final = 3.0


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether the environment names a collector."""
    named = environ.get(ENV_OTLP_ENDPOINT) or environ.get(_ENV_TRACES_ENDPOINT)
    return bool(named) and environ.get(_ENV_DISABLED, "").lower() != "true"


@contextmanager
def exporting(service: str, attributes: Mapping[str, str], *, ratio: float = 0.0) -> Iterator[None]:
    """Record spans within, and send them to the collector that the environment names.

    `service`: service.name, unless OTEL_SERVICE_NAME names it. `attributes`: further ones of the process. `ratio`: the
    part of root spans that begin a recorded trace; what has a parent follows it."""
    try:
        from rljob_api.tracing.recording import OpenTelemetryRecorder, build_provider
    except ImportError as error:
        log.warning("no traces: %s; install opentelemetry-exporter-otlp-proto-http in the image", error)
        yield
        return
    version = metadata.version("rljob-api")
    own = {"service.name": service, "service.version": version, **attributes}
    try:
        provider = build_provider(own, ratio, None if os.environ.get(_ENV_QUEUE) else _QUEUE_SPANS)
    except Exception as error:  # of a variable, which others may have set in all Pods of a cluster
        log.warning("no traces: a variable OTEL_* has a value that OpenTelemetry refuses: %r", error)
        yield
        return
    spans.use(
        OpenTelemetryRecorder(
            # The names of attributes follow this version of OpenTelemetry's conventions.
            provider.get_tracer("rljob", version, "https://opentelemetry.io/schemas/1.44.0")
        )
    )
    try:
        yield
    finally:
        spans.use(None)
        # Send what waits. In a thread: the SDK repeats a request to a collector that is away for longer.
        thread = threading.Thread(target=provider.shutdown, name="tracing-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            log.warning("the collector took no spans for %.0f s: the last ones are lost", _CLOSE_SECONDS)
