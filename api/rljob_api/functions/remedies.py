"""Messages for functions that cannot be called: what is wrong, and the lines or fields that adapt them."""

import ast
import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from rljob_api.functions.conventions import Convention
from rljob_api.functions.descriptions import DEFAULT_ENTRYPOINTS, SCORER_METHODS, Function
from rljob_api.phrases import did_you_mean

_COMPLETION, _TRUTH, _PROMPT = "completion", "ground_truth", "prompt"
_SOURCE, _EXTRA = "data_source", "extra_info"
"""These mean the same in every form."""
_NAMES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        _COMPLETION: frozenset(
            (
                *("text", "output", "generated", "generation", "prediction", "pred", "predicted", "response"),
                *("completion", "model_output", "content", "candidate", "solution_str", "reply"),
            )
        ),
        _TRUTH: frozenset(
            ("ground_truth", "truth", "gt", "gold", "label", "target", "reference", "expected", "ref", "correct_answer")
        ),
        _PROMPT: frozenset(("prompt", "question", "query", "problem", "instruction", "input")),
    }
)
"""What a parameter is by its name, without a plural's s."""
_NEAR: Final = 0.85
"""Likeness of a misspelt name, from 0 to 1: a letter or two of a long one."""
_PLAIN: Final = re.compile(r"(?:str|int|float|bool|[Ll]ist|Optional|Union|None|Any|object|typing|\W)*")
"""An annotation of texts and numbers."""
_AMBIGUOUS: Final = frozenset(("answer", "solution"))
"""The completion, or if there is one the ground truth."""


def find_training(source: str) -> tuple[int, str] | None:
    """Return the line at which an import of the source would train, and what to move; None if it does not. The source
    is valid Python."""
    module = ast.parse(source.removeprefix("\ufeff"))
    kept = re.compile(r"(async )?(def|class|@)|if .*__main__")
    statements = [each for each in module.body if not kept.match(ast.unparse(each))]
    calls = [call for each in statements for call in ast.walk(each) if isinstance(call, ast.Call)]
    called = [(call.lineno, ast.unparse(call.func).rpartition(".")[2]) for call in calls]
    lines = [line for line, name in called if name == "train"]
    if not lines or not any(name.endswith("Trainer") for _, name in called):
        return None
    names = ", ".join(node.name for node in module.body if isinstance(node, ast.FunctionDef)) or "the functions"
    return min(lines), (
        f"the import would train, in the reward's server: move {names}, with the imports and constants that they use, "
        "to a file of their own"
    )


def describe_missing_entrypoint(
    entrypoint: str | None,
    scope: str,
    functions: Sequence[str],
    classes: Mapping[str, Iterable[str]],
    scorers: Sequence[str] = (),
) -> str:
    """Return why a source has no entry point. `classes`: the names of their methods. `scorers`: what has a form."""
    if scope != "sampleThenGroup":
        of_groups = [name for name, methods in classes.items() if set(SCORER_METHODS) <= set(methods)]
        if entrypoint is None and of_groups and not functions:
            return f"{of_groups[0]} is a class that scores samples and groups; set scope: sampleThenGroup"
    wanted = list(classes) if scope == "sampleThenGroup" else [*functions, *classes]
    kind = "class" if scope == "sampleThenGroup" else "function"
    found = f"it defines {', '.join(wanted)}" if wanted else f"it defines no {kind}"
    if entrypoint is not None:
        return describe_wrong_entrypoint(entrypoint, wanted, found)
    if kind == "class":
        return f"no class with {' and '.join(SCORER_METHODS)} was found ({found}); scope: sampleThenGroup requires one"
    several = f", or for their sum function.entrypoints: [{', '.join(scorers)}]" if len(scorers) > 1 else ""
    return f"none of {', '.join(DEFAULT_ENTRYPOINTS)} was found ({found}); set function.entrypoint{several}"


def describe_wrong_entrypoint(entrypoint: str, defined: Sequence[str], found: str) -> str:
    """Return that a source does not define what function.entrypoint names. `found`: what it defines, as text."""
    remedy = did_you_mean(entrypoint, defined, "correct function.entrypoint")
    return f"the entry point {entrypoint} was not found ({found}); {remedy}"


def describe_missing(shown: str, missing: Sequence[str], convention: Convention) -> str:
    return f"{shown} requires {', '.join(missing)}, which the {convention.name} convention does not pass"


def describe_broken(broken: Mapping[str, str]) -> str:
    """Return the plugins of signatures that cannot be imported; empty if there are none."""
    return "".join(f"; the plugin of {name} cannot be imported: {problem}" for name, problem in broken.items())


def describe_missing_values(
    shown: str, missing: Sequence[str], convention: Convention, columns: Collection[str] | None = None
) -> str:
    """`columns`: of the data; None if unknown."""
    what = describe_missing(shown, missing, convention)
    sources = {name: name for name in missing}
    if columns is not None:
        what += f", and which is not a column of the data; the columns are {', '.join(columns) or 'none'}"
        sources = {name: next(iter(difflib.get_close_matches(name, columns, n=1)), "COLUMN") for name in missing}
    mapped = ", ".join(f"{name}: extra_info.{source}" for name, source in sources.items())
    for name in missing:
        if near := difflib.get_close_matches(name, convention.arguments, n=1, cutoff=_NEAR):
            return f"{what}; rename {name} to {near[0]}, or set function.columns: {{{mapped}}}"
    return f"{what}; add a default, a value in function.kwargs, or function.columns: {{{mapped}}}"


