"""TRL: reward(prompts, completions, **columns) -> list[float | None].

Everything is a batch of one. A chat prompt makes a chat completion, as GRPOTrainer does. Columns are the answer
(as answer, ground_truth and solution, the names that TRL's own functions use) and every key of extra_info.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_api.errors import UserError
from rljob_reward.adapters.outcome import BAD_RETURN, Outcome, describe, invalid, read_score
from rljob_reward.adapters.signature import Parameters

NAME = "trl"
MARKER = "completions"
_EXPECTED = "reward(prompts, completions, **columns)"
_EXPECTED_RETURN = "a list with one number or None for each completion"
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_TOKEN_PARAMETERS = ("completion_ids", "environments", "trainer_state")


def bind(
    function: Callable[..., Any], kwargs: dict[str, Any], place: str
) -> tuple[Callable[[dict[str, Any]], Any], Callable[[Any], Outcome]]:
    parameters = Parameters(function, place)
    inside = sorted((parameters.required & set(_TOKEN_PARAMETERS)) - set(kwargs))
    if inside:
        raise UserError(
            f"{place}: {', '.join(inside)} lives inside TRL's trainer and is not sent to a reward server. "
            "Score from prompts, completions and columns, or give the parameter a default"
        )
    # Other required parameters may be columns, which only a request can tell: a missing one is that call's TypeError.
    parameters.check(parameters.required, _EXPECTED, needs=MARKER)
    parameters.check_kwargs(kwargs)
    logged: dict[str, float] = {}

    def call(request: dict[str, Any]) -> Any:
        logged.clear()
        values = {**_columns(request), "log_metric": logged.__setitem__, "log_extra": _log_nothing}
        return function(**{name: value for name, value in values.items() if parameters.accepts(name)} | kwargs)

    def read(value: Any) -> Outcome:
        return _read(value, logged)

    return call, read


def _columns(request: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = request["prompt"], request["completion"]
    columns = {name: [request.get("ground_truth")] for name in _ANSWER_COLUMNS}
    columns["data_source"] = [request.get("data_source", "")]
    columns |= {name: [value] for name, value in request.get("extra_info", {}).items()}
    columns["prompts"] = [prompt]
    columns["completions"] = [completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]]
    return columns


def _log_nothing(column: str, values: Any) -> None:
    """TRL's log_extra fills its table of completions; the run's trajectories already hold them."""


def _read(value: Any, logged: dict[str, float]) -> Outcome:
    try:
        scores = list(value)
    except TypeError:
        return invalid(BAD_RETURN, f"the function returned {describe(value)}; expected {_EXPECTED_RETURN}")
    if len(scores) != 1 or isinstance(value, (str, bytes, dict)):
        got = f"{describe(value)} for 1 completion"
        return invalid(BAD_RETURN, f"the function returned {got}; expected {_EXPECTED_RETURN}")
    return read_score(scores[0], logged.items(), _EXPECTED_RETURN)
