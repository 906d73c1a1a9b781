"""Write the table of the chart's values into its README: `python -m dev.values_table [--check]`.

The source is values.yaml: a value's meaning is the comment above it that begins with `# --`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping

import yaml

from dev.folders import ROOT, replace
from rljob_api.generate.__main__ import write_files

CHART = ROOT / "charts/rljob"


def render(text: str) -> str:
    """Return a row for each value. Those without a meaning of their own are a part of the one above them."""
    lines = text.splitlines()
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    rows = [f"| `{path}` | {default} | {meaning} |" for path, default, meaning in _list_rows("", document, lines)]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


def _list_rows(prefix: str, mapping: yaml.Node, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, node in mapping.value:
        path, meaning = f"{prefix}{key.value}", _find_meaning(lines, key.start_mark.line)
        if isinstance(node, yaml.MappingNode) and _has_meanings(node, lines):
            if meaning:
                yield path, "", meaning
            yield from _list_rows(f"{path}.", node, lines)
        else:
            yield path, _show(node), meaning


def _has_meanings(mapping: yaml.MappingNode, lines: list[str]) -> bool:
    if mapping.flow_style:
        return False
    return any(
        _find_meaning(lines, key.start_mark.line) or (isinstance(node, yaml.MappingNode) and _has_meanings(node, lines))
        for key, node in mapping.value
    )


def _find_meaning(lines: list[str], line: int) -> str:
    """Return the comment directly above a line, from its `# --` on; empty if there is none."""
    found: list[str] = []
    for text in reversed(lines[:line]):
        comment = re.fullmatch(r"\s*#(?: (--))? ?(.*)", text)
        if not comment:
            return ""
        found.insert(0, comment[2])
        if comment[1]:
            return " ".join(found).replace("|", "\\|").replace("<", "&lt;")
    return ""


def _show(node: yaml.Node) -> str:
    value = yaml.SafeLoader("").construct_document(node)
    return f"`{json.dumps(value)}`" if isinstance(value, Mapping | list | str) else f"`{node.value}`"


def main(arguments: list[str]) -> int:
    readme = CHART / "README.md"
    table = render((CHART / "values.yaml").read_text())
    return write_files({readme: replace(readme.read_text(), "values", table)}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
