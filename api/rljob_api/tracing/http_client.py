"""aiohttp's sessions send the current span with each request, in the standard header."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rljob_api.tracing import spans

if TYPE_CHECKING:
    import aiohttp


def trace_configs() -> list[aiohttp.TraceConfig]:
    """Return what a session needs; nothing while tracing is off. The header is not a secret: it has random numbers."""
    if not spans.is_on():
        return []
    import aiohttp  # here: its users have it, and this package does not require it

    config = aiohttp.TraceConfig()
    config.on_request_start.append(_add_header)
    return [config]


async def _add_header(_: aiohttp.ClientSession, __: Any, request: aiohttp.TraceRequestStartParams) -> None:
    if traceparent := spans.current():
        request.headers[spans.HEADER] = traceparent
