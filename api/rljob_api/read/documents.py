"""Parse YAML to plain data, with the line of every key and list entry.

Reports syntax errors, tabs and duplicate keys; `load` validates the data. Invariant: scalars have the types that
kubectl gives them (1e-6 is a number, `y` is true, a date is text).

Plain scalars are those of kubectl: YAML 1.1 as go-yaml has it, and then JSON. So `y` is true, `12:30` is text, `1e3`
is 1000, and a date is text. Invariant: one table for reading and for writing, so that what we write is what kubectl
and we read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
}
_PATTERNS = (
    (_NULL, r"~|null|Null|NULL|"),
    (_BOOL, "|".join(_WORDS)),
    (_INT, r"[-+]?(?:0[bB]_*[-+]?[01][01_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|0[oO]?[0-7_]+|0|[1-9][0-9_]*)"),
    (_FLOAT, r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"),
    (_FLOAT, r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
)
_COMPILED = [(tag, re.compile(pattern)) for tag, pattern in _PATTERNS]
_LONG_INT_DIGITS = 20


def resolve(text: str) -> str:
    """Return the tag of a plain scalar."""
    return next((tag for tag, pattern in _COMPILED if pattern.fullmatch(text)), _TEXT)


def is_text(text: str) -> bool:
    """Whether a scalar without quotes is text for kubectl."""
    return resolve(text) == _TEXT


def construct(node: yaml.ScalarNode) -> Any:
    """Return the value of a resolved scalar. Raises ValueError for a number that JSON does not have."""
    text = node.value
    if node.tag == _BOOL and text in _WORDS:
        return _WORDS[text]
    if node.tag == _INT:
        return _read_int(text.replace("_", ""))
    number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    # JSON has one type of number: 3.0 and 1e3 are whole.
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _read_int(text: str) -> int | float:
    sign, digits = (-1 if text[0] == "-" else 1), text.lstrip("+-").lower()
    if digits.startswith("0b"):
        return sign * int(digits[2:], 2)
    if digits.startswith("0x"):
        return sign * int(digits[2:], 16)
    if digits.startswith("0") and digits != "0":
        return sign * int(digits.removeprefix("0o") or "0", 8)
    return sign * int(digits) if len(digits) < _LONG_INT_DIGITS else sign * float(digits)


Location = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


_PATH_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_ITEM = re.compile(r"items\[(\d+)\]\.?(.*)")
"""A path in a List: the index, and the path in the item."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")


@dataclass(frozen=True)
class Problem:
    path: str
    """Path of the field, such as spec.rewards[0].name. Empty: the whole file or document."""
    line: int
    """Line in the file, from 1."""
    message: str
    """What is wrong and the remedy. A predicate to the path, if any."""

    def __str__(self) -> str:
        return f"{self.path} {self.message}".strip()


@dataclass
class Document:
    data: Any
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, location: Location) -> int:
        """Return the line of the value, or of its nearest ancestor in the file."""
        while location not in self.lines:
            location = location[:-1]
        return self.lines[location]


class _Loader(yaml.SafeLoader):
    """YAML as kubectl reads it."""

    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        # JSON, and therefore Kubernetes, does not have these types.
        if str(tag).rpartition(":")[2] not in ("binary", "set", "omap", "pairs", "timestamp")
    }

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode and implicit[0] and value != "<<":
            return resolve(value or "")
        return super().resolve(kind, value, implicit)


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return construct(node)


for _name in ("bool", "int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _construct_scalar)


def format_path(location: Location) -> str:
    """Return a location as messages show it: `spec.rewards[0].name`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).lstrip(".")


def parse_path(path: str) -> Location:
    """`spec.rewards[0].name` -> ('spec', 'rewards', 0, 'name')."""
    return tuple(int(index) if index else name for name, index in _PATH_PART.findall(path))


def read_documents(text: str) -> tuple[list[Document], list[Problem]]:
    """Return the non-empty documents before the first syntax error, and that error. As for kubectl, the items of a
    `kind: List`, such as `kubectl get -o yaml` prints, are documents."""
    documents: list[Document] = []
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # guaranteed by check_node
            document = Document(data=None, lines={(): node.start_mark.line + 1})
            _index(node, (), document)
            document.data = loader.construct_document(node)
            if document.data is not None:
                documents += _split_list(document)
    except yaml.YAMLError as error:
        return documents, [_describe(error, text)]
    except (ValueError, RecursionError):
        message = "is nested too deeply, contains itself through an alias, or contains a number that is too long"
        return documents, [Problem("", loader.line + 1, f"{message}; shorten it")]
    return documents, []


def _split_list(document: Document) -> list[Document]:
    data = document.data
    is_list = isinstance(data, dict) and data.get("kind") == "List" and isinstance(data.get("items"), list)
    if not is_list:
        return [document]
    # Items of a merge key (<<) have no lines.
    items = [Document(item, {(): document.line_of(("items", index))}) for index, item in enumerate(data["items"])]
    for location, line in document.lines.items():
        if location[:1] == ("items",) and len(location) > 1 and isinstance(location[1], int):
            items[location[1]].lines[location[2:]] = line
    for problem in document.problems:
        found = _ITEM.match(problem.path)
        holder, path = (items[int(found[1])], found[2]) if found else (items[0] if items else document, problem.path)
        holder.problems.append(replace(problem, path=path))
    return items


def _index(node: yaml.Node, location: Location, document: Document) -> None:
    """Record the line of every value below `node`, duplicate keys, and halves of characters."""
    _check_characters(node, location, document)
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        _check_characters(key, location, document)
    for part, line, value in _children(node):
        inner = (*location, part)
        if isinstance(node, yaml.MappingNode) and inner in document.lines and part != "<<":
            message = f"is a duplicate (first in line {document.lines[inner]}); remove one"
            document.problems.append(Problem(format_path(inner), line, message))
        document.lines[inner] = line
        _index(value, inner, document)


def _check_characters(node: yaml.Node, location: Location, document: Document) -> None:
    """Join the halves of characters, which JSON's escapes have (\\ud83d\\ude00). One alone is no text."""
    if not isinstance(node, yaml.ScalarNode) or not _SURROGATE.search(node.value):
        return
    if half := _HALF.search(node.value):
        message = f"contains \\u{ord(half[0]):04x}, half of a character; write the whole character, or remove it"
        document.problems.append(Problem(format_path(location), node.start_mark.line + 1, message))
    node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _children(node: yaml.Node) -> Iterator[tuple[str | int, int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield index, value.start_mark.line + 1, value


def _describe(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        lines = text.splitlines()
        if line <= len(lines) and re.match(r"[ ]*\t", lines[line - 1]):
            return Problem("", line, "the line is indented with a tab; use spaces")
        context = f" {error.context}" if error.context else ""
        return Problem("", line, f"the YAML cannot be read{context}: {error.problem}; check indentation and quotes")
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        return Problem("", line, f"the character U+{error.character:04X} is not allowed in YAML; remove it")
    return Problem("", 1, f"the YAML cannot be read: {error}")
