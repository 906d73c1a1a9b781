"""The fields of a manifest that name files of this machine, and what the files contain.

A relative path is a file of this machine, as for `rljob run`. An absolute path is a path in the Pods, as everywhere on
a cluster, and stays unchanged.
"""

import ast
import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rljob_api.errors import UserError
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.manifest.services.user import USER_SERVICE
from rljob_api.manifest.sources import parse_source
from rljob_api.read.documents import Location, format_path

MAX_SMALL_BYTES = 900 * 1024
"""Limit of all files in one ConfigMap, which may have 1 MiB with its metadata."""
_SCORERS: tuple[tuple[Location, str], ...] = (
    (("function", "file"), "function"),
    (("model", "source"), "model"),
    (("judge", "model", "source"), "model"),
    (("teacher", "model", "source"), "model"),
)


@dataclass(frozen=True)
class LocalSource:
    """A field with a relative path."""

    location: Location
    path: str
    """As written."""
    kind: Literal["function", "program", "data", "model"]
    """program: the folder of a command."""
    label: str
    """Names its copy: model, train, eval, or the name of the reward, the simulated user, the tool or the runner."""

    @property
    def field(self) -> str:
        return format_path(self.location)


@dataclass(frozen=True)
class File:
    name: str
    """Below the folder that was given, or the file's own name; with slashes."""
    path: Path
    num_bytes: int
    content: bytes | None
    """None: too large for a ConfigMap."""
    modified_ns: int = 0


@dataclass(frozen=True)
class Tree:
    """A file, or all files of a folder in the order of their names. A function comes with the files it imports."""

    name: str
    is_folder: bool
    files: tuple[File, ...]
    """The files of a function: its own first, and names that start at its folder."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Identify the contents by names, sizes and times, because large models take minutes to read."""
        found = [(file.name, file.num_bytes, file.modified_ns) for file in self.files]
        return hashlib.sha256(repr((self.name, found)).encode()).hexdigest()[:12]


def get_value(manifest: Any, location: Location) -> Any:
    """Return the value at a location; None if there is none."""
    for part in location:
        if isinstance(manifest, dict):
            manifest = manifest.get(part)
        elif isinstance(manifest, list) and isinstance(part, int) and part < len(manifest):
            manifest = manifest[part]
        else:
            return None
    return manifest


def find_sources(manifest: dict[str, Any]) -> list[LocalSource]:
    """Return the local sources of an RLJob or a RewardModel, which must be valid."""
    return [source for source in _list_sources(manifest) if parse_source(source.path).kind == "relative"]


def _list_sources(manifest: dict[str, Any]) -> Iterator[LocalSource]:
    name = manifest["metadata"]["name"]
    if manifest["kind"] == "RewardModel":
        yield from _list_scorers(manifest, ("spec",), name)
        return
    if path := get_value(manifest, ("spec", "model", "source")):
        yield LocalSource(("spec", "model", "source"), path, "model", "model")
    mix = get_value(manifest, ("spec", "data", "mix")) or []
    sets = get_value(manifest, ("spec", "evaluation", "sets")) or []
    data: list[tuple[Location, str]] = [(("spec", "data", split, "source"), split) for split in ("train", "eval")]
    data += [(("spec", "data", "mix", index, "source"), f"mix-{each['name']}") for index, each in enumerate(mix)]
    data += [
        (("spec", "evaluation", "sets", index, "data", "source"), f"eval-{each['name']}")
        for index, each in enumerate(sets)
    ]
    for location, label in data:
        if path := get_value(manifest, location):
            yield LocalSource(location, path, "data", label)
    for index, reward in enumerate(manifest["spec"].get("rewards") or []):
        yield from _list_scorers(manifest, ("spec", "rewards", index), reward["name"])
    yield from _list_agent(manifest)


def _list_agent(manifest: dict[str, Any]) -> Iterator[LocalSource]:
    """Yield the functions of the simulated user, of the tools and of the runner, the user's model, and the folder of
    the runner's command."""
    agent = manifest["spec"].get("agent") or {}
    parents: list[tuple[Location, str]] = [(("user",), USER_SERVICE), (("runner",), RUNNER_SERVICE)]
    parents += [(("tools", index), tool["name"]) for index, tool in enumerate(agent.get("tools") or [])]
    for parent, name in parents:
        location = ("spec", "agent", *parent, "function", "file")
        if path := get_value(manifest, location):
            yield LocalSource(location, path, "function", name)
    location = ("spec", "agent", "user", "model", "model", "source")
    if path := get_value(manifest, location):
        yield LocalSource(location, path, "model", USER_SERVICE)
    location = ("spec", "agent", "runner", "workingDir")
    if path := get_value(manifest, location):
        yield LocalSource(location, path, "program", RUNNER_SERVICE)


