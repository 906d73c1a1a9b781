"""Breaks the product on purpose and counts what the unit tests notice: `python -m dev.mutants [--number N] [PATH...]`.

Draws changes of single places in the eight packages, or in the files and folders PATH: a comparison, and/or, a
number or a bool, the condition of an `if`, a returned value, a call. For each, runs the test file that mirrors the
module, then the unit tests of its folder. Prints a table, the survivors' differences, and one JSON object last.

Everything happens in a copy of the last commit: the working tree is never changed. With --against REV the tests are
those of REV; an equal seed draws equal mutants, so two runs tell whether a change of tests lost something.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dev.ceiling import PACKAGES, ROOT

LIMIT_SECONDS = 600
"""Seconds that tests may run. A mutant that hangs is killed by it."""
_PAIRS: Any = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
_COMPARISONS = {each: other for pair in _PAIRS for each, other in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """One place of a file, and what stands there instead."""

    kind: str
    path: Path
    line: int
    start: int
    end: int
    """Bytes of the file."""
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def change(node: ast.AST) -> tuple[str, Any, str] | None:
    """Return the kind of a node's mutant, what it replaces, and the text that replaces it."""
    match node:
        case ast.Compare(left=left, ops=[first, *others], comparators=operands):
            operators = [_COMPARISONS[type(first)](), *others]
            return "comparison", node, f"({ast.unparse(ast.Compare(left, operators, operands))})"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            return "and/or", node, f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.Constant(value=bool() | int() | float() as value):
            return "constant", node, str(not value if isinstance(value, bool) else value + 1)
        case ast.If(test=test):
            return "if not", test, f"not ({ast.unparse(test)})"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return "return None", node, "return None"
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            return "deleted call", node, "pass"
    return None


def list_mutants(root: Path, path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = (root / path).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    for node in ast.walk(ast.parse(source)):
        if changed := change(node):
            kind, place, text = changed
            start, end = (
                starts[place.lineno - 1] + place.col_offset,
                starts[place.end_lineno - 1] + place.end_col_offset,
            )
            yield Mutant(kind, path, place.lineno, start, end, text)


def draw(root: Path, paths: list[str], number: int, seed: int) -> list[Mutant]:
    """Return mutants of equal shares of each kind."""
    kinds: dict[str, list[Mutant]] = {}
    for path in sorted(path for name in paths for path in [root / name, *(root / name).rglob("*")]):
        if path.suffix == ".py":
            for mutant in list_mutants(root, path.relative_to(root)):
                kinds.setdefault(mutant.kind, []).append(mutant)
    rng = random.Random(seed)
    for mutants in kinds.values():
        rng.shuffle(mutants)
    return [kinds[kind].pop() for i in range(number) if kinds[kind := sorted(kinds)[i % len(kinds)]]]


def find_tests(root: Path, path: Path) -> dict[str, list[Path]]:
    """Return the test file that mirrors a module, if there is one, and the tests of its folder, or the next above."""
    mirror = root.joinpath("tests/unit", *path.parts[1:-1], f"test_{path.stem.strip('_')}.py")
    folder = next(found for parent in mirror.parents if (found := sorted(parent.glob("test_*.py"))))
    return {"file": [mirror], "folder": folder} if mirror.exists() else {"folder": folder}


def run_tests(copy: Path, tests: list[Path], *options: str) -> bool:
    """Return whether the tests pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *options, "-m", "not slow", *map(str, tests)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(copy / package) for package in PACKAGES),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have the size and the second of the one before
        "HYPOTHESIS_PROFILE": "ci",
    }
    process = subprocess.Popen(
        command, cwd=copy, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return process.wait(LIMIT_SECONDS) in (0, 5)  # 5: there are no tests
    except subprocess.TimeoutExpired:
        return False
    finally:  # nothing of a run stays, whatever ends it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check(copy: Path, mutant: Mutant) -> str:
    """Return which tests notice a mutant: file, folder, or none; or that they fail without it."""
    path = copy / mutant.path
    source = path.read_bytes()
    for name, tests in find_tests(copy, mutant.path).items():
        path.write_bytes(mutant.apply(source))
        passed = run_tests(copy, tests)
        path.write_bytes(source)
        if not passed:
            return name if run_tests(copy, tests, "--last-failed", "--last-failed-no-failures=none") else "broken tests"
    return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the changes of the product that its unit tests notice.")
    parser.add_argument("paths", nargs="*", default=PACKAGES, help="files and folders to change; default: all packages")
    parser.add_argument("--number", type=int, default=100, help="of mutants (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones, which another run checked")
    parser.add_argument("--against", metavar="REV", help="take the tests of this revision")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    counts: Counter[str] = Counter()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)
        if options.against:
            subprocess.run(["git", "rm", "-q", "-r", "tests"], cwd=copy, check=True)
            subprocess.run(["git", "checkout", "-q", options.against, "--", "tests"], cwd=copy, check=True)
        for mutant in draw(copy, options.paths, options.number, options.seed)[options.skip :]:
            noticed_by = check(copy, mutant)
            counts[noticed_by] += 1
            results.append({"place": f"{mutant.path}:{mutant.line}", "kind": mutant.kind, "noticed by": noticed_by})
            print(f"{noticed_by:12} {mutant.kind:12} {mutant.path}:{mutant.line}", flush=True)
            if noticed_by == "none":
                source = (copy / mutant.path).read_bytes()
                old, new = (text.decode().splitlines() for text in (source, mutant.apply(source)))
                print("\n".join(difflib.unified_diff(old, new, n=1, lineterm="")), flush=True)
    print(json.dumps({"seed": options.seed, "noticed by": counts, "mutants": results}))


if __name__ == "__main__":
    main()
