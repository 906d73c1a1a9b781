"""How a worker loads a function, or refuses it, without a process."""

from __future__ import annotations

from typing import Any

from rljob_api.errors import UserError
from rljob_service.worker.load.loading import load
from rljob_service.worker.settings import SCORE, FunctionSettings
from tests.support.plugins import REFERENCES


def find_problems(source: str, path: str = "reward.py", serves: str = SCORE, **settings: Any) -> list[str]:
    """Return the error, which begins with `path`; empty if the function is bound."""
    settings = {"signatures": REFERENCES, **settings}
    try:
        load(FunctionSettings(source, path, None, "auto", {}, 2 << 30, serves=serves)._replace(**settings))
    except UserError as error:
        return [str(error)]
    return []