def describe_unknown_form(function: Function, for_groups: bool, conventions: Iterable[Convention]) -> str:
    """`conventions`: whose parameters a misspelt one may mean."""
    shown = function.show()
    if function.is_opaque:
        return (
            f"{shown} has no named parameters, so its convention is unknown; set function.signature, such as trl, or "
            "add @functools.wraps to its decorator, if it has one"
        )
    problem, adapter = f"{shown} does not match a convention of reward functions", write_adapter(function, for_groups)
    if typo := _find_typo(function, conventions):
        return f"{problem}; {typo}"
    problem, roles = f"{problem} (docs/adapters.md has those of AReaL, EasyR1 and others)", _guess_roles(function)
    if not {_COMPLETION, _TRUTH}.intersection(roles.values()):
        return f"{problem}; write a function of response, ground_truth and extra_info that makes these, as it does"
    if _takes_lists(roles) and not for_groups:
        return f"{problem}; {adapter}"
    mapped = ", ".join(f"{name}: {role or f'extra_info.{name}'}" for name, role in roles.items())
    return f"{problem}; map its parameters, such as function.columns: {{{mapped}}}, or {adapter}"


def _find_typo(function: Function, conventions: Iterable[Convention]) -> str:
    """Return the correction of a parameter that nearly has the name by which a form is known; empty if there is none.
    A plural is another form, and the function must have another parameter of the form."""
    best, found = (_NEAR, 0), ""
    for convention in conventions:
        unknown = [name for name in function.named if name not in convention.arguments]
        num_known = len(function.named) - len(unknown)
        markers = {marker.partition(":")[0] for marker in convention.markers}
        for marker, name in itertools.product(sorted(markers.difference(function.named)), unknown):
            likeness = (difflib.SequenceMatcher(None, marker, name).ratio(), num_known)
            if num_known and likeness > best and marker.removesuffix("s") != name.removesuffix("s"):
                best, found = likeness, f"rename {name} to {marker} if {convention.form} is meant"
    return found


def write_adapter(function: Function, for_groups: bool) -> str:
    """Return the lines that adapt a function to the plain form; for groups, to lists by function.columns."""
    roles, name = _guess_roles(function), function.name
    # The function keeps its name: an adapter of the same name would call itself.
    own = "compute_score" if name != "compute_score" else "adapted"
    settings = [] if own != "adapted" else [f"function.entrypoint: {own}"]
    if for_groups:
        settings.append("function.columns: {texts: completion, truths: ground_truth}")
        values = {_COMPLETION: "text", _TRUTH: "truth"}
        call = ", ".join(f"{each}={values.get(role, '...')}" for each, role in roles.items())
        return (
            f"set {', '.join(settings)} and write\n"
            f"    def {own}(texts, truths):\n"
            f"        return [{name}({call}) for text, truth in zip(texts, truths)]"
        )
    values = {_COMPLETION: "response", _TRUTH: "ground_truth", _PROMPT: "prompt", _SOURCE: _SOURCE, _EXTRA: _EXTRA}
    given = {each: values.get(role) or f'{_EXTRA}["{each}"]' for each, role in roles.items()}
    shape, first = ("[{}]", "[0]") if _takes_lists(roles) else ("{}", "")
    call = ", ".join(f"{each}={shape.format(value)}" for each, value in given.items())
    parameters = ["prompt", "response", "ground_truth", _EXTRA, *([_SOURCE] if _SOURCE in roles else [])]
    header = f"{own}({', '.join(parameters)})"
    needed = f"set {settings[0]} and " if settings else ""
    return f"{needed}write\n    def {header}:\n        return {name}({call}){first}"


def _guess_roles(function: Function) -> dict[str, str]:
    """Return what each required parameter is by its name, in order: completion, ground_truth or prompt, each at most
    once; empty for a column. Where no name is known, the first two others are completion and ground truth, unless one
    of these is annotated with another type than texts and numbers: an object of its project has both."""
    names = list(function.required or function.named)
    roles = {name: name for name in names if name in (_SOURCE, _EXTRA)}
    for role, known in _NAMES.items():
        if (found := next((name for name in names if _singular(name) in known), None)) is not None:
            roles[found] = role
    ambiguous = [name for name in names if name not in roles and _singular(name) in _AMBIGUOUS]
    others = [name for name in names if name not in roles and name not in ambiguous]
    if all(_PLAIN.fullmatch(function.annotations.get(name, "")) for name in others):
        free = [role for role in (_COMPLETION, _TRUTH) if role not in roles.values()]
        roles |= dict(zip([*ambiguous, *others], free, strict=False))
    return {name: roles.get(name, "") for name in names}


def _takes_lists(roles: Mapping[str, str]) -> bool:
    """Whether all names that say what they are are plurals."""
    known = [name for name in roles if _singular(name) in _AMBIGUOUS.union(*_NAMES.values())]
    return bool(known) and all(_singular(name) != name.lower() for name in known)


def _singular(name: str) -> str:
    lowered = name.lower()
    return lowered.removesuffix("s") if lowered.removesuffix("s") in _AMBIGUOUS.union(*_NAMES.values()) else lowered
