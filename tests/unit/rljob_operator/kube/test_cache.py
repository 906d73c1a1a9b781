"""The cache against what watches really do: late events, missed deletes, writes that a LIST has not seen."""

from rljob_operator.kube.cache import Cache, OwnerKey
from rljob_operator.kube.resources import BY_KEY

DEPLOYMENTS = BY_KEY["Deployment"]
JOB = OwnerKey("RLJob", "ns", "a")


def deployment(version, name="a-rollout"):
    labels = {"rljob.dev/job": "a"}
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": labels}}


def version_in(cache):
    found = cache.get("Deployment", "ns", "a-rollout")
    return found and found["metadata"]["resourceVersion"]


def test_an_older_version_never_replaces_a_newer_one():
    cache = Cache()
    assert cache.upsert("Deployment", deployment(10)) == JOB
    assert cache.upsert("Deployment", deployment(9)) is None
    assert version_in(cache) == "10"


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
    assert cache.remove("Deployment", deployment(7)) == JOB
    cache.upsert("Deployment", deployment(6))
    assert version_in(cache) is None
    cache.upsert("Deployment", deployment(8))
    assert version_in(cache) == "8", "made anew"


def test_a_list_of_one_namespace_leaves_the_others_alone():
    cache = Cache()
    cache.upsert("Deployment", deployment(5))
    cache.replace(DEPLOYMENTS, "other", [], "10")
    assert version_in(cache) == "5"
