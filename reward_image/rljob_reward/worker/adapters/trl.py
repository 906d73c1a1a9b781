"""TRL: reward(prompts, completions, **columns) -> list[float | None].

A batch is a group, or a single sample. A chat prompt has a chat completion, as in GRPOTrainer. Columns are the
answer (as answer, ground_truth and solution, the names in TRL's functions) and every key of extra_info.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_api.errors import UserError
from rljob_reward.worker.adapters.binding import Adapter, Binding, Parameters, Sample
from rljob_reward.worker.adapters.outcome import Outcome, read_each, read_score

_EXPECTED = "reward(prompts, completions, **columns)"
_EXPECTED_RETURN = "a list with one number or None for each completion"
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_TOKEN_PARAMETERS = ("completion_ids", "environments", "trainer_state")


def bind(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    parameters = Parameters(function, place)
    unavailable = sorted((parameters.required & set(_TOKEN_PARAMETERS)) - set(kwargs))
    if unavailable:
        raise UserError(
            f"{place}: {', '.join(unavailable)} exists only in TRL's trainer and is not sent to a reward server; "
            "score from prompts, completions and columns, or give the parameter a default"
        )
    # Other required parameters may be columns, which only a request names: a missing one is a TypeError of that call.
    parameters.check(parameters.required, kwargs, _EXPECTED, "completions")
    logged: dict[str, float] = {}

    def call(samples: list[Sample]) -> Any:
        logged.clear()
        # log_extra fills TRL's table of completions, which the run's trajectories already contain.
        values = {**_columns(samples), "log_metric": logged.__setitem__, "log_extra": lambda column, values: None}
        return function(**{name: value for name, value in values.items() if parameters.accepts(name)} | kwargs)

    def read(value: Any, samples: list[Sample]) -> list[Outcome]:
        return read_each(
            value, len(samples), _EXPECTED_RETURN, lambda score: read_score(score, logged.items(), _EXPECTED_RETURN)
        )

    return Binding(call, read)


def _columns(samples: list[Sample]) -> dict[str, Any]:
    columns = {name: [sample.get("ground_truth") for sample in samples] for name in _ANSWER_COLUMNS}
    columns["data_source"] = [sample.get("data_source", "") for sample in samples]
    rows = [sample.get("extra_info", {}) for sample in samples]
    columns |= {name: [row.get(name) for row in rows] for name in {name: None for row in rows for name in row}}
    columns["prompts"] = [sample["prompt"] for sample in samples]
    columns["completions"] = [_completion_of(sample) for sample in samples]
    return columns


def _completion_of(sample: Sample) -> str | list[dict[str, str]]:
    completion: str = sample["completion"]
    return completion if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": completion}]


ADAPTER = Adapter("trl", "completions", True, bind)
