"""Others' signatures, each in a module of its own, and the choice between them.

An adapter turns samples into a call of the user's function and its return value into Outcomes. Everything here runs in
worker processes and imports the standard library alone (and rljob_api.errors). A new convention is one more module with
NAME, MARKER, TAKES_GROUPS and bind(), listed in ADAPTERS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from rljob_api.errors import UserError
from rljob_reward.worker.adapters import openrlhf, trl, verl, verl_batch
from rljob_reward.worker.adapters.binding import Binding


class Adapter(Protocol):
    NAME: str
    MARKER: str
    """Parameter whose presence tells this form from the others."""
    TAKES_GROUPS: bool
    """Whether the function gets lists, of one element a sample."""

    def bind(self, function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
        """Check the signature; UserError names `place` and what it should be."""
        ...


ADAPTERS: tuple[Adapter, ...] = (verl, verl_batch, trl, openrlhf)


def choose(function: Callable[..., Any], signature: str, place: str, *, for_groups: bool) -> Adapter:
    """The adapter whose marker is among the parameters; without one, the usual one of the `signature` that is named."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # of compiled functions
        what = f"its parameters cannot be read ({error})"
        raise UserError(f"{place}: {what}. Call it from a function of yours. {_describe_forms(for_groups)}") from None
    named = [adapter for adapter in ADAPTERS if signature in ("auto", adapter.NAME)]
    fitting = [adapter for adapter in named if adapter.MARKER in parameters]
    if not fitting and signature != "auto":
        fitting = [adapter for adapter in named if adapter.TAKES_GROUPS or not for_groups][:1]
    if len(fitting) != 1:
        shown = ", ".join(parameters) or "no parameters"
        what = f"cannot tell the convention of a function of ({shown})"
        raise UserError(f"{place}: {what}. {_describe_forms(for_groups)}, or set function.signature")
    if for_groups and not fitting[0].TAKES_GROUPS:
        what = "takes one sample, but scope: group passes lists"
        raise UserError(f"{place}: {what}. {_describe_forms(for_groups)}, or remove scope")
    return fitting[0]


def _describe_forms(for_groups: bool) -> str:
    verls = "data_source, solution_str, ground_truth, extra_info=None"
    if for_groups:
        verls = "data_sources, solution_strs, ground_truths, extra_infos"
    return (
        f"Write one of verl compute_score({verls}), TRL reward(prompts, completions, **columns), "
        "OpenRLHF reward_func(queries, prompts, labels)"
    )
