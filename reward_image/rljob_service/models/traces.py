"""The spans of requests to a model's server: each try, and each wait for the next one. Names follow OpenTelemetry's
conventions for generative AI."""

from typing import Any
from urllib.parse import urlsplit

from rljob_api.tracing.spans import NOT_RECORDED, Attributes, Span, is_on, span
from rljob_service.models.metrics import count_tokens

_OPERATIONS = {"/chat/completions": "chat", "/completions": "text_completion"}


def begin_try(url: str, payload: dict[str, Any], number: int) -> Span:
    """One request. `number`: from 1."""
    if not is_on():
        return NOT_RECORDED
    parts = urlsplit(url)
    operation = next((name for end, name in _OPERATIONS.items() if parts.path.endswith(end)), "classify")
    model = str(payload.get("model", ""))
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": payload.get("temperature"),
        "gen_ai.request.max_tokens": payload.get("max_tokens", payload.get("max_completion_tokens")),
        "server.address": parts.hostname or "",
        "server.port": parts.port,
        "http.request.resend_count": number - 1 if number > 1 else None,
    }
    return span(f"{operation} {model}".strip(), attributes, kind="client")


def record_status(attempt: Span, status: int) -> None:
    """The server refused the request."""
    attempt.set({"http.response.status_code": status})
    attempt.fail(str(status))


def record_answer(attempt: Span, answer: dict[str, Any]) -> None:
    """`answer`: JSON, whatever it says."""
    reported = answer.get("model")
    attempt.set(
        {
            "http.response.status_code": 200,
            "gen_ai.response.model": reported if isinstance(reported, str) else None,
            "gen_ai.usage.input_tokens": int(count_tokens(answer, "prompt")) or None,
            "gen_ai.usage.output_tokens": int(count_tokens(answer, "completion")) or None,
        }
    )


def begin_wait(seconds: float, after: str) -> Span:
    """The time before another try. `after`: a status or the name of an error, and a text, which is not recorded."""
    return span("back off", {"rljob.seconds": seconds, "rljob.reason": after.split(maxsplit=1)[0].rstrip(":")})
