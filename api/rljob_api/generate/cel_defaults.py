"""Rules of the CRDs for objects whose fields may be absent: CEL that reads an absent field as its default. Pure.

The API server stores no defaults, so that a later version can read each object by its own types. A rule is written as
if each field with a default were set; `fill_defaults` replaces what it reads by `self.?a.orValue(DEFAULT)`. A field
that the rule itself asks for with has() stays as it is. Invariant: an optional field, whose default is null, is never
read before has(); the rule's author sees to that.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from rljob_api.manifest.base import Spec, yaml_fields
from rljob_api.manifest.kept_defaults import find_part

Scope = Mapping[str, type[Spec]]
"""The type of each variable: self, oldSelf, and those of macros."""

_TOKEN = re.compile(r"'[^']*'|(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?P<call>\()?")
_COMPARED = re.compile(r"(?<![\w.])self(?P<path>(?:\.\w+)+) == oldSelf(?P=path)(?![\w.])")
_OF_EMPTY = {"exists": "false", "all": "true", "map": "[]", "size": "0"}
"""What a method gives of an empty list or map."""


def fill_defaults(cel: str, part: type[Spec]) -> str:
    """Return a rule of a type for objects without stored defaults."""
    scope = {"self": part, "oldSelf": part}
    cel = _COMPARED.sub(lambda match: _compare(match["path"], scope), cel)
    return _fill(cel, scope, frozenset(re.findall(r"has\(([\w.]+)\)", cel)))


def _fill(cel: str, scope: Scope, asked: frozenset[str]) -> str:
    """`asked`: the paths for which the rule itself has has()."""
    found, position = list[str](), 0
    while match := _TOKEN.search(cel, position):
        found.append(cel[position : match.start()])
        path, position = match[0].rstrip("("), match.end()
        if path.partition(".")[0] not in scope and path != "has":
            found.append(match[0])
        elif not match["call"]:
            found.append(path if path in asked else _read(path, scope))
        else:
            end = _find_end(cel, position)
            found.append(_fill_call(path, cel[position:end], scope, asked))
            position = end + 1
    return "".join([*found, cel[position:]])


def _fill_call(path: str, arguments: str, scope: Scope, asked: frozenset[str]) -> str:
    if path == "has":
        return _ask(arguments, scope)
    holder, _, method = path.rpartition(".")
    variable, comma, body = arguments.partition(",")
    if comma and (item := find_part(_find_field(holder, scope).annotation)):
        scope = {**scope, variable: item}
    filled = f"{variable},{_fill(body, scope, asked)}" if comma else _fill(arguments, scope, asked)
    call = f"{path}({filled})"
    if holder in asked or not any(_list_absent(holder, scope)):
        return call
    # Not orValue(): the API server would know no bound of its size, by which it limits the cost of a rule.
    if method in _OF_EMPTY:
        return f"({_ask(holder, scope)} ? {call} : {_OF_EMPTY[method]})"
    return f"(has({holder}) ? {holder} : {_write(_find_field(holder, scope).default)}).{method}({filled})"


def _ask(path: str, scope: Scope) -> str:
    """Whether the field is there: has() fails if what it is in may be absent."""
    is_nested = next(_list_absent(path.rpartition(".")[0], scope), None)
    return f"{_chain(path, scope)}.hasValue()" if is_nested else f"has({path})"


def _read(path: str, scope: Scope) -> str:
    default = _find_field(path, scope).default if "." in path else None
    is_value = isinstance(default, bool | int | float | str | list | dict)
    return f"{_chain(path, scope)}.orValue({_write(default)})" if is_value else path


def _chain(path: str, scope: Scope) -> str:
    """`self.data.?train.?weight`: optional from the first part on that may be absent."""
    present = next(_list_absent(path, scope), path).rpartition(".")[0]
    return f"{present}.?{path.removeprefix(f'{present}.').replace('.', '.?')}"


def _write(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _list_absent(path: str, scope: Scope) -> Iterator[str]:
    """Yield the paths on the way, and the path itself, that may be absent because they have a default."""
    for each in list(accumulate(path.split("."), "{}.{}".format))[1:]:
        field = _find_field(each, scope)
        if not field.is_required() and field.default is not None:
            yield each


def _compare(path: str, scope: Scope) -> str:
    """Return the comparison of a value with its earlier one; of an object, field by field."""
    field = _find_field(f"self{path}", scope)
    part = find_part(field.annotation)
    if part is not None and get_origin(field.annotation) is not list:
        return " && ".join(
            _compare_field(f"{path}.{name}", each, scope) for name, (_, each) in yaml_fields(part).items()
        )
    if field.is_required() or field.default is None:
        return f"self{path} == oldSelf{path}"
    # Not orValue(), as above.
    default = "dyn({})" if field.default == {} else _write(field.default)
    return " == ".join(f"(has({side}{path}) ? {side}{path} : {default})" for side in ("self", "oldSelf"))


def _compare_field(path: str, field: FieldInfo, scope: Scope) -> str:
    if field.is_required() or field.default is not None:
        return _compare(path, scope)
    return f"has(self{path}) == has(oldSelf{path}) && (!has(self{path}) || self{path} == oldSelf{path})"


def _find_field(path: str, scope: Scope) -> FieldInfo:
    variable, *names = path.split(".")
    part: type[Spec] | None = scope[variable]
    for name in names:
        assert part is not None, f"{path} has no field {name}"
        field = yaml_fields(part)[name][1]
        part = find_part(field.annotation)
    return field


def _find_end(cel: str, position: int) -> int:
    """Return where the bracket before `position` is closed."""
    depth = 1
    while depth:
        match = re.compile(r"'[^']*'|[()]").search(cel, position)
        assert match is not None, f"a bracket is not closed in {cel}"
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        position = match.end()
    return position - 1
