"""Others' signatures, each in a module of its own, and the choice between them.

An adapter turns one request into a call of the user's function and its return value into an Outcome. Everything here
runs in worker processes and imports the standard library alone (and rljob_api.errors). A new convention is one more
module with NAME, MARKER and bind(), listed in ADAPTERS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from rljob_api.errors import UserError
from rljob_reward.adapters import openrlhf, trl, verl
from rljob_reward.adapters.outcome import Outcome

Request = dict[str, Any]
"""A ScoreRequest as JSON gave it; fields with defaults may be missing."""
Call = Callable[[Request], Any]
"""Calls the user's function for one request. May return an awaitable."""
Read = Callable[[Any], Outcome]
"""Reads what the user's function returned."""


class Adapter(Protocol):
    NAME: str
    MARKER: str
    """Parameter whose presence tells this convention from the others."""

    def bind(self, function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> tuple[Call, Read]:
        """Check the signature; UserError names `place` and what it should be."""
        ...


ADAPTERS: dict[str, Adapter] = {module.NAME: module for module in (verl, trl, openrlhf)}


def choose(function: Callable[..., Any], signature: str, place: str) -> Adapter:
    """The adapter named `signature`, or for auto the only one whose marker is among the parameters."""
    if signature != "auto":
        return ADAPTERS[signature]
    parameters = inspect.signature(function).parameters
    fitting = [adapter for adapter in ADAPTERS.values() if adapter.MARKER in parameters]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(parameters) or "no parameters"
    raise UserError(
        f"{place}: cannot tell the convention of a function of ({shown}). Write one of "
        "verl compute_score(data_source, solution_str, ground_truth, extra_info=None), "
        "TRL reward(prompts, completions, **columns), OpenRLHF reward_func(queries, prompts, labels), "
        "or set function.signature"
    )
