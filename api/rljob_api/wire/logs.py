"""How RLJob's programs write their logs: lines for people, or a JSON object per line for what collects logs.

One variable decides (ENV_LOG_FORMAT), which the operator sets in the Pods of a job; without it, as under `rljob run`,
logs are text. Every object has `time` (UTC, ISO 8601), `level`, `logger`, `message`, and `exception` with the traceback
if there is one. Invariant: no secret reaches a log by its form, or as the value of a variable of this process.
"""

import logging
import os
import sys
from typing import Final, Literal, TextIO

from rljob_api.wire.contract import ENV_LOG_FORMAT
from rljob_api.wire.redaction import Redactor, redact_environment

LogFormat = Literal["text", "json"]
TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = ("levelname", "name", "message")
_NAMES = {"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"}


def choose_format() -> LogFormat:
    """Return what the environment requests."""
    return "json" if os.environ.get(ENV_LOG_FORMAT) == "json" else "text"


def build_formatter(log_format: LogFormat | None = None, text: str = TEXT) -> logging.Formatter:
    """`text`: the format of a line for people. `log_format` None: as the environment requests."""
    return _RedactingFormatter(_choose_formatter(log_format, text), redact_environment(os.environ))


class _RedactingFormatter(logging.Formatter):
    """Another formatter's lines without secrets."""

    def __init__(self, formatter: logging.Formatter, redactor: Redactor) -> None:
        super().__init__()
        self._formatter, self._redactor = formatter, redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.hide(self._formatter.format(record))


def _choose_formatter(log_format: LogFormat | None, text: str) -> logging.Formatter:
    if (log_format or choose_format()) == "text":
        return logging.Formatter(text)
    from pythonjsonlogger.json import JsonFormatter  # few programs need it

    # A library may add fields that have no JSON form: without str, the record would be lost.
    return JsonFormatter(
        _FIELDS, json_default=str, rename_fields=_NAMES, rename_fields_keep_missing=False, timestamp="time"
    )


def configure_logging(
    level: int | str = logging.INFO,
    log_format: LogFormat | None = None,
    *,
    text: str = TEXT,
    stream: TextIO | None = None,
) -> None:
    """Send what the process logs to stderr, or to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(build_formatter(log_format, text))
    logging.basicConfig(level=level, handlers=[handler])


def print_last_line(message: str, log_format: LogFormat | None = None) -> None:
    """Print why a program ends to stderr, also if nothing has configured its log."""
    line = redact_environment(os.environ).hide(message)
    if (log_format or choose_format()) == "json":
        record = logging.LogRecord("rljob", logging.ERROR, "", 0, message, None, None)
        line = build_formatter("json").format(record)
    print(line, file=sys.stderr, flush=True)
