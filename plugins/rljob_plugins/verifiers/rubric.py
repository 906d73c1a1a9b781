"""A Rubric of verifiers: reward functions with weights, whose weighted scores are summed.

Calls the functions itself: a Rubric turns exceptions into zeros. Each function becomes a component. Functions of groups
(plural parameters) need scope: group.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from rljob_api.functions.conventions import collect
from rljob_api.functions.forms import FormError, FunctionSettings, plan_call
from rljob_plugins.verifiers.signature import GROUP, SAMPLE, SIGNATURE
from rljob_service.worker.forms.binding import Binding, NamedBinding, bind_call, combine, one_by_one, unique_names
from rljob_service.worker.forms.inspection import name_of, read_parameters

_PLURALS: Final = frozenset({"prompts", "completions", "answers", "states", "tasks", "infos"})
_KNOWN: Final = collect([SIGNATURE])


def bind(value: Any, name: str, options: Mapping[str, Any], scope: str) -> Binding:
    """Return the binding of all its functions. Raise FormError if one cannot be called."""
    functions = _functions_of(value(**options) if isinstance(value, type) else value)
    if not functions:
        raise FormError(f"{name} has no reward functions; add some with add_reward_func")
    names = unique_names([name_of(function, "reward") for function, _, _ in functions])
    return combine(
        [
            NamedBinding(each, weight, _bind(function, each, objects, scope))
            for each, (function, weight, objects) in zip(names, functions, strict=True)
        ]
    )


def _functions_of(rubric: Any) -> list[tuple[Callable[..., Any], float, dict[str, Any]]]:
    """Return each function with its weight and the objects of its Rubric, such as the parser."""
    if members := getattr(rubric, "rubrics", None):
        return [each for member in members for each in _functions_of(member)]
    functions = _call_first(rubric, "_get_reward_funcs", "get_reward_funcs")
    weights = _call_first(rubric, "_get_reward_weights", "get_reward_weights")
    objects = dict(getattr(rubric, "class_objects", None) or {})
    if getattr(rubric, "parser", None) is not None:
        objects.setdefault("parser", rubric.parser)
    return [(function, float(weight), objects) for function, weight in zip(functions, weights, strict=True)]


def _call_first(rubric: Any, *methods: str) -> Any:
    return next(getattr(rubric, method) for method in methods if hasattr(rubric, method))()


def _bind(function: Callable[..., Any], name: str, objects: dict[str, Any], scope: str) -> Binding:
    parameters = read_parameters(name, function)
    takes_lists = bool(_PLURALS.intersection(parameters.named))
    if takes_lists and scope != "group":
        raise FormError(f"{parameters.show()} of the Rubric takes a group; set scope: group")
    given = {key: value for key, value in objects.items() if parameters.accepts(key)}
    own_scope, convention = ("group", GROUP) if takes_lists else ("sample", SAMPLE)
    plan = plan_call(parameters, FunctionSettings(kwargs=given), own_scope, _KNOWN, convention)
    binding = bind_call(function, parameters, plan)
    return one_by_one(binding) if scope == "group" and not takes_lists else binding
