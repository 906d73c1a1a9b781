"""A user's function, bound by a plan: how to call it for samples, and how to read its return value."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

from rljob_api.functions.conventions import TOKEN_VALUES
from rljob_api.functions.descriptions import Function
from rljob_api.functions.forms import CallPlan
from rljob_reward.worker.adapters import results
from rljob_reward.worker.adapters.outcome import CallOutcome, Outcome, invalid
from rljob_reward.worker.adapters.values import Sample, reader_of

_ROW_OVERRIDES = ("ground_truth", "data_source")
"""Values that a column with the parameter's name replaces."""
_SLIME_DEFAULTS = {"custom_rm_path": None, "rm_type": None, "rm_url": None, "reward_key": None}
"""Options that slime's arguments always have."""


class Binding(NamedTuple):
    """A function ready to be called. One that takes a single sample gets lists of length one."""

    call: Callable[[list[Sample]], Any]
    """Call the user's function. May return an awaitable."""
    read: Callable[[Any, list[Sample]], list[Outcome]]
    """Read its return value: one outcome per sample, or a single one with a reason, which applies to all samples."""
    reads_tokens: bool = False
    """Whether it needs prompt_ids and completion_ids."""


class CallBinding(NamedTuple):
    """A simulated user or tools, ready to be called with a CallRequest."""

    call: Callable[[dict[str, Any]], Any]
    """Call the user's function. May return an awaitable."""
    read: Callable[[Any, dict[str, Any]], CallOutcome]
    """Read its return value."""
    find_problem: Callable[[], str] = str
    """Return why the worker must be replaced after a call; '' if it need not."""


class NamedBinding(NamedTuple):
    """One of several functions whose scores are summed."""

    name: str
    """Of its component."""
    weight: float
    binding: Binding


def bind_call(function: Callable[..., Any], parameters: Function, plan: CallPlan) -> Binding:
    """Bind a function by the plan that was made for its parameters."""
    read_ids = [name for name in plan.optional if plan.values[name] in TOKEN_VALUES and mentions(function, name)]
    names = [*plan.passed, *(n for n in plan.optional if plan.values[n] not in TOKEN_VALUES or n in read_ids)]
    readers = {name: reader_of(plan.values[name]) for name in names}
    has_columns, lists = plan.convention.has_columns, plan.convention.lists
    logged: dict[str, float] = {}
    constants = _constants(parameters, plan, logged)

    def call(samples: list[Sample]) -> Any:
        logged.clear()
        if lists:
            given: dict[str, Any] = {name: [read(sample) for sample in samples] for name, read in readers.items()}
        else:
            given = {name: read(samples[0]) for name, read in readers.items()}
        columns = _columns(samples, parameters, plan) if has_columns else {}
        return function(**{**given, **columns, **constants})

    return Binding(call, _reader(plan, logged), plan.reads_tokens(read_ids))


def _reader(plan: CallPlan, logged: dict[str, float]) -> Callable[[Any, list[Sample]], list[Outcome]]:
    convention = plan.convention
    if convention.returns == "rewards":
        return lambda value, samples: results.read_rewards(value, len(samples))
    key = plan.kwargs.get("reward_key") if convention.kwargs_parameter else None
    read_one = results.reader_of(convention.returns, logged.items, key)
    if convention.lists:
        return lambda value, samples: results.read_list(value, len(samples), read_one)
    return lambda value, samples: [read_one(value)]


def _constants(parameters: Function, plan: CallPlan, logged: dict[str, float]) -> dict[str, Any]:
    """Return the arguments that no sample changes."""
    convention = plan.convention
    if convention.kwargs_parameter:
        return {convention.kwargs_parameter: SimpleNamespace(**_SLIME_DEFAULTS | dict(plan.kwargs))}
    # TRL's log_extra fills its table of completions, which the run's trajectories already contain.
    logs = {"log_metric": logged.__setitem__, "log_extra": lambda column, values: None}
    taken = {name: log for name, log in logs.items() if convention.name == "trl" and parameters.accepts(name)}
    return taken | dict(plan.kwargs)


def _columns(samples: list[Sample], parameters: Function, plan: CallPlan) -> dict[str, Any]:
    """Return the columns of the rows that the function takes."""
    rows = [sample.get("extra_info", {}) for sample in samples]
    names = {name: None for row in rows for name in row}
    taken = [name for name in names if parameters.accepts(name) and _is_column(name, plan)]
    if plan.convention.lists:
        return {name: [row.get(name) for row in rows] for name in taken}
    return {name: rows[0][name] for name in taken}


def _is_column(name: str, plan: CallPlan) -> bool:
    value = plan.values.get(name)
    is_mapped = value is not None and value != plan.convention.arguments.get(name)
    return value is None or (value in _ROW_OVERRIDES and not is_mapped)


def mentions(function: Any, name: str) -> bool:
    """Return whether its code, or the code of its class's __call__, has the text `name`, as in kwargs["name"]."""
    inner = inspect.unwrap(getattr(function, "func", function))
    method = inner if inspect.isroutine(inner) else vars(type(inner)).get("__call__")
    code = getattr(method, "__code__", None)
    return isinstance(code, CodeType) and name in code.co_consts


def combine(parts: Sequence[NamedBinding]) -> Binding:
    """Return a binding that calls all parts and sums their scores. Each score becomes a component."""

    def call(samples: list[Sample]) -> Any:
        return gather([part.binding.call(samples) for part in parts])

    def read(values: Any, samples: list[Sample]) -> list[Outcome]:
        read = [part.binding.read(value, samples) for part, value in zip(parts, values, strict=True)]
        columns = [each if len(each) == len(samples) else each * len(samples) for each in read]
        return [add(parts, [column[i] for column in columns]) for i in range(len(samples))]

    return Binding(call, read, any(part.binding.reads_tokens for part in parts))


def add(parts: Sequence[NamedBinding], outcomes: Sequence[Outcome]) -> Outcome:
    """Return the weighted sum; without a score if one part has none."""
    components: dict[str, float] = {}
    for part, each in zip(parts, outcomes, strict=True):
        components |= {f"{part.name}/{name}": value for name, value in each.components.items()}
        if each.score is not None:
            components[part.name] = each.score
    for part, each in zip(parts, outcomes, strict=True):
        if each.reason is not None:
            return invalid(each.reason, f"{part.name}: {each.message}", components)
    return Outcome(
        sum(part.weight * (each.score or 0.0) for part, each in zip(parts, outcomes, strict=True)), components
    )


def one_by_one(binding: Binding) -> Binding:
    """Return a binding that calls a function of single samples once for each sample of a group."""

    def read(values: Any, samples: list[Sample]) -> list[Outcome]:
        return [binding.read(value, [sample])[0] for value, sample in zip(values, samples, strict=True)]

    return Binding(lambda samples: gather([binding.call([s]) for s in samples]), read, binding.reads_tokens)


def gather(values: list[Any]) -> list[Any] | Awaitable[list[Any]]:
    """Return the values; as an awaitable if one of them is."""

    async def wait() -> list[Any]:
        return [await value if inspect.isawaitable(value) else value for value in values]

    return wait() if any(inspect.isawaitable(value) for value in values) else values


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names with a number after each repeated one."""
    seen: Mapping[str, int] = {}
    unique = []
    for name in names:
        number = seen.get(name, 0) + 1
        seen = {**seen, name: number}
        unique.append(name if number == 1 else f"{name}_{number}")
    return unique
