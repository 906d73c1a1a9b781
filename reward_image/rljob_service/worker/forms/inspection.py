"""What a loaded entry point is, in the terms of rljob_api.functions.forms. Calls no user code."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from rljob_api.functions.descriptions import Class, Description, Function, Other, Several
from rljob_api.functions.forms import FormError

_PLAIN_TYPES = (int, float, complex, str, bytes, bool, dict, set, frozenset, type(None), type(inspect))


def describe(name: str, value: Any) -> Description:
    """Describe a loaded entry point. Raise FormError if its parameters cannot be read."""
    if isinstance(value, _PLAIN_TYPES):
        return Other(name, type(value).__name__)
    if isinstance(value, (list, tuple)):
        return Several(name, tuple(describe(name_of(each, f"{name}[{i}]"), each) for i, each in enumerate(value)))
    if inspect.isclass(value):
        return _describe_class(name, value, is_instance=False)
    if inspect.isroutine(value) or isinstance(value, functools.partial) or _is_wrapped(value):
        return _describe_callable(name, value)
    return _describe_class(name, type(value), is_instance=True)


def name_of(value: Any, default: str) -> str:
    name = getattr(value, "__name__", default)
    return name if isinstance(name, str) else default


def unwrap_remote(value: Any) -> Any:
    """Return the function in a ray.remote function, which cannot be called here."""
    return value._function if type(value).__name__ == "RemoteFunction" and hasattr(value, "_function") else value


def take_positionally(function: Callable[..., Any], source: Function) -> Callable[..., Any]:
    """Return a call by keyword of a wrapper that takes only *args, in the order of the function that it wraps."""
    return lambda **given: function(*(given[name] for name in source.named if name in given))


def _is_wrapped(value: Any) -> bool:
    """Return whether it is an object that stands for a function, such as functools.lru_cache makes."""
    return callable(value) and hasattr(value, "__wrapped__")


def _describe_callable(name: str, value: Callable[..., Any]) -> Function:
    """Describe a function; of the wrapper of a decorator without functools.wraps, what it passes its arguments to."""
    found = read_parameters(name, value)
    if not found.is_opaque:
        return found._replace(literals=frozenset(_list_literals(inspect.unwrap(getattr(value, "func", value)))))
    cells = getattr(value, "__closure__", None) or ()
    inner = [each for cell in cells if inspect.isfunction(each := _content(cell))]
    return _describe_callable(name, inner[0]) if len(inner) == 1 else found


def _list_literals(function: Any) -> Iterator[str]:
    """Yield the texts of the functions in its module, and those that are variables there."""
    namespace = getattr(function, "__globals__", {})
    functions = [each for each in namespace.values() if inspect.isfunction(each) and each.__globals__ is namespace]
    codes = [each.__code__ for each in functions]
    yield from (each.strip() for each in namespace.values() if isinstance(each, str))
    while codes:
        constants = codes.pop().co_consts
        codes += [each for each in constants if inspect.iscode(each)]
        yield from (each.strip() for each in constants if isinstance(each, str))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def read_parameters(name: str, value: Callable[..., Any], *, is_method: bool = False) -> Function:
    """Return the parameters; of a function of a class without the first one. Raise FormError if it has none to read."""
    try:
        parameters = list(inspect.signature(value).parameters.values())[is_method:]
    except (TypeError, ValueError) as error:  # compiled functions
        what = f"its parameters cannot be read ({error}); call it from a Python function"
        raise FormError(f"{name}: {what}") from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional_only = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    return Function(
        name,
        named=tuple(p.name for p in named),
        required=tuple(p.name for p in (*positional_only, *named) if p.default is p.empty),
        positional_only=tuple(p.name for p in positional_only),
        var_positional=next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), ""),
        var_keyword=next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), ""),
        annotations={p.name: _show_annotation(p.annotation) for p in parameters if p.annotation is not p.empty},
    )


def _show_annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _describe_class(name: str, cls: type, *, is_instance: bool) -> Class:
    methods = dict[str, Function]()
    for owner in reversed(cls.__mro__[:-1]):  # without object
        for attribute, raw in vars(owner).items():
            function = inspect.getattr_static(cls, attribute, None)
            if attribute != "__init__" and (inspect.isroutine(raw) or isinstance(raw, (staticmethod, classmethod))):
                methods |= _read_method(cls, attribute, function)
    constructor = None
    if not is_instance:
        try:
            constructor = read_parameters("__init__", cls)
        except FormError:
            constructor = None
    bases = frozenset(base.__name__ for base in cls.__mro__[1:-1])
    rewards = frozenset(method for method in methods if getattr(getattr(cls, method, None), "reward", None) is True)
    return Class(name, bases, methods, is_instance, rewards, constructor)


def _read_method(cls: type, name: str, raw: Any) -> dict[str, Function]:
    is_bound = isinstance(raw, (staticmethod, classmethod))
    try:
        return {name: read_parameters(name, getattr(cls, name) if is_bound else raw, is_method=not is_bound)}
    except FormError:  # a compiled method, such as of an extension class
        return {}
