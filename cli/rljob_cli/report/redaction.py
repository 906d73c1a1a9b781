"""Hides values that may be secret before a job is shown to those who get its report. Pure."""

import re
from typing import Any

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"token|key|secret|passw|credential|auth", re.IGNORECASE)


def redact(value: Any) -> Any:
    """Return a manifest with the literal values of environment variables hidden whose names suggest a secret."""
    if isinstance(value, list):
        return [redact(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _redact_env(each) if name == "env" else redact(each) for name, each in value.items()}


def _redact_env(env: Any) -> Any:
    """`env` maps names to values, or is a Pod's list of name and value."""
    if isinstance(env, dict):
        return {
            name: HIDDEN if isinstance(each, str) and each and _SECRET_NAME.search(str(name)) else redact(each)
            for name, each in env.items()
        }
    if isinstance(env, list):
        return [
            each | {"value": HIDDEN}
            if isinstance(each, dict) and each.get("value") and _SECRET_NAME.search(str(each.get("name")))
            else redact(each)
            for each in env
        ]
    return env
