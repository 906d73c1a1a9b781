"""What a worker still sees of the machine's /tmp."""

from __future__ import annotations

import sys

import pytest

from rljob_service.worker.sandbox import find_paths, find_visible
from rljob_service.worker.settings import CODE_MODULE, FunctionSettings

_SCRATCH = "/tmp/rljob-reward-x/workers/1"


def find(**fields: object) -> set[str]:
    given = {"source": "", "path": "/tmp/job/rewards/reward.py", "entrypoint": None, "signature": "auto", "kwargs": {}}
    settings = FunctionSettings(**{**given, "max_memory_bytes": 1, **fields})  # type: ignore[arg-type]
    return set(find_visible(settings, _SCRATCH, "/tmp/rljob-reward-x/workers/modules"))


def test_what_the_job_names_is_visible_with_what_is_next_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/tmp/models/huggingface")
    monkeypatch.setenv("TMPDIR", f"{_SCRATCH}/home")
    found = find(kwargs={"tables": [{"path": "/tmp/tables/a.json"}]}, folders=("/tmp/program",))
    assert {path for path in found if path.startswith("/tmp/")} >= {
        *("/tmp/job", "/tmp/tables", "/tmp/models", "/tmp/program", "/tmp/rljob-reward-x/workers/modules"),
    }
    assert "/tmp/rljob-reward-x" not in found, "not the directories of other workers"
    assert {sys.prefix, sys.base_prefix} <= found


def test_code_of_the_policy_sees_the_interpreter_alone() -> None:
    factory_args = {"provider": "process", "languages": ["python"]}
    found = find(module=CODE_MODULE, factory_args=factory_args)
    assert "/tmp/job" not in found
    assert sys.prefix in found


def test_paths_are_found_in_values_of_any_depth() -> None:
    assert list(find_paths(["/a:/b", {"x": ["/c", 1, None, "d/e"]}])) == ["/a", "/b", "/c"]
