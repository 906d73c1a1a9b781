"""What a release reads of a repository by git, and does in it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from dev.release.checks import Facts, find_last, tag_of
from dev.versions import read_version


def run_git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def read_facts(root: Path) -> Facts:
    tags = run_git(root, "tag").split()
    last = find_last(tags)
    return Facts(
        version=read_version(root),
        branch=run_git(root, "rev-parse", "--abbrev-ref", "HEAD"),
        changed=[line.split(maxsplit=1)[1] for line in run_git(root, "status", "--porcelain").splitlines()],
        tags=tags,
        changelog=(root / "CHANGELOG.md").read_text(),
        is_newest=last is None or _contains(root, tag_of(last)),
    )


def _contains(root: Path, revision: str) -> bool:
    command = ["git", "merge-base", "--is-ancestor", revision, "HEAD"]
    return subprocess.run(command, cwd=root, check=False).returncode == 0


def read_commit(root: Path) -> str:
    return run_git(root, "rev-parse", "HEAD")


def read_time(root: Path) -> str:
    """Return the time of the commit, in seconds."""
    return run_git(root, "show", "-s", "--format=%ct", "HEAD")


def list_tags_of_head(root: Path) -> list[str]:
    return run_git(root, "tag", "--points-at", "HEAD").split()


def clone(root: Path, folder: Path) -> Path:
    """Return a clone of the repository at its HEAD, with its author."""
    run_git(root, "clone", "--quiet", "--local", "--no-tags", str(root), str(folder))
    run_git(folder, "checkout", "--quiet", "-B", "release", read_commit(root))
    for name in ("user.name", "user.email"):
        found = subprocess.run(["git", "config", name], cwd=root, stdout=subprocess.PIPE, text=True, check=False).stdout
        if found.strip():
            run_git(folder, "config", name, found.strip())
    return folder


def commit(root: Path, paths: Sequence[Path], message: str) -> str:
    run_git(root, "add", *map(str, paths))
    run_git(root, "commit", "--quiet", "--no-verify", "--message", message)
    return read_commit(root)


def add_tag(root: Path, name: str, message: str) -> None:
    run_git(root, "tag", "--annotate", name, "--message", message)


def take(root: Path, made: Path, tag: str) -> None:
    """Bring the commits and the tag of a clone into the repository, if nothing was committed meanwhile."""
    run_git(root, "fetch", "--quiet", "--no-tags", str(made), f"refs/tags/{tag}:refs/tags/{tag}", "release")
    try:
        run_git(root, "merge", "--quiet", "--ff-only", "FETCH_HEAD")
    except subprocess.CalledProcessError:
        run_git(root, "tag", "--delete", tag)
        raise
