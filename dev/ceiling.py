"""The size of the product, against dev/ceiling.json: `make verify`, or `python -m dev.ceiling`.

Counted are tokens, files and functions of the packages, and three walks through them (dev/walks.py). A token is a
NAME, OP, NUMBER or STRING of Python's tokenizer, but no docstring: neither style nor comments change the count. What
leaves the packages still counts: tokens of Python in dev/ and cluster/, and words and signs of other text there and in
the packages, are added as far as they grow above `elsewhere`. Ceilings only fall: what adds takes out as much.

    python -m dev.ceiling --lower          lowers each ceiling to what is counted; after a change that deletes

`taken` in the file are lines by which features raised the ceilings: 6.5 tokens, 0.01 files and 0.07 functions each.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "dev/ceiling.json"
PACKAGES = ("api", "cli", "core", "inputs", "operator", "plugins", "reward_image", "trainer_image")
PROGRAMS = ("dev", "cluster")
"""Folders of other Python to which code could move."""
MEASURES = ("tokens", "files", "functions")
_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_WORD = re.compile(r"\w+|[^\w\s]")
_TEXTS = frozenset({".json", ".yaml", ".yml", ".toml", ".jinja", ".j2", ".tpl", ".js", ".css", ".html", ".txt", ".sh"})
_LIBRARIES = frozenset(f"cli/rljob_cli/report/template/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css"))
"""uPlot 1.6.32 as its authors released it: the page embeds it, and nobody here edits it."""
_NOT_COUNTED = _LIBRARIES | {"dev/ceiling.json"}

Counts = dict[str, dict[str, int]]
"""Package -> tokens, files and functions; or walk -> functions and files."""


class Size(NamedTuple):
    packages: Counts
    elsewhere: dict[str, int]
    """Tokens that are not in the packages' Python, by place."""
    walks: Counts


class Ceiling(NamedTuple):
    """The content of the file."""

    total: dict[str, int]
    """Ceilings of all packages together."""
    packages: Counts
    """What each had when the ceilings were set: it names the packages that grew."""
    elsewhere: dict[str, int]
    walks: Counts
    taken: dict[str, int]
    """Lines, by feature."""


def count_source(source: str) -> tuple[int, int]:
    """Return the tokens and the functions of a Python file."""
    texts, num_functions = set[int](), 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_functions += 1
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    is_text = (each.type == tokenize.STRING and each.start[0] in texts for each in found if each.type in _TOKENS)
    return sum(not text for text in is_text), num_functions


def list_files(root: Path) -> list[str]:
    """Return the files that git knows, or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES, *PROGRAMS]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in names if name and (root / name).is_file()})


def measure(root: Path, names: Iterable[str]) -> tuple[Counts, dict[str, int]]:
    """Return the counts of the packages, and the tokens elsewhere."""
    packages: Counts = {package: dict.fromkeys(MEASURES, 0) for package in PACKAGES}
    elsewhere = {**dict.fromkeys(PROGRAMS, 0), "texts": 0}
    for name in names:
        path, folder = root / name, name.partition("/")[0]
        if name in _NOT_COUNTED:
            continue
        if path.suffix == ".py":
            tokens, functions = count_source(path.read_text(encoding="utf-8"))
            if folder in packages:
                for what, number in {"tokens": tokens, "files": 1, "functions": functions}.items():
                    packages[folder][what] += number
            else:
                elsewhere[folder] += tokens
        elif path.suffix in _TEXTS:
            elsewhere["texts"] += len(_WORD.findall(path.read_text(encoding="utf-8")))
    return packages, elsewhere


def add_up(size: Size, ceiling: Ceiling) -> dict[str, int]:
    """Return the counts of all packages, with what has grown elsewhere."""
    total = {what: sum(counts[what] for counts in size.packages.values()) for what in MEASURES}
    grown = {name: number - ceiling.elsewhere.get(name, 0) for name, number in size.elsewhere.items()}
    total["tokens"] += sum(max(0, number) for number in grown.values())
    return total


def find_excess(size: Size, ceiling: Ceiling) -> list[str]:
    """Return a line for each number above its ceiling."""
    found = []
    for what, number in add_up(size, ceiling).items():
        if number > (limit := ceiling.total[what]):
            grown = {name: size.packages[name][what] - ceiling.packages[name][what] for name in size.packages}
            if what == "tokens":
                grown |= {name: size.elsewhere[name] - ceiling.elsewhere.get(name, 0) for name in size.elsewhere}
            names = ", ".join(f"{name} +{more:,}" for name, more in grown.items() if more > 0)
            found.append(f"{what}: at most {limit:,}, got {number:,}; grown since the ceiling was set: {names}")
    for walk, counts in size.walks.items():
        found += [
            f"walk {walk}: at most {limit} {what}, got {number} (python -m dev.walks --list)"
            for what, number in counts.items()
            if number > (limit := ceiling.walks[walk][what])
        ]
    return found


def lower(size: Size, ceiling: Ceiling) -> Ceiling:
    """Return each ceiling as what was counted, where that is less."""
    return ceiling._replace(
        total=_least(ceiling.total, add_up(size, ceiling)),
        packages=size.packages,
        elsewhere=_least(ceiling.elsewhere, size.elsewhere),
        walks={name: _least(counts, size.walks.get(name, counts)) for name, counts in ceiling.walks.items()},
    )


def _least(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: min(number, now.get(name, number)) for name, number in before.items()}


def read(path: Path = FILE) -> Ceiling:
    return Ceiling(**json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dev.ceiling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lower", action="store_true")
    options = parser.parse_args()
    from dev.walks import count_walks

    ceiling, size = read(), Size(*measure(ROOT, list_files(ROOT)), walks=count_walks())
    if options.lower:
        ceiling = lower(size, ceiling)
        FILE.write_text(json.dumps(ceiling._asdict(), indent=2) + "\n", encoding="utf-8")
    if excess := find_excess(size, ceiling):
        raise SystemExit("\n".join(["dev/ceiling.json: the code is larger than its ceiling", *excess]))
    print(json.dumps({"counted": add_up(size, ceiling), "ceiling": ceiling.total, "walks": size.walks}))


if __name__ == "__main__":
    main()
