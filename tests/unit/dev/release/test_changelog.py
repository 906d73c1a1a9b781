"""Sections of the changelog, and how a release changes the first one."""

from dev.release.changelog import close_unreleased, read_section

TEXT = """# Changelog

About it.

## Unreleased
- Two.
- One.

## 0.1.0 - 2026-11-22
- Zero.

### Fixed
- A bug.
"""


def test_a_section_ends_where_the_next_begins():
    assert read_section(TEXT, "Unreleased") == "- Two.\n- One."
    assert read_section(TEXT, "0.1.0") == "- Zero.\n\n### Fixed\n- A bug."
    assert read_section(TEXT, "0.2.0") == ""
    assert read_section(TEXT.replace("0.1.0", "0.10"), "0.1") == "", "another version"


def test_a_release_gets_what_was_unreleased_and_leaves_an_empty_section():
    closed = close_unreleased(TEXT, "0.2.0", "2026-12-01")
    assert read_section(closed, "0.2.0") == "- Two.\n- One."
    assert read_section(closed, "Unreleased") == ""
    assert "## Unreleased\n\n## 0.2.0 - 2026-12-01\n- Two." in closed
    assert closed.endswith(TEXT[TEXT.index("## 0.1.0") :])
