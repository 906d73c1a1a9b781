"""What the program of a rollout sets before it imports torch."""

from __future__ import annotations

import os
import runpy
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "1000"), ("7", "7")])
def test_waiting_threads_of_openmp_do_not_spin_for_milliseconds(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    found: list[str | None] = []

    class Server:
        def __getattr__(self, name: str) -> object:
            found.append(os.environ.get("GOMP_SPINCOUNT"))  # when it is imported, and with it torch
            return lambda: 0

    monkeypatch.setitem(sys.modules, "rljob_trainer.rollout.server", Server())  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        runpy.run_module("rljob_trainer.rollout", run_name="__main__")
    assert found[-1] == expected
