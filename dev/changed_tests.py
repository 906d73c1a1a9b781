"""Print the test files that a change concerns: `python dev/changed_tests.py [--since REV]`.

A changed test concerns itself; a changed module, the tests that import it or a module that imports it directly, and the
process tests of its package; a changed document, example or chart, the tests of that folder.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "rljob_api",
    "rljob_inputs",
    "rljob_core",
    "rljob_operator",
    "rljob_trainer",
    "rljob_service",
    "rljob_plugins",
    "rljob_cli",
    "rljob_cluster",
)
FOLDERS = {
    "docs": {"tests/unit/test_docs.py", "tests/unit/test_docs_pages.py", "tests/unit/dev/test_site.py"},
    "examples": {"tests/unit/examples"},
    "charts": {"tests/process/charts"},
    "crds": {"tests/unit/rljob_api"},
    "dev": {"tests/unit/dev"},
}


def list_changed(since: str) -> list[Path]:
    """Return the files that differ from the common ancestor with `since`, and those that git does not track yet."""
    base = subprocess.run(["git", "merge-base", since, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    revision = base.stdout.strip() or "HEAD"
    names: list[str] = []
    for command in (["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"]):
        names += subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    return [Path(name) for name in names]


def name_module(path: Path) -> str | None:
    """Return the dotted name of a source file, or None for any other file."""
    if path.suffix != ".py" or len(path.parts) < 2 or path.parts[1] not in PACKAGES:
        return None
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


def list_imports(path: Path) -> set[str]:
    """Return the modules that a test imports; of `from a import b`, both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def select_tests(changed: list[Path], graph: grimp.ImportGraph, imports: dict[Path, set[str]]) -> set[str]:
    """Return the test files and folders, relative to the root. `imports` has those of every test."""
    selected = {test for path in changed for test in FOLDERS.get(path.parts[0], ())}
    selected |= {str(path) for path in changed if path in imports}
    modules = {name for path in changed if (name := name_module(path))}
    selected |= {f"tests/process/{name.partition('.')[0]}" for name in modules}
    for name in modules & graph.modules:
        modules = modules | graph.find_modules_that_directly_import(name)
    modules |= {f"tests.support.{path.stem}" for path in changed if path.parts[:2] == ("tests", "support")}
    return selected | {str(path) for path, names in imports.items() if names & modules}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the test files that a change concerns.")
    parser.add_argument("--since", default="origin/main", help="compare with the common ancestor of this revision")
    changed = list_changed(parser.parse_args().since)
    tests = [path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py")]
    selected = select_tests(changed, grimp.build_graph(*PACKAGES), {path: list_imports(ROOT / path) for path in tests})
    print("\n".join(sorted(name for name in selected if (ROOT / name).exists())))


if __name__ == "__main__":
    main()
