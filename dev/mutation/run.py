"""Mutation check: `python dev/mutation/run.py [--sample N] [NAME...]`.

Breaks the pure cores (targets.yaml) one small change at a time, with the operators of cosmic-ray, and runs their unit
tests against each. Prints the survivors with their lines, then one JSON object with the share that a test noticed.

A mutant exists in the memory of a forked process alone: the working tree is never changed, whatever interrupts the run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

HERE = Path(__file__).parent
# Imported once, before the forks: nothing here may import a target.
PRELOADED = (
    "aiohttp",
    "hypothesis.stateful",
    "pydantic",
    "prometheus_client",
    "torch",
    "yaml",
    "rljob_api.manifest.job",
)
TIMEOUT_FACTOR = 10
MIN_TIMEOUT_SECONDS = 20
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Mutant:
    """One change: the n-th place where an operator applies."""

    operator: str
    occurrence: int
    line: int


class MutantLoader(importlib.machinery.SourceFileLoader):
    """Loads changed source in place of the file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


class MutantFinder:
    """Finds one module by its name and loads it changed."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._module:
            return None
        loader = MutantLoader(name, str(self._path), self._source)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


def find_annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where type annotations start and end, as (line, column): nothing evaluates them."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation]
    found += [
        node.returns for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns
    ]
    return [((a.lineno, a.col_offset), (a.end_lineno or a.lineno, a.end_col_offset or a.col_offset)) for a in found]


def list_mutants(source: str) -> list[Mutant]:
    """Return every change that the operators can make to a source, type annotations left out."""
    tree, annotations = get_ast(source), find_annotations(source)
    found: list[Mutant] = []
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for number, (start, _) in enumerate(places):
            if not any(first <= start < last for first, last in annotations):
                found.append(Mutant(name, number, start[0]))
    return found


def run_tests(tests: list[str]) -> int:
    """Run tests in this process, silently, and return pytest's exit code."""
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", *tests]))


def test_in_fork(module: str, path: Path, source: str, tests: list[str], timeout_seconds: float) -> str:
    """Return survived, killed or timeout for one mutant."""

    def child() -> None:
        os.setsid()
        sys.meta_path.insert(0, MutantFinder(module, path, source))  # type: ignore[arg-type]
        os._exit(run_tests(tests))

    process = _FORK.Process(target=child)
    process.start()
    process.join(timeout_seconds)
    if process.exitcode is not None:
        return "survived" if process.exitcode == 0 else "killed"
    os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    return "timeout"


def check_target(name: str, target: dict[str, Any], sample: int, seed: int) -> dict[str, Any]:
    """Return the counts of one target; print its survivors."""
    path = Path(target["file"]).resolve()
    source, tests = path.read_text(), target["tests"]
    started = time.monotonic()
    if test_in_fork(target["module"], path, source, tests, 600) != "survived":
        raise SystemExit(f"{name}: {' '.join(tests)} fail without a mutant; fix them first")
    timeout_seconds = max(MIN_TIMEOUT_SECONDS, TIMEOUT_FACTOR * (time.monotonic() - started))
    mutants = list_mutants(source)
    chosen = sorted(random.Random(seed).sample(mutants, min(sample, len(mutants))), key=lambda m: m.line)
    counts = {"survived": 0, "killed": 0, "timeout": 0}
    for number, mutant in enumerate(chosen, 1):
        changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
        if changed is None or changed == source:
            continue
        outcome = test_in_fork(target["module"], path, changed, tests, timeout_seconds)
        counts[outcome] += 1
        if outcome == "survived":
            line = source.splitlines()[mutant.line - 1].strip()
            print(f"survived: {name}:{mutant.line} {mutant.operator.removeprefix('core/')}: {line}", flush=True)
        if number % 20 == 0:
            print(f"{name}: {number}/{len(chosen)} {counts}", file=sys.stderr, flush=True)
    total = sum(counts.values())
    noticed = (total - counts["survived"]) / total if total else None
    return {"mutants": len(mutants), "tried": total, **counts, "score": noticed and round(noticed, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the mutants of the pure cores that the unit tests notice.")
    parser.add_argument("names", nargs="*", help="targets; default: all")
    parser.add_argument("--targets", type=Path, default=HERE / "targets.yaml")
    parser.add_argument("--sample", type=int, default=100, help="mutants per target, drawn at random (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["HYPOTHESIS_PROFILE"] = "ci"  # the same examples for every mutant
    sys.dont_write_bytecode = True
    for module in PRELOADED:
        importlib.import_module(module)
    targets = yaml.safe_load(options.targets.read_text())
    results = {
        name: check_target(name, target, options.sample, options.seed)
        for name, target in targets.items()
        if not options.names or name in options.names
    }
    tried = sum(result["tried"] for result in results.values())
    survived = sum(result["survived"] for result in results.values())
    print(json.dumps({"targets": results, "score": round(1 - survived / tried, 3) if tried else None}))


if __name__ == "__main__":
    main()
