"""What keeps a version from being released, and which version a build has."""

from dataclasses import replace

import pytest
from packaging.version import Version

from dev.release.checks import Facts, find_build_version, find_problems, next_version

FACTS = Facts(
    version="0.2.0.dev0",
    branch="main",
    changed=(),
    tags=("v0.1.0", "v0.1.9", "v0.1.10", "nightly"),
    changelog="## Unreleased\n- New.\n\n## 0.1.10 - 2026-11-22\n- Old.\n",
    is_newest=True,
)


def test_a_clean_main_with_entries_is_released():
    assert find_problems(FACTS, "0.2.0") == []
    assert find_problems(replace(FACTS, branch="release-0.2"), "0.2.0") == []
    assert find_problems(replace(FACTS, tags=()), "0.2.0") == [], "the first"


@pytest.mark.parametrize(
    ("facts", "version", "problem"),
    [
        (FACTS, "0.2", "three numbers"),
        (FACTS, "v0.2.0", "three numbers"),
        (FACTS, "0.2.0.dev0", "three numbers"),
        (replace(FACTS, changed=["a.py", "b.py"]), "0.2.0", "a.py, b.py"),
        (replace(FACTS, branch="feature"), "0.2.0", "release from main"),
        (replace(FACTS, version="0.1.10.dev0"), "0.1.10", "not above the last release, 0.1.10"),
        (replace(FACTS, version="0.1.9.dev0"), "0.1.9", "not above the last release, 0.1.10"),
        (replace(FACTS, is_newest=False), "0.2.0", "does not contain v0.1.10"),
        (replace(FACTS, version="0.3.0.dev0"), "0.2.0", "below 0.3.0.dev0"),
        (replace(FACTS, changelog="## Unreleased\n\n## 0.1.10\n- Old.\n"), "0.2.0", "nothing below"),
        (replace(FACTS, changelog=FACTS.changelog + "## 0.2.0\n- Twice.\n"), "0.2.0", "section 0.2.0 already"),
    ],
)
def test_what_keeps_a_version_from_being_released_is_named(facts, version, problem):
    assert any(problem in found for found in find_problems(facts, version))


def test_all_problems_are_named_at_once():
    assert len(find_problems(replace(FACTS, branch="x", changed=["a"], is_newest=False), "0.2.0")) == 3


def test_a_build_of_main_never_has_the_version_of_a_release():
    assert find_build_version(FACTS, "1a2b3c4d5e6f7890", ()) == "0.2.0.dev0+g1a2b3c4d5e6f"
    released = replace(FACTS, version="0.2.0")
    assert find_build_version(released, "1a2b", ["v0.2.0"]) == "0.2.0"
    with pytest.raises(ValueError, match=r"v0\.2\.0 is not the tag of this commit.*set 0\.2\.1\.dev0"):
        find_build_version(released, "1a2b", ["v0.1.0"])
    with pytest.raises(ValueError, match=r"a\.py: not committed"):
        find_build_version(replace(FACTS, changed=["a.py"]), "1a2b", ())


def test_the_version_after_a_release_is_between_it_and_the_next():
    assert Version("0.2.9") < Version(next_version("0.2.9")) < Version("0.2.10")
