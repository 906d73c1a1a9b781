"""What must hold before a release, and before a build of what is published. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from dev.release.changelog import read_section

_RELEASED = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True)
class Facts:
    version: str
    """The one in pyproject.toml."""
    branch: str
    changed: Sequence[str]
    """Files that are not as the last commit has them, and those that git does not know."""
    tags: Collection[str]
    changelog: str
    is_newest: bool
    """HEAD contains the last release."""


def is_released(version: str) -> bool:
    return _RELEASED.fullmatch(version) is not None


def tag_of(version: str) -> str:
    return f"v{version}"


def next_version(version: str) -> str:
    """Return the version of main after a release: between it and the smallest next one."""
    major, minor, patch = version.split(".")
    return f"{major}.{minor}.{int(patch) + 1}.dev0"


def find_last(tags: Collection[str]) -> str | None:
    """Return the version of the last release; None if there is none."""
    versions = [tag[1:] for tag in tags if tag.startswith("v") and is_released(tag[1:])]
    return max(versions, key=Version, default=None)


def find_problems(facts: Facts, version: str) -> list[str]:
    """Return what keeps this version from being released, each with the remedy."""
    if not is_released(version):
        return [f"VERSION must be three numbers such as 0.2.0, got {version!r}"]
    return list(_list_problems(facts, version))


def _list_problems(facts: Facts, version: str) -> Iterator[str]:
    if facts.changed:
        some = ", ".join(facts.changed[:5])
        yield f"{len(facts.changed)} files are not committed ({some}): commit, stash or remove them"
    if facts.branch not in ("main", "master") and not facts.branch.startswith("release-"):
        yield f"the branch is {facts.branch}: release from main, or from a branch release-X.Y for a fix of it"
    last = find_last(facts.tags)
    if last and Version(version) <= Version(last):
        yield f"{version} is not above the last release, {last}: choose a greater version"
    if last and not facts.is_newest:
        yield f"this commit does not contain {tag_of(last)}: merge it first"
    if Version(version) < Version(facts.version):
        yield f"{version} is below {facts.version} of pyproject.toml: choose a greater version"
    if not read_section(facts.changelog, "Unreleased"):
        yield "CHANGELOG.md has nothing below `## Unreleased`: write what users see of this release"
    if read_section(facts.changelog, version):
        yield f"CHANGELOG.md has a section {version} already: choose another version"


def find_build_version(facts: Facts, commit: str, tags_of_head: Collection[str]) -> str:
    """Return the version that a build of this commit has; raise ValueError if it may have none.

    A build of main has the commit in its version. Only the commit with the tag of a release has the release's.
    """
    if facts.changed:
        raise ValueError(f"{', '.join(facts.changed[:5])}: not committed; a build is of one commit")
    if not is_released(facts.version):
        return f"{facts.version}+g{commit[:12]}"
    if tag_of(facts.version) in tags_of_head:
        return facts.version
    raise ValueError(
        f"pyproject.toml says {facts.version}, and {tag_of(facts.version)} is not the tag of this commit: only a "
        f"release has its version; set {next_version(facts.version)} and run `make generate`"
    )
