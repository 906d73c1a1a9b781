"""A user's function, bound by a plan: how to call it for samples, and how to read its return value."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, SimpleNamespace
from typing import Any, Final, NamedTuple

from rljob_api.functions import remedies
from rljob_api.functions.descriptions import Function
from rljob_api.functions.forms import CallPlan
from rljob_api.functions.plugins import load_reference
from rljob_api.functions.values import DATA_SOURCE, GROUND_TRUTH, Sample, as_whole
from rljob_service.worker.forms import results
from rljob_service.worker.forms.outcome import ABSTAINED, CallOutcome, Outcome, invalid

_ASKED = ("tokens", "steps")
"""Parts that **kwargs get only if the function reads them."""
_ROW_OVERRIDES = (GROUND_TRUTH, DATA_SOURCE)
"""Values that a column with the parameter's name replaces."""


NOT_ASYNC: Final = "it is not async: define it with async def and await what it calls, or remove episodesPerProcess"
"""Why a function cannot share its process."""


class Binding(NamedTuple):
    """A function ready to be called. One that takes a single sample gets lists of length one."""

    call: Callable[[list[Sample]], Any]
    """Call the user's function. May return an awaitable."""
    read: Callable[[Any, list[Sample]], list[Outcome]]
    """Read its return value: one outcome per sample, or a single one with a reason, which applies to all samples."""
    reads: frozenset[str] = frozenset()
    """The parts of a request that it needs (rljob_api.wire.scores.Part)."""
    takes_groups: bool = False
    """Whether one call can score several samples."""
    is_async: bool = False
    """Whether `call` returns an awaitable before it runs the user's function: several calls may be in flight."""


class MissingColumnError(Exception):
    """The row has no column for a parameter that neither the form nor function.kwargs gives."""


class CallBinding(NamedTuple):
    """A simulated user or tools, ready to be called with a CallRequest."""

    call: Callable[[dict[str, Any]], Any]
    """Call the user's function. May return an awaitable."""
    read: Callable[[Any, dict[str, Any]], CallOutcome]
    """Read its return value."""
    find_problem: Callable[[], str] = str
    """Return why the worker must be replaced after a call; '' if it need not."""
    call_shared: Callable[[dict[str, Any]], Awaitable[Any]] | None = None
    """Call it while other calls are in flight. None: it cannot be."""
    alone: str = ""
    """Why call_shared is None, and what to do."""


class NamedBinding(NamedTuple):
    """One of several functions whose scores are summed."""

    name: str
    """Name of its component."""
    weight: float
    binding: Binding


def bind_call(function: Callable[..., Any], parameters: Function, plan: CallPlan) -> Binding:
    """Bind a function by the plan that was made for its parameters."""
    asked = [name for name in plan.optional if plan.values[name].part in _ASKED and mentions(function, name)]
    names = [*plan.passed, *(n for n in plan.optional if plan.values[n].part not in _ASKED or n in asked)]
    readers = {name: plan.values[name] for name in names}
    whole, lists = plan.convention.whole, plan.convention.lists
    fixed = _fixed(plan)
    reported: ContextVar[dict[str, float]] = ContextVar("reported")  # calls in flight together have one each

    def call(samples: list[Sample]) -> Any:
        logged: dict[str, float] = {}
        reported.set(logged)
        constants = {**_callbacks(parameters, plan, logged), **fixed}
        if whole:
            samples = [as_whole(sample) for sample in samples]
        if lists:
            given: dict[str, Any] = {
                name: value.read_all(samples) if value.read_all else [value.read(sample) for sample in samples]
                for name, value in readers.items()
            }
        else:
            given = {name: value.read(samples[0]) for name, value in readers.items()}
        columns = _columns(samples, parameters, plan)
        if missing := [name for name in plan.required_columns if name not in columns]:
            raise MissingColumnError(_describe_missing(parameters, missing, samples, plan))
        return function(**{**given, **columns, **constants})

    return Binding(call, _reader(plan, reported), plan.reads(asked), lists, is_coroutine_function(function))


def is_coroutine_function(function: Any) -> bool:
    """Return whether a call returns a coroutine: of an async function, a partial or a decorated one, or an object with
    an async __call__."""
    inner = inspect.unwrap(getattr(function, "func", function))
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _reader(plan: CallPlan, reported: ContextVar[dict[str, float]]) -> Callable[[Any, list[Sample]], list[Outcome]]:
    convention = plan.convention
    if convention.read_returned:
        read_all = load_reference(convention.read_returned)
        return lambda value, samples: read_all(value, len(samples))
    key = plan.kwargs.get(convention.key_option) or "score"
    read_one = results.reader_of(convention.returns, key, lambda: reported.get().items())
    if convention.lists:
        return lambda value, samples: results.read_list(value, len(samples), read_one)
    return lambda value, samples: [read_one(value)]


