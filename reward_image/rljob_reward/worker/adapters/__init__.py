"""Signatures of other projects, one module each, and the choice between them.

An adapter turns samples into a call of the user's function, and its return value into Outcomes. Everything here runs in
worker processes and imports only the standard library and rljob_api.errors. To add a convention, add its Adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rljob_api.errors import UserError
from rljob_reward.worker.adapters import openrlhf, trl, verl
from rljob_reward.worker.adapters.binding import Adapter

ADAPTERS = (verl.ADAPTER, verl.BATCH_ADAPTER, trl.ADAPTER, openrlhf.ADAPTER)


def choose_adapter(function: Callable[..., Any], signature: str, place: str, *, for_groups: bool) -> Adapter:
    """Return the adapter whose marker is among the parameters, else the default one of the named `signature`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # compiled functions
        what = f"its parameters cannot be read ({error}); call it from a Python function"
        raise UserError(f"{place}: {what}; {_describe_forms(for_groups)}") from None
    named = [adapter for adapter in ADAPTERS if signature in ("auto", adapter.name)]
    fitting = [adapter for adapter in named if adapter.marker in parameters]
    if not fitting and signature != "auto":
        fitting = [adapter for adapter in named if adapter.takes_groups or not for_groups][:1]
    if len(fitting) != 1:
        shown = ", ".join(parameters) or "no parameters"
        what = f"no known convention has exactly the parameters ({shown})"
        raise UserError(f"{place}: {what}; {_describe_forms(for_groups)}, or set function.signature")
    if for_groups and not fitting[0].takes_groups:
        what = "takes one sample, but scope: group passes lists"
        raise UserError(f"{place}: {what}; {_describe_forms(for_groups)}, or remove scope")
    return fitting[0]


def _describe_forms(for_groups: bool) -> str:
    verl_parameters = "data_source, solution_str, ground_truth, extra_info=None"
    if for_groups:
        verl_parameters = "data_sources, solution_strs, ground_truths, extra_infos"
    return (
        f"write one of verl compute_score({verl_parameters}), TRL reward(prompts, completions, **columns), "
        "OpenRLHF reward_func(queries, prompts, labels)"
    )
