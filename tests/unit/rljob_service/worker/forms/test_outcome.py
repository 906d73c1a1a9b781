"""Bounds of what a function may return."""

from __future__ import annotations

from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_service.worker.forms.outcome import BAD_RETURN, read_score


def test_number_of_components_is_bounded() -> None:
    def read(number: int) -> tuple[float | None, int, str | None]:
        found = read_score(1.0, ((str(i), i) for i in range(number)), "a number")
        return found.score, len(found.components), found.reason

    assert read(MAX_COMPONENTS) == (1.0, MAX_COMPONENTS, None)
    assert read(MAX_COMPONENTS + 1) == (None, 0, BAD_RETURN)
