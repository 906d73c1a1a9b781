from __future__ import annotations

from typing import Any

import pytest

from rljob_cli.cluster.other_versions import find_unknown_fields, parse_status

SINCE = "2026-01-01T23:48:00Z"
CONDITION = {"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": SINCE}
STATUS = {
    "phase": "Running",
    "conditions": [CONDITION],
    "roles": [{"name": "head", "desired": 1, "ready": 1}, {"name": "trainer", "desired": 2, "ready": 1}],
    "progress": {
        "step": 412,
        "totalSteps": 1000,
        "reward": 0.731,
        "schedule": {"type": "bounded", "staleness": 1},
        "hung": [{"role": "trainer", "name": "rank 3", "since": SINCE, "limitSeconds": 60}],
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All objects of a status, where a newer operator may add a field."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [place for key, each in items for place in places(each, (*path, key))]
    return [path, *below] if isinstance(value, dict) else below


def changed(value: Any, path: tuple[Any, ...], key: str, new: Any) -> Any:
    if not path:
        return {**value, key: new}
    first, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[first] = changed(value[first], tuple(rest), key, new)
    return copy


@pytest.mark.parametrize("place", places(STATUS), ids=str)
def test_unknown_field_anywhere_costs_no_other_field(place: tuple[Any, ...]) -> None:
    newer = changed(STATUS, place, "novelty", {"a": [1]})
    assert parse_status({"status": newer}) == parse_status({"status": STATUS})


@pytest.mark.parametrize(
    ("place", "key", "value", "lost"),
    [
        ((), "phase", "Paused", "phase"),
        (("conditions", 0), "status", "Maybe", "conditions"),
        (("roles", 1), "desired", "many", "roles"),
        (("progress", "hung", 0), "since", "yesterday", "progress"),
        ((), "progress", "none", "progress"),
    ],
)
def test_unreadable_value_costs_no_field_beside_it(place: tuple[Any, ...], key: str, value: Any, lost: str) -> None:
    expected = parse_status({"status": STATUS}).model_dump(exclude={lost})
    found = parse_status({"status": changed(STATUS, place, key, value)})
    assert found.model_dump(exclude={lost}) == expected
    if key == "since":
        assert (found.progress.step, found.progress.hung) == (412, [])


def test_fields_that_this_version_does_not_know_are_named() -> None:
    spec = {"model": {"source": "/m", "novelty": 1}, "data": {"train": {"source": "/d"}}, "rewards": []}
    spec["rewards"] = [{"name": "a", "http": {"url": "http://r"}}]
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
    assert find_unknown_fields(job) == ["spec.model.novelty"]
