"""Messages for functions that cannot be called: what is wrong, and the lines or fields that adapt them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rljob_api.functions.conventions import NOT_SENT, Convention
from rljob_api.functions.descriptions import DEFAULT_ENTRYPOINTS, SCORER_METHODS, Function

_COMPLETION_NAMES: Final = frozenset(
    [
        "text",
        "output",
        "outputs",
        "generated",
        "generation",
        "prediction",
        "pred",
        "response",
        "completion",
        "answer",
        "model_output",
        "predicted",
        "content",
        "candidate",
        "solution_str",
    ]
)


def describe_missing_entrypoint(
    entrypoint: str | None, scope: str, functions: Sequence[str], classes: Mapping[str, Iterable[str]]
) -> str:
    """Return why a source has no entry point. `classes`: the names of their methods."""
    if scope != "sampleThenGroup":
        scorers = [name for name, methods in classes.items() if set(SCORER_METHODS) <= set(methods)]
        if entrypoint is None and scorers and not functions:
            return f"{scorers[0]} is a class that scores samples and groups; set scope: sampleThenGroup"
    wanted = list(classes) if scope == "sampleThenGroup" else [*functions, *classes]
    kind = "class" if scope == "sampleThenGroup" else "function"
    found = f"it defines {', '.join(wanted)}" if wanted else f"it defines no {kind}"
    if entrypoint is not None:
        return describe_wrong_entrypoint(entrypoint, wanted, found)
    if kind == "class":
        return f"no class with {' and '.join(SCORER_METHODS)} was found ({found}); scope: sampleThenGroup requires one"
    return f"none of {', '.join(DEFAULT_ENTRYPOINTS)} was found ({found}); set function.entrypoint"


def describe_wrong_entrypoint(entrypoint: str, defined: Sequence[str], found: str) -> str:
    """Return that a source does not define what function.entrypoint names. `found`: what it defines, as text."""
    near = difflib.get_close_matches(entrypoint, defined, n=1)
    remedy = f"did you mean {near[0]}?" if near else "correct function.entrypoint"
    return f"the entry point {entrypoint} was not found ({found}); {remedy}"


def describe_missing_values(shown: str, missing: Sequence[str], convention: Convention) -> str:
    what = f"{shown} requires {', '.join(missing)}, which the {convention.name} convention does not pass; "
    known = next((NOT_SENT[name] for name in missing if name in NOT_SENT), None)
    mapped = ", ".join(f"{name}: extra_info.{name}" for name in missing)
    return what + (known or f"add a default, a value in function.kwargs, or function.columns: {{{mapped}}}")


def describe_unknown_form(function: Function, for_groups: bool) -> str:
    shown = function.show()
    if function.is_opaque:
        return (
            f"{shown} has no named parameters, so its convention is unknown; set function.signature, or add "
            "@functools.wraps to its decorator"
        )
    mapped = ", ".join(f"{name}: {value}" for name, value in _guess(function, "completion", "ground_truth").items())
    return (
        f"{shown} does not match a convention of reward functions; map its parameters, such as "
        f"function.columns: {{{mapped}}}, or {write_adapter(function, for_groups)}"
    )


def write_adapter(function: Function, for_groups: bool) -> str:
    """Return the three lines that adapt a function to verl's form."""
    if for_groups:
        call = ", ".join(f"{name}={value}" for name, value in _guess(function, "text", "truth").items())
        return (
            "write\n"
            "    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
            "        pairs = zip(solution_strs, ground_truths)\n"
            f"        return [{function.name}({call}) for text, truth in pairs]"
        )
    call = ", ".join(f"{name}={value}" for name, value in _guess(function, "solution_str", "ground_truth").items())
    return (
        "write\n"
        "    def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"        # extra_info has the other columns\n"
        f"        return {function.name}({call})"
    )


def _guess(function: Function, completion: str, truth: str) -> dict[str, str]:
    """Return a value for each required parameter, for an example: the completion, then the answer, then columns."""
    names = list(function.required or function.named)
    first = next((name for name in names if name.lower() in _COMPLETION_NAMES), names[0] if names else "")
    others = [name for name in names if name != first]
    return {name: completion if name == first else truth if name == others[0] else "..." for name in names}
