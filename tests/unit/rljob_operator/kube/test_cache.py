"""The cache under late events, missed deletes, and writes that a LIST does not contain."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_core.kube.resources import BY_KIND
from rljob_operator.kube.cache import MAX_UNMATCHED_WARNINGS, Cache, ObjectKey

DEPLOYMENTS = BY_KIND["Deployment"]
JOB = ObjectKey("RLJob", "ns", "a")


def deployment(version, name="a-rollout", job="a"):
    labels = {"rljob.dev/job": job} if job else {}
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": labels}}


def store_list(cache, resource, namespace, items, version):
    listing = cache.start_list(resource, namespace)
    changed = set().union(*(listing.add([item]) for item in items))
    return changed | listing.finish(version)


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


def test_object_is_returned_whole_and_small_when_stored():
    cache, spec = Cache(), {"template": [{"name": f"VARIABLE_{number}", "value": "1"} for number in range(100)]}
    cache.upsert("Deployment", deployment(9) | {"spec": spec})
    (found,) = cache.owned(JOB)
    assert found["spec"] == spec
    (entry,) = cache._kinds["Deployment"].values()
    assert len(entry.data) < len(json.dumps(spec)) / 4


def test_object_that_is_deeper_than_parsers_take_stops_nothing():
    cache, value = Cache(), {}
    for _ in range(500):
        value = {"a": value}
    cache.upsert("Deployment", deployment(9) | {"spec": value})
    (found,) = cache.owned(JOB)
    assert found["metadata"] == deployment(9)["metadata"]
    assert found["spec"]["a"]["a"]


def test_list_finds_a_missed_delete_and_reports_its_owner():
    cache = Cache()
    cache.upsert("Deployment", deployment(9))
    assert store_list(cache, DEPLOYMENTS, None, [], "10") == {JOB}
    assert cache.owned(JOB) == []


def test_list_keeps_what_was_written_after_it():
    cache = Cache()
    cache.upsert("Deployment", deployment(11))
    store_list(cache, DEPLOYMENTS, None, [], "10")
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
    store_list(cache, DEPLOYMENTS, "other", [], "10")
    assert version_in(cache) == "5"


def test_object_that_is_created_during_a_list_is_kept():
    cache = Cache()
    listing = cache.start_list(DEPLOYMENTS, None)
    cache.upsert("Deployment", deployment(12))
    assert listing.finish("10") == set()
    assert version_in(cache) == "12"


def test_object_that_is_deleted_between_two_pages_stays_deleted():
    for listed_before in (True, False):
        cache = Cache()
        cache.upsert("Deployment", deployment(9))
        listing = cache.start_list(DEPLOYMENTS, None)
        for _ in range(listed_before):
            listing.add([deployment(9)])
        cache.remove("Deployment", deployment(11))
        for _ in range(not listed_before):
            listing.add([deployment(9)])
        listing.finish("10")
        assert version_in(cache) is None


def test_abandoned_list_removes_nothing():
    cache = Cache()
    cache.upsert("Deployment", deployment(9))
    cache.start_list(DEPLOYMENTS, None).add([])
    assert version_in(cache) == "9"


@given(
    before=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9)),
    listed=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 10)),
    events=st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abcd"), st.booleans()), max_size=4).map(sorted),
)
def test_list_with_events_between_its_pages_gives_the_last_state(before, listed, events):
    """Events during a LIST of version 10 are newer than it; each name has the state of its last version."""
    cache = Cache()
    for name, version in before.items():
        cache.upsert("Deployment", deployment(version, name))
    listing, pages = cache.start_list(DEPLOYMENTS, None), [*listed.items()]
    expected = {name: max(version, before.get(name, 0)) for name, version in listed.items()}
    for page in range(5):
        for version, (at, name, is_deleted) in enumerate(events, start=11):
            if at == page:
                change = cache.remove if is_deleted else cache.upsert
                change("Deployment", deployment(version, name))
                expected[name] = max(expected.get(name, 0), version)
        listing.add([deployment(version, name) for name, version in pages[page : page + 1]])
    listing.finish("10")
    for name, is_deleted in {name: is_deleted for _, name, is_deleted in events}.items():
        if is_deleted:
            del expected[name]
    found = {o["metadata"]["name"]: int(o["metadata"]["resourceVersion"]) for o in cache.owned(JOB)}
    assert found == expected


def rljob(version, *models, name="a"):
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"rewards": [{"rewardModelRef": {"name": model}} for model in models]}}


def test_jobs_of_a_reward_model_follow_their_specs():
    cache, judge, math = Cache(), ObjectKey("RewardModel", "ns", "judge"), ObjectKey("RewardModel", "ns", "math")
    cache.upsert("RLJob", rljob(1, "judge", "math"))
    cache.upsert("RLJob", rljob(2, "judge", name="b"))
    other = JOB._replace(name="b")
    assert (cache.jobs_of(judge), cache.jobs_of(math)) == ([JOB, other], [JOB])
    assert cache.models_of(JOB) == {judge, math}
    cache.upsert("RLJob", rljob(3, "judge"))
    assert (cache.jobs_of(judge), cache.jobs_of(math)) == ([JOB, other], [])
    cache.remove("RLJob", rljob(4))
    assert (cache.jobs_of(judge), cache.models_of(JOB)) == ([other], set())


def test_jobs_that_start_from_a_job_follow_their_specs():
    cache, start = Cache(), JOB._replace(name="sums")
    for version, source in enumerate(("job://sums@20", "job://sums", "hf://org/sums"), 1):
        manifest = rljob(version)
        manifest["spec"]["model"] = {"source": source}
        cache.upsert("RLJob", manifest)
        assert cache.jobs_of(start) == ([JOB] if version < 3 else [])
        assert cache.models_of(JOB) == frozenset(), "a job is no RewardModel"


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
        store_list(cache, BY_KIND["Event"], None, listed, "7")
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
