"""The cache under late events, missed deletes, and writes that a LIST does not contain."""

import pytest

from rljob_operator.kube.cache import MAX_UNMATCHED_WARNINGS, Cache, ObjectKey
from rljob_operator.kube.resources import BY_KEY

DEPLOYMENTS = BY_KEY["Deployment"]
JOB = ObjectKey("RLJob", "ns", "a")


def deployment(version, name="a-rollout", job="a"):
    labels = {"rljob.dev/job": job} if job else {}
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": labels}}


def version_in(cache):
    found = cache.get("Deployment", "ns", "a-rollout")
    return found and found["metadata"]["resourceVersion"]


def test_older_version_never_replaces_a_newer_one():
    cache = Cache()
    assert cache.upsert("Deployment", deployment(10)) == {JOB}
    assert cache.upsert("Deployment", deployment(9)) == set()
    assert version_in(cache) == "10"


@pytest.mark.parametrize("job", ["b", ""])
def test_changed_label_reports_the_previous_owner_too(job):
    cache = Cache()
    cache.upsert("Deployment", deployment(9))
    named = cache.upsert("Deployment", deployment(10, job=job))
    assert named == {JOB} | ({ObjectKey("RLJob", "ns", job)} if job else set())
    assert cache.owned(JOB) == []


def test_list_finds_a_missed_delete_and_reports_its_owner():
    cache = Cache()
    cache.upsert("Deployment", deployment(9))
    assert cache.replace(DEPLOYMENTS, None, [], "10") == {JOB}
    assert cache.owned(JOB) == []


def test_list_keeps_what_was_written_after_it():
    cache = Cache()
    cache.upsert("Deployment", deployment(11))
    cache.replace(DEPLOYMENTS, None, [], "10")
    assert version_in(cache) == "11"


def test_late_event_does_not_restore_a_deleted_object():
    cache = Cache()
    cache.upsert("Deployment", deployment(5))
    assert cache.remove("Deployment", deployment(7)) == {JOB}
    cache.upsert("Deployment", deployment(6))
    assert version_in(cache) is None
    cache.upsert("Deployment", deployment(8))
    assert version_in(cache) == "8", "recreated"


def test_list_of_one_namespace_keeps_the_others():
    cache = Cache()
    cache.upsert("Deployment", deployment(5))
    cache.replace(DEPLOYMENTS, "other", [], "10")
    assert version_in(cache) == "5"


def pod(version, name="a-head-x", labels=True):
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version)}
    return {"metadata": metadata | ({"labels": {"rljob.dev/job": "a"}} if labels else {})}


def warning(version, about="a-head-x", name="why", kind="Pod"):
    involved = {"kind": kind, "namespace": "ns", "name": about}
    return {
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)},
        "involvedObject": involved,
        "lastTimestamp": f"2026-01-01T00:00:{version:02}Z",
    }


def warnings_in(cache):
    return [o["metadata"]["name"] for o in cache.owned(JOB) if o["kind"] == "Event"]


def test_warning_that_precedes_its_pod_is_kept_until_the_pod_is_known():
    cache = Cache()
    assert cache.upsert("Event", warning(5)) == set()
    assert cache.upsert("Pod", pod(4)) == {JOB}
    assert warnings_in(cache) == ["why"]


def test_unmatched_warning_survives_only_a_list_that_contains_it():
    for listed, expected in (([warning(5)], ["why"]), ([], [])):
        cache = Cache()
        cache.upsert("Event", warning(5))
        cache.replace(BY_KEY["Event"], None, listed, "7")
        cache.upsert("Pod", pod(4))
        assert warnings_in(cache) == expected


def test_deleted_unmatched_warning_is_removed():
    cache = Cache()
    cache.upsert("Event", warning(5))
    cache.upsert("Event", warning(6, name="newer"))
    cache.remove("Event", warning(7))
    cache.upsert("Pod", pod(4))
    assert warnings_in(cache) == ["newer"]
    cache = Cache()
    cache.upsert("Event", warning(5))
    cache.remove("Event", warning(7))
    cache.upsert("Pod", pod(4))
    assert warnings_in(cache) == []


def test_unmatched_warnings_are_bounded_and_need_an_owner():
    cache = Cache()
    for number in range(MAX_UNMATCHED_WARNINGS + 1):
        cache.upsert("Event", warning(5, about=f"other-{number}", name=f"why-{number}"))
    cache.upsert("Event", warning(5, about="node", kind="Node"))
    assert len(cache._unmatched) == MAX_UNMATCHED_WARNINGS
    cache.upsert("Pod", pod(4, name="other-0"))
    assert warnings_in(cache) == [], "the oldest was removed"
    cache.upsert("Pod", pod(4, name="other-7", labels=False))
    assert warnings_in(cache) == []
