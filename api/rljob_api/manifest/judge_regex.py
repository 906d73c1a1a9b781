"""The regular expressions of judges: RE2, whose time is linear in the answer, so that no answer can block a server.

`rljob validate` and the reward server both compile them here, and so accept the same ones.
"""

from typing import Any

_REMEDY = "RE2 has neither look-around nor back-references: https://github.com/google/re2/wiki/Syntax"


def compile_judge_regex(pattern: str) -> Any:
    """Return a regular expression with the methods of Python's. Raise ValueError with what is wrong with it."""
    import re2  # here: most programs that import the manifest's types never need it

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        [detail] = error.args
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        raise ValueError(f"{text}; {_REMEDY}") from None
