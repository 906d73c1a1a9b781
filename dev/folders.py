"""Write the tables of packages and folders: `python -m dev.folders [--check]`.

CONTRIBUTING.md lists the packages, and their folders in the order of the import contracts of pyproject.toml.
What a folder contains is the first paragraph of its docstring, so the tables cannot be wrong.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljob_api.generate.__main__ import write_files

ROOT = Path(__file__).resolve().parents[1]
_END = "<!-- end -->"


def find_packages() -> dict[str, Path]:
    """Return the folder of each package of the workspace, by name."""
    members = _read_toml(ROOT / "pyproject.toml")["tool"]["uv"]["workspace"]["members"]
    return {path.name: path for member in members for path in sorted((ROOT / member).glob("rljob_*"))}


def render_packages() -> str:
    """Return a row for each package: what it contains, and which others it may import."""
    lines = ["| package | contains | imports |", "|---|---|---|"]
    for path in find_packages().values():
        given = _read_toml(path.parent / "pyproject.toml")["project"]["dependencies"]
        imports = ", ".join(match[1] for each in given if (match := re.match(r"rljob-(\w+)", each)))
        lines.append(f"| `{path.relative_to(ROOT)}` | {_describe(path)} | {imports} |")
    return "\n".join(lines)


def render_folders() -> str:
    """Return a table for each package, with its folders and loose modules from the top layer to the bottom."""
    return "\n\n".join("\n".join(_render_package(name, path)) for name, path in find_packages().items())


def _render_package(name: str, path: Path) -> Iterator[str]:
    yield f"**{name}**: {_lower(_describe(path))}\n"
    yield "| folder or module | contains |"
    yield "|---|---|"
    for layer in _read_layers(name):
        for room in (each.strip() for each in layer.split("|")):
            place = path / room if is_code(path / room) else path / f"{room}.py"
            yield f"| `{room}` | {_describe(place)} |"


def _read_layers(name: str) -> list[str]:
    contracts = _read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    for each in contracts:
        if each.get("containers") == [name]:
            return each["layers"]  # type: ignore[no-any-return]
    return sorted(
        child.stem for child in find_packages()[name].iterdir() if child.stem[0] not in "_." and is_code(child)
    )


def is_code(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").exists()


def _describe(place: Path) -> str:
    """Return the first paragraph of a docstring as one line without its final period."""
    file = place / "__init__.py" if place.is_dir() else place
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} needs a docstring: it becomes a row of a table")
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".").replace("|", "\\|")


def _lower(text: str) -> str:
    return text if text[:2].isupper() or text.startswith("RLJob") else text[0].lower() + text[1:]


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def replace(page: str, name: str, table: str) -> str:
    """Return the page with `table` between the marker with this name and the next end marker."""
    begin = f"<!-- {name}: `make generate` -->"
    before, found, rest = page.partition(begin)
    assert found, name
    _, found, after = rest.partition(_END)
    assert found, name
    return f"{before}{begin}\n{table}\n{_END}{after}"


def main(arguments: list[str]) -> int:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    page = replace(page, "packages", render_packages())
    page = replace(page, "folders", render_folders())
    return write_files({ROOT / "CONTRIBUTING.md": page}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
