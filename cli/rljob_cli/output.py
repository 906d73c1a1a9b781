"""What a command prints with `--output json`: on stdout nothing but JSON, an error included.

A command prints its result with `print_json`, and raises errors for `rljob_cli.exits.guard`. Invariant: an error is
printed once, as text on stderr, or with `--output json` as one object on stdout.
"""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from itertools import pairwise
from typing import Any

Say = Callable[[str], None]
"""Prints a line."""
_as_json: ContextVar[bool] = ContextVar("as_json", default=False)
_OUTPUT_OPTIONS = ("-o", "--output")
_MORE_CONTROLS = re.compile(r"[\x7f-\x9f]")
"""Those that JSON allows in strings."""


@contextlib.contextmanager
def choose_format(arguments: Sequence[str]) -> Iterator[None]:
    """Print errors as JSON within the context if the arguments request it. They need not be valid otherwise."""
    values = dict(_split(argument, following) for argument, following in pairwise([*arguments, ""]))
    token = _as_json.set("json" in [values.get(option) for option in _OUTPUT_OPTIONS])
    try:
        yield
    finally:
        _as_json.reset(token)


def _split(argument: str, following: str) -> tuple[str, str]:
    """`-o json`, `-ojson`, `--output json` and `--output=json` all name the option and its value."""
    if argument.startswith("--") and "=" in argument:
        option, _, value = argument.partition("=")
        return option, value
    if argument.startswith("-o") and argument != "-o":
        return "-o", argument[2:]
    return argument, following


def is_json() -> bool:
    """Whether the command was started with `--output json`."""
    return _as_json.get()


def say(line: str) -> None:
    """Print what a command does, beside its result."""
    print(line, file=sys.stderr, flush=True)


def to_text(value: Any) -> str:
    """Return a text as it is, and another value as JSON: as models write it, and their users."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def print_json(value: Any) -> None:
    """Print one line of JSON. It escapes all control characters."""
    text = json.dumps(value, ensure_ascii=False)
    print(_MORE_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def print_error(error: Exception | str, exit_code: int) -> None:
    """Print an error; as JSON with its problems one by one if it is about fields of a file."""
    if not is_json():
        print(error, file=sys.stderr)
        return
    found: dict[str, Any] = {"error": str(error), "exit_code": exit_code}
    if problems := getattr(error, "problems", None):  # an InvalidManifestError, whose import takes 0.2 s
        found |= {"file": getattr(error, "source", ""), "problems": [asdict(problem) for problem in problems]}
    print_json(found)
