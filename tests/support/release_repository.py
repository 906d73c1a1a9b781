"""A repository with all that a release changes, and without what it only packs: releases of it take a second."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dev import versions
from dev.release import __main__ as command
from dev.release import packages
from dev.release.git import run_git
from tests.paths import CHART, ROOT

DATE = "2026-12-01"


def make_repository(folder: Path) -> Path:
    """Return a repository on main whose changelog has something to release."""
    shutil.copytree(CHART, folder / CHART.relative_to(ROOT))
    for path in versions.find_changes(ROOT, "9.8.7"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n- The first.\n")
    run_git(folder, "init", "--quiet", "--initial-branch", "main")
    for name, value in (("user.name", "A Maintainer"), ("user.email", "maintainer@example.com")):
        run_git(folder, "config", name, value)
    run_git(folder, "add", ".")
    run_git(folder, "commit", "--quiet", "--message", "All")
    return folder


def add_entry(repository: Path, text: str) -> None:
    path = repository / "CHANGELOG.md"
    path.write_text(path.read_text().replace("## Unreleased\n", f"## Unreleased\n- {text}\n"))
    run_git(repository, "commit", "--quiet", "--all", "--message", text)


def leave_out_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels and bills of materials need the whole source; tests/process/wheels and test_release build them."""
    monkeypatch.setattr(packages, "build_wheels", lambda tree, out, seconds: (out / "rljob-0-none.whl").touch())
    monkeypatch.setattr(packages, "write_sboms", lambda tree, out, version: {"operator": {"pyyaml": "6"}})


def run_release(repository: Path, *arguments: str) -> int:
    """Run the command in a repository; return its exit code. What it builds is in the folder `release` next to it."""
    out = ("--out", str(repository.parent / "release"), "--images", "none", "--date", DATE)
    return command.main([*arguments, *out], repository)
