"""Regular expressions of judges are RE2's."""

from __future__ import annotations

import pytest

from rljob_api.manifest.services.models import compile_judge_regex


@pytest.mark.parametrize("pattern", ["(?=a)(b)", r"(a)\1", "(", r"(\d)\Z"])
def test_what_re2_cannot_match_is_refused_with_the_syntax(pattern: str) -> None:
    with pytest.raises(ValueError, match="RE2 has neither look-around nor back-references"):
        compile_judge_regex(pattern)


def test_named_groups_are_found() -> None:
    assert compile_judge_regex(r"(\w+): (?P<score>-?\d+)").search("so: -3")["score"] == "-3"
