"""The limits of a request: deadline, timeouts, and connections."""

import asyncio

from aiohttp import web

from rljob_api.wire.base import InvalidReason
from rljob_trainer.replicas import http as http_client
from rljob_trainer.rewards.groups import RewardClient
from tests.support.reward_harness import make_request, make_reward, score_alone, until


async def score(rewards, i=1):
    return (await score_alone(rewards, make_request(i)))["r"]


async def test_sample_outlives_its_deadline_while_the_reward_is_away(reward_harness):
    """Without replicas, and with one that hangs up: the wait is not the sample's."""
    async with reward_harness.rewards(make_reward(deadlineSeconds=0.1)) as rewards:
        client, scoring = rewards.clients["r"], asyncio.create_task(score(rewards))
        await until(lambda: client.health.away_seconds > 0.3)
        server = await reward_harness.serve()
        server.fault = lambda body: web.Response(status=503)
        reward_harness.list(server)
        await until(lambda: len(server.asked) > 1)
        server.fault = lambda body: None
        assert (await scoring).valid
        assert client.health.failing_since is None


async def test_request_to_a_hanging_replica_is_cancelled_at_the_deadline(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.open.clear()
    async with reward_harness.rewards(make_reward(deadlineSeconds=0.5)) as rewards:
        found = await score(rewards)
        await until(lambda: server.num_left == 1)
        assert not rewards.clients["r"].in_flight
        assert rewards.clients["r"].load().latency_seconds is None, "the latency of an execution is unknown"
    assert found.reason is InvalidReason.DEADLINE
    assert f"waited for the response of {server.address}" in found.message


async def test_full_server_is_retried_until_the_deadline(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.fault = lambda body: web.Response(status=429, headers={"Retry-After": "0.05"})
    async with reward_harness.rewards(make_reward(deadlineSeconds=0.4)) as rewards:
        found = await score(rewards)
    assert found.reason is InvalidReason.DEADLINE
    assert found.attempts > 1


async def test_request_timeout_includes_the_execution_before_it(reward_harness):
    """A replica gets two requests per slot: the second waits while the first executes."""
    async with reward_harness.rewards(make_reward(timeoutSeconds=3600)) as rewards:
        assert rewards.clients["r"].request_seconds == 2 * 3600
    async with reward_harness.rewards(make_reward(timeoutSeconds=30)) as rewards:
        assert rewards.clients["r"].request_seconds == 30 + 600
    endpoint = make_reward(function=None, http={"url": "http://127.0.0.1:1/any"}, timeoutSeconds=3600)
    async with reward_harness.rewards(endpoint) as rewards:
        assert rewards.clients["r"].request_seconds == 3600, "its queue is unknown"


async def test_replica_that_only_times_out_is_named_until_it_answers(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    late = {"valid": False, "reason": "timeout", "message": "the reward ran longer than 5 s"}
    server.fault = lambda body: web.json_response({"id": body["id"], **late})
    async with reward_harness.rewards(make_reward(slots=1, failurePolicy={"retries": 0}, timeoutSeconds=5)) as rewards:
        client = rewards.clients["r"]
        assert (await score(rewards)).reason is InvalidReason.TIMEOUT
        assert client.list_hung() == []
        assert (await score(rewards, 2)).reason is InvalidReason.TIMEOUT
        [part] = client.list_hung()
        assert (part.role, part.name, part.limit_seconds) == ("reward-r", server.address, 5)
        server.fault = lambda body: None
        assert (await score(rewards, 3)).valid
        assert client.list_hung() == []


async def test_group_shares_one_deadline(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.open.clear()
    async with reward_harness.rewards(make_reward(scope="group", deadlineSeconds=0.4)) as rewards:
        scorer = rewards.open_group("g", "train", 3)
        found = await asyncio.gather(*[scorer.score(i, make_request(i)) for i in range(3)])
        await until(lambda: server.num_left == 1)
    assert [each["r"].reason for each in found] == [InvalidReason.DEADLINE] * 3


async def test_connections_are_limited_by_slots_and_closed_after_bursts(reward_harness, monkeypatch):
    monkeypatch.setattr(http_client, "IDLE_SECONDS", 0.5)
    servers = [await reward_harness.serve(), await reward_harness.serve()]
    reward_harness.list(*servers)
    async with reward_harness.rewards(make_reward(slots=4)) as rewards:
        client = rewards.clients["r"]
        await until(lambda: len(client.replicas.fleet.versions()) == 2)
        rewards.begin()
        for burst in range(3):
            found = await asyncio.gather(*[score(rewards, 1000 * burst + i) for i in range(200)])
            assert all(result.valid for result in found)
            # Two per slot, which later bursts reuse; one more queries the version.
            assert all(1 <= server.most_connected <= 8 + 1 for server in servers)
            assert (client.in_flight, client.replicas.num_waiting) == (set(), 0)
        await until(lambda: not any(server.num_connected for server in servers))  # idle ones are closed
        pool = client._session.connector
        assert not pool._acquired
        assert sum(map(len, pool._conns.values())) == 0


async def test_cancelled_requests_leave_no_connection(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.open.clear()
    async with reward_harness.rewards(make_reward(slots=8)) as rewards:
        client = rewards.clients["r"]
        for burst in range(3):
            tasks = [asyncio.create_task(score(rewards, f"{burst}{i}")) for i in range(50)]
            await until(lambda: len(server.asked) - server.num_left == 16)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: server.num_left == len(server.asked))
            assert (client.in_flight, server.num_connected) == (set(), 0)
        assert not client._session.connector._acquired
        assert client.replicas.fleet.replicas[server.address].in_flight == 0


async def test_external_endpoint_gets_a_limited_number_of_requests():
    spec = make_reward(function=None, http={"url": "http://127.0.0.1:1/any"})
    async with http_client.open_session() as session:
        fleet = RewardClient(spec, session).replicas.fleet
    fleet.observe_addresses(["x"])
    assert sum(fleet.pick(0.0) is not None for _ in range(2000)) == 1024


async def test_request_that_another_one_interrupted_is_sent_again_without_a_retry(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    interrupted = {"valid": False, "reason": "interrupted", "message": "another request of its process ended it"}
    answers = iter([interrupted] * 3)
    server.fault = lambda body: next(answers, None)
    async with reward_harness.rewards(make_reward(failurePolicy={"retries": 0})) as rewards:
        found = await score(rewards)
    assert found.valid, found
    assert len(server.asked) == 4
