"""Claims against an API server in memory: found or made once, waited for, expired, deleted."""

from __future__ import annotations

import shutil
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import certifi
import pytest

from rljob_service.worker.code import agent_sandbox
from rljob_service.worker.code.agent_sandbox import ClaimError, Claims, InClusterApi, build_name

POOL = "job-agent-code"
BASE = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/team"
NAME = build_name(POOL, "episode-1")
CLAIM = f"{BASE}/sandboxclaims/{NAME}"
READY = {"conditions": [{"type": "Ready", "status": "True"}], "sandbox": {"name": "warm-1", "podIPs": ["10.0.0.7"]}}


class FakeApi:
    """Has the objects by path. `ready_after`: number of reads of a claim until it has a sandbox."""

    def __init__(self, ready_after: int = 0) -> None:
        pool = {"metadata": {"name": POOL, "uid": "pool-uid", "labels": {"rljob.dev/job": "job"}}}
        self.objects: dict[str, dict[str, Any]] = {f"{BASE}/sandboxwarmpools/{POOL}": pool}
        self.requests: list[tuple[str, str]] = []
        self.ready_after = ready_after
        self.answer: tuple[int, dict[str, Any]] | None = None

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.requests.append((method, path))
        if self.answer is not None:
            return self.answer
        if method == "POST":
            assert body is not None
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, {}
            self.objects[path] = body
            return 201, body
        found = self.objects.get(path)
        if found is None:
            return 404, {}
        if method == "DELETE":
            del self.objects[path]
        elif "sandboxclaims" in path:
            self.ready_after -= 1
            if self.ready_after < 0:
                found = {**found, "status": READY}
        return 200, found


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def open_claims(api: FakeApi, clock: Clock | None = None) -> Claims:
    clock = clock or Clock()
    return Claims(api, "team", POOL, 90, clock=clock, sleep=clock.sleep, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))


def test_a_first_call_claims_a_sandbox_that_belongs_to_the_pool_and_expires():
    api = FakeApi(ready_after=3)
    assert open_claims(api).get_address("episode-1", 60) == "10.0.0.7"
    claim = api.objects[CLAIM]
    assert claim["spec"] == {
        "warmPoolRef": {"name": POOL},
        "lifecycle": {"shutdownTime": "2026-01-02T00:01:30Z", "shutdownPolicy": "Delete"},
    }
    (owner,) = claim["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("SandboxWarmPool", POOL, "pool-uid")


def test_later_calls_find_the_claim_of_their_episode_with_one_request():
    api = FakeApi()
    open_claims(api).get_address("episode-1", 60)
    api.requests.clear()
    assert open_claims(api).get_address("episode-1", 60) == "10.0.0.7"
    assert api.requests == [("GET", CLAIM)]


def test_calls_at_the_same_time_share_the_claim_that_one_of_them_made():
    api = FakeApi()
    original = api.request

    def lose_race(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            original(method, path, body)  # another worker was faster
        return original(method, path, body)

    api.request = lose_race  # type: ignore[method-assign]
    assert open_claims(api).get_address("episode-1", 60) == "10.0.0.7"


def test_each_episode_and_each_pool_has_its_own_claims():
    names = {build_name(POOL, "episode-1"), build_name(POOL, "episode-2"), build_name("other", "episode-1")}
    assert len(names) == 3
    assert all(len(name) <= 63 for name in names), "a Pod may get the name"


def test_without_a_ready_sandbox_the_claims_condition_explains_it_at_the_deadline():
    api, clock = FakeApi(ready_after=10**6), Clock()
    open_claims(api, clock)._create("episode-1")
    condition = {"type": "Ready", "status": "False", "reason": "DependenciesNotReady", "message": "Pod is Pending"}
    api.objects[CLAIM]["status"] = {"conditions": [condition]}
    with pytest.raises(ClaimError, match=r"ready within 20 s: DependenciesNotReady: Pod is Pending"):
        open_claims(api, clock).get_address("episode-1", 20)
    assert clock.seconds == pytest.approx(20)


def test_a_claim_that_is_being_deleted_is_waited_out():
    api, clock = FakeApi(), Clock()
    claims = open_claims(api, clock)
    claims._create("episode-1")
    leaving = api.objects[CLAIM]
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"

    def sleep(seconds: float) -> None:
        if api.objects.get(CLAIM) is leaving:
            del api.objects[CLAIM]

    claims = claims._replace(sleep=sleep)
    assert claims.get_address("episode-1", 60) == "10.0.0.7"
    assert "deletionTimestamp" not in api.objects[CLAIM]["metadata"], "a new one was made"


def test_without_its_pool_the_error_says_that_the_job_ends():
    api = FakeApi()
    api.objects.clear()
    with pytest.raises(ClaimError, match="does not exist: the job ends or is suspended"):
        open_claims(api).get_address("episode-1", 60)


def test_a_refusal_of_the_api_server_is_an_error_with_its_message():
    api = FakeApi()
    api.answer = (403, {"message": "sandboxclaims is forbidden"})
    with pytest.raises(ClaimError, match="with 403: sandboxclaims is forbidden"):
        open_claims(api).get_address("episode-1", 60)


def test_the_end_of_an_episode_deletes_its_claim_and_ignores_a_missing_one():
    api = FakeApi()
    claims = open_claims(api)
    claims.get_address("episode-1", 60)
    claims.delete("episode-1")
    assert CLAIM not in api.objects
    claims.delete("episode-1")


def test_a_request_to_an_api_server_that_hangs_ends_with_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "_MIN_REQUEST_SECONDS", 0.01)
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    (tmp_path / "token").write_text("token")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        api = InClusterApi(time.monotonic() + 0.05, tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ClaimError, match="the Kubernetes API does not answer: TimeoutError"):
            Claims(api, "team", POOL, 90).delete("episode-1")