def _fixed(plan: CallPlan) -> dict[str, Any]:
    """Return the arguments that no sample changes."""
    convention = plan.convention
    if convention.kwargs_parameter:
        return {convention.kwargs_parameter: SimpleNamespace(**{**convention.kwargs_defaults, **plan.kwargs})}
    return dict(plan.kwargs)


def _callbacks(parameters: Function, plan: CallPlan, logged: dict[str, float]) -> dict[str, Any]:
    """Return the functions by which a call reports its components, or what is ignored."""
    if plan.convention.kwargs_parameter:
        return {}
    uses = {"component": logged.__setitem__, "ignored": lambda name, value: None}
    return {name: uses[use] for name, use in plan.convention.callbacks.items() if parameters.accepts(name)}


def _columns(samples: list[Sample], parameters: Function, plan: CallPlan) -> dict[str, Any]:
    """Return the columns of the rows that the function takes: by the names of its parameters, in every form."""
    rows = [_row_of(sample) for sample in samples]
    names = {name: None for row in rows for name in row}
    taken = [name for name in names if _is_column(name, parameters, plan)]
    if plan.convention.lists:
        return {name: [row.get(name) for row in rows] for name in taken}
    return {name: rows[0][name] for name in taken}


def _row_of(sample: Sample) -> Mapping[str, Any]:
    """Return the columns of the row besides the prompt: the answer has its own name, too."""
    answer = sample.get("answer_column")
    columns: Mapping[str, Any] = sample.get("extra_info", {})
    return {answer: sample.get("ground_truth"), **columns} if answer else columns


def _is_column(name: str, parameters: Function, plan: CallPlan) -> bool:
    if plan.convention.has_columns:
        value = plan.values.get(name)
        is_mapped = value is not None and value != plan.convention.arguments.get(name)
        return parameters.accepts(name) and (value is None or (value in _ROW_OVERRIDES and not is_mapped))
    # Its project passes no columns: none replaces an argument of the form, and **kwargs stay what its project passes.
    return name in parameters.named and name not in plan.values and name != plan.convention.kwargs_parameter


def _describe_missing(parameters: Function, missing: list[str], samples: list[Sample], plan: CallPlan) -> str:
    columns = [name for name in _row_of(samples[0]) if name]
    return remedies.describe_missing_values(parameters.show(), missing, plan.convention, columns)


def mentions(function: Any, name: str) -> bool:
    """Return whether its code, or the code of its class's __call__, has the text `name`, as in kwargs["name"]."""
    inner = inspect.unwrap(getattr(function, "func", function))
    method = inner if inspect.isroutine(inner) else vars(type(inner)).get("__call__")
    pending = [getattr(method, "__code__", None)]
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            if name in code.co_consts:
                return True
            pending += code.co_consts  # with the code of what it defines
    return False


def combine(parts: Sequence[NamedBinding]) -> Binding:
    """Return a binding that calls all parts and sums their scores. Each score becomes a component."""

    def call(samples: list[Sample]) -> Any:
        return gather([part.binding.call(samples) for part in parts])

    def read(values: Any, samples: list[Sample]) -> list[Outcome]:
        read = [part.binding.read(value, samples) for part, value in zip(parts, values, strict=True)]
        columns = [each if len(each) == len(samples) else each * len(samples) for each in read]
        return [add(parts, [column[i] for column in columns]) for i in range(len(samples))]

    bindings = [part.binding for part in parts]
    reads = frozenset().union(*(binding.reads for binding in bindings))
    takes_groups = any(binding.takes_groups for binding in bindings)
    return Binding(call, read, reads, takes_groups, all(binding.is_async for binding in bindings))


def add(parts: Sequence[NamedBinding], outcomes: Sequence[Outcome]) -> Outcome:
    """Return the weighted sum of the parts that do not abstain; without a score if all do, or one fails."""
    components: dict[str, float] = {}
    for part, each in zip(parts, outcomes, strict=True):
        components |= {f"{part.name}/{name}": value for name, value in each.components.items()}
        if each.score is not None:
            components[part.name] = each.score
    abstained = [part.name for part, each in zip(parts, outcomes, strict=True) if each.reason == ABSTAINED]
    for part, each in zip(parts, outcomes, strict=True):
        if each.reason is not None and (each.reason != ABSTAINED or len(abstained) == len(parts)):
            return invalid(each.reason, f"{part.name}: {each.message}", components)
    total = sum(part.weight * (each.score or 0.0) for part, each in zip(parts, outcomes, strict=True))
    pred = next((each.pred for each in outcomes if each.pred is not None), None)
    return Outcome(total, components, pred=pred, abstained=tuple(abstained))


def one_by_one(binding: Binding) -> Binding:
    """Return a binding that calls a function of single samples once for each sample of a group."""

    def read(values: Any, samples: list[Sample]) -> list[Outcome]:
        return [binding.read(value, [sample])[0] for value, sample in zip(values, samples, strict=True)]

    call = lambda samples: gather([binding.call([s]) for s in samples])  # noqa: E731
    return Binding(call, read, binding.reads, is_async=binding.is_async)


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
