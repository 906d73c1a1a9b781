"""The cache against what watches really do: late events, missed deletes, writes that a LIST has not seen."""

import pytest

from rljob_operator.kube.cache import MAX_EARLY_WARNINGS, Cache, OwnerKey
from rljob_operator.kube.resources import BY_KEY

DEPLOYMENTS = BY_KEY["Deployment"]
JOB = OwnerKey("RLJob", "ns", "a")


def deployment(version, name="a-rollout", job="a"):
    labels = {"rljob.dev/job": job} if job else {}
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": labels}}


def version_in(cache):
    found = cache.get("Deployment", "ns", "a-rollout")
    return found and found["metadata"]["resourceVersion"]


def test_an_older_version_never_replaces_a_newer_one():
    cache = Cache()
    assert cache.upsert("Deployment", deployment(10)) == {JOB}
    assert cache.upsert("Deployment", deployment(9)) == set()
    assert version_in(cache) == "10"


@pytest.mark.parametrize("job", ["b", ""])
def test_an_object_whose_label_was_edited_names_the_job_that_lost_it_too(job):
    cache = Cache()
    cache.upsert("Deployment", deployment(9))
    named = cache.upsert("Deployment", deployment(10, job=job))
    assert named == {JOB} | ({OwnerKey("RLJob", "ns", job)} if job else set())
    assert cache.owned(JOB) == []


def test_a_list_finds_a_missed_delete_and_names_its_job():
    cache = Cache()
    cache.upsert("Deployment", deployment(9))
    assert cache.replace(DEPLOYMENTS, None, [], "10") == {JOB}
    assert cache.owned(JOB) == []


def test_a_list_drops_nothing_that_was_written_after_it():
    cache = Cache()
    cache.upsert("Deployment", deployment(11))
    cache.replace(DEPLOYMENTS, None, [], "10")
    assert version_in(cache) == "11"


def test_the_echo_of_a_write_does_not_bring_a_deleted_object_back():
    cache = Cache()
    cache.upsert("Deployment", deployment(5))
    assert cache.remove("Deployment", deployment(7)) == {JOB}
    cache.upsert("Deployment", deployment(6))
    assert version_in(cache) is None
    cache.upsert("Deployment", deployment(8))
    assert version_in(cache) == "8", "made anew"


def test_a_list_of_one_namespace_leaves_the_others_alone():
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


def test_a_warning_that_comes_before_its_pod_is_kept_until_the_pod_comes():
    cache = Cache()
    assert cache.upsert("Event", warning(5)) == set()
    assert cache.upsert("Pod", pod(4)) == {JOB}
    assert warnings_in(cache) == ["why"]


def test_an_early_warning_outlives_a_list_that_has_it_and_not_one_that_lacks_it():
    for listed, expected in (([warning(5)], ["why"]), ([], [])):
        cache = Cache()
        cache.upsert("Event", warning(5))
        cache.replace(BY_KEY["Event"], None, listed, "7")
        cache.upsert("Pod", pod(4))
        assert warnings_in(cache) == expected


def test_an_early_warning_that_is_deleted_is_forgotten():
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


def test_early_warnings_are_bounded_and_those_of_strangers_come_to_nobody():
    cache = Cache()
    for number in range(MAX_EARLY_WARNINGS + 1):
        cache.upsert("Event", warning(5, about=f"other-{number}", name=f"why-{number}"))
    cache.upsert("Event", warning(5, about="node", kind="Node"))
    assert len(cache._early) == MAX_EARLY_WARNINGS
    cache.upsert("Pod", pod(4, name="other-0"))
    assert warnings_in(cache) == [], "the oldest had to go"
    cache.upsert("Pod", pod(4, name="other-7", labels=False))
    assert warnings_in(cache) == []
    assert len(cache) == 2