def _list_scorers(manifest: dict[str, Any], parent: Location, label: str) -> Iterator[LocalSource]:
    for location, kind in _SCORERS:
        if path := get_value(manifest, (*parent, *location)):
            yield LocalSource((*parent, *location), path, "function" if kind == "function" else "model", label)


def read_tree(source: LocalSource, folder: Path, job_file: Path | None = None) -> Tree:
    """Read a source, whose path starts at `folder`. Raise UserError if it is missing, or a folder for a function. Of a
    program, hidden files stay here: they may have secrets. So does the job's file, whose changes would replace Pods."""
    path = (folder / source.path).resolve()
    if not path.exists():
        if source.kind == "data" and glob.has_magic(source.path):
            return _read_matching(source, path)
        raise UserError(f"{source.field}: {path} not found; correct the path")
    if path.is_file() and source.kind == "program":
        raise UserError(f"{source.field}: {path} is a file; set its folder, and name the file in command")
    if path.is_file():
        found, folder = find_imported_files(path) if source.kind == "function" else ([path], path.parent)
        read = tuple(_read_file(str(PurePosixPath(f.relative_to(folder))), f) for f in found)
        return Tree(read[0].name, False, read)
    if source.kind == "function":
        raise UserError(f"{source.field}: {path} is a folder; set a Python file")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if source.kind == "program":
        own = job_file.resolve() if job_file else None
        parts = {file: file.relative_to(path).parts for file in files if file != own}
        files = [file for file in parts if not any(part[0] == "." or part == "__pycache__" for part in parts[file])]
    if not files:
        raise UserError(f"{source.field}: {path} is empty; correct the path")
    return Tree(path.name, True, tuple(_read_file(str(PurePosixPath(f.relative_to(path))), f) for f in files))


def _read_matching(source: LocalSource, pattern: Path) -> Tree:
    """Read the files of a glob. On the cluster their folder has no others."""
    folder = pattern.parent
    if glob.has_magic(str(folder)):
        raise UserError(f"{source.field}: {pattern} matches files of several folders; copy them into one, and name it")
    files = sorted(file for file in map(Path, glob.glob(str(pattern))) if file.is_file())
    if not files:
        raise UserError(f"{source.field}: no file matches {pattern}; correct the path")
    return Tree(folder.name, True, tuple(_read_file(file.name, file) for file in files))


def find_imported_files(path: Path) -> tuple[list[Path], Path]:
    """Return a Python file with the modules and packages of its folder, or of its own package, that it imports,
    directly or not; and the folder that all are in."""
    top, is_packaged = path.parent, (path.parent / "__init__.py").is_file()
    while (top / "__init__.py").is_file() or (top == path.parent and any(level for level, _ in _list_imports(path))):
        top = top.parent
    inits = [folder / "__init__.py" for folder in path.parents if folder.is_relative_to(top) and folder != top]
    found = [path, *(file for file in inits if file.is_file() and file != path)]
    pending = [*found]
    while pending:
        file = pending.pop()
        for level, name in _list_imports(file):
            for folder in [file.parents[level - 1]] if level else [path.parent, *([top] if is_packaged else [])]:
                package = folder / name
                files = [folder / f"{name}.py"] if not package.is_dir() else sorted(package.rglob("*.py"))
                new = [each for each in files if each.is_file() and each not in found]
                found += new
                pending += new
    return found, top


def _list_imports(path: Path) -> set[tuple[int, str]]:
    """Return the number of dots and the first name of each import; none if the file is not valid Python, which others
    report."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    found = [(0, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name) for name in names]
    return {(level, name.partition(".")[0]) for level, name in found}


def _read_file(name: str, path: Path) -> File:
    status = path.stat()  # follows links, which the cache of Hugging Face consists of
    content = path.read_bytes() if status.st_size <= MAX_SMALL_BYTES else None
    return File(name, path, status.st_size, content, status.st_mtime_ns)
