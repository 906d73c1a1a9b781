"""The client of the runner against real HTTP servers: attempts, waits, and a request that is closed."""

import asyncio

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest
from rljob_trainer.outages import OutageError, Outages
from tests.support.reward_harness import until
from tests.support.waiting import DEADLINE_SECONDS

INVALID = {"valid": False, "reason": "worker_died", "message": "killed by signal 9"}


class Attempts:
    """Implements agents.base.EpisodeMessage."""

    lane = "train"

    def __init__(self, name="e"):
        self.id, self.num_attempts, self.ended = name, 0, []

    def next_attempt(self):
        self.num_attempts += 1
        return CallRequest(id=self.id, arguments={"attempt": self.num_attempts - 1})

    def end_attempt(self):
        self.ended.append(self.num_attempts - 1)


async def test_each_request_is_another_attempt_on_another_replica(call_harness):
    servers = [await call_harness.serve("runner", value={"reward": 1.0}) for _ in range(2)]
    died = []

    def answer(body):
        died.append(body)
        return INVALID if len(died) == 1 else None

    for server in servers:
        server.answer = answer
    found = []
    on_call = lambda *args: found.append(args[:3])  # noqa: E731
    async with call_harness.services(runner={"retries": 1}, on_call=on_call) as services:
        await until(lambda: len(services.clients["runner"].replicas.fleet.replicas) == 2)
        message = Attempts()
        result, _ = await services.run(message)
    assert (result.value, message.num_attempts) == ({"reward": 1.0}, 2)
    assert [len(server.bodies) for server in servers] == [1, 1]
    assert [body["arguments"]["attempt"] for body in died] == [0, 1]
    assert found == [("runner", "train", result)]


async def test_full_replica_and_lost_connection_use_up_no_retry(call_harness):
    server = await call_harness.serve("runner", value={"reward": 1.0})
    answers = iter([web.Response(status=429, headers={"Retry-After": "0"}), "hang up"])
    server.answer = lambda body: next(answers, None)
    async with call_harness.services(runner={"retries": 0}) as services:
        message = Attempts()
        result, _ = await services.run(message)
    assert result.valid
    assert message.ended == [0, 1, 2], "a key does not outlive its attempt, whatever ended it"
    assert [body["arguments"]["attempt"] for body in server.bodies] == [0, 1, 2], "each with its own key"


async def test_episodes_beyond_the_slots_wait_in_the_driver_and_are_described(call_harness):
    server = await call_harness.serve("runner")
    server.is_open.clear()
    async with call_harness.services(runner={"slots": 2, "deadlineSeconds": 0.5}) as services:
        assert services.describe_wait() == ""
        running = [asyncio.create_task(services.run(Attempts(f"e{i}"))) for i in range(3)]
        await until(lambda: len(server.bodies) == 2)
        assert services.describe_wait().startswith("3 episodes in the runner, oldest 0.")
        assert services.describe_wait().endswith(", 1 of them for a free slot")
        statistics = services.clients["runner"].statistics()
        assert (statistics["in_flight"], statistics["waiting"]) == (3, 1)
        results = [result for result, _ in await asyncio.gather(*running)]
    assert [result.reason for result in results] == [InvalidReason.DEADLINE] * 3
    assert len(server.bodies) == 2


async def test_wait_without_a_runner_says_so(call_harness):
    async with call_harness.services(runner={"deadlineSeconds": 0.2}) as services:
        running = asyncio.create_task(services.run(Attempts()))
        await until(lambda: services.describe_wait() != "")
        assert services.describe_wait().startswith("1 episode in the runner, oldest 0.")
        assert services.describe_wait().endswith(", 1 of them for a free slot, no replica exists")
        await call_harness.serve("runner", value={"reward": 1.0})
        assert (await running)[0].valid, "the time without a replica is not the episode's"


async def test_cancelled_episode_closes_its_request(call_harness):
    server = await call_harness.serve("runner")
    closed = asyncio.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            closed.set()
            raise

    server.is_open.clear()
    server.is_open.wait = hang
    async with call_harness.services(runner={}) as services:
        message = Attempts()
        running = asyncio.create_task(services.run(message))
        await until(lambda: server.bodies)
        running.cancel()
        await asyncio.wait_for(closed.wait(), DEADLINE_SECONDS)
    assert running.cancelled()
    assert message.ended == [0]


async def test_wrong_token_is_a_user_error_with_the_field(call_harness):
    server = await call_harness.serve("runner")
    server.answer = lambda body: web.Response(status=401, text="no")
    async with call_harness.services(runner={}) as services:
        with pytest.raises(UserError, match=r"^spec.agent.runner: .* returned 401: no"):
            await services.run(Attempts())


async def test_episode_that_fails_while_what_it_calls_is_away_runs_again(call_harness):
    """Its program sees a request that fails, or its runner kills it at its timeout: neither is its own failure."""
    server, rollouts = await call_harness.serve("runner", value={"reward": 1.0}), Outages().watch("spec.rollout")

    def answer(body):
        if len(server.bodies) == 1:
            rollouts.failed("refused")
            return INVALID
        rollouts.succeeded()
        return None

    server.answer = answer
    async with call_harness.services(runner={"retries": 0}, runner_calls=[rollouts]) as services:
        message = Attempts()
        result, _ = await services.run(message)
    assert (result.valid, message.num_attempts) == (True, 2)


async def test_episode_that_fails_by_itself_is_not_run_again(call_harness):
    server, rollouts = await call_harness.serve("runner"), Outages().watch("spec.rollout")
    rollouts.failed("a blip")
    rollouts.succeeded()
    server.answer = lambda body: INVALID
    async with call_harness.services(runner={"retries": 0}, runner_calls=[rollouts]) as services:
        result, _ = await services.run(Attempts())
    assert (result.reason, len(server.bodies)) == (InvalidReason.WORKER_DIED, 1)


async def test_episodes_wait_no_longer_than_the_job_for_what_they_call(call_harness):
    server = await call_harness.serve("runner")
    server.answer = lambda body: INVALID
    model = Outages(0.5).watch("spec.agent.models[0] (http://m)")
    model.failed("401")
    async with call_harness.services(runner={"retries": 0}, runner_calls=[model]) as services:
        with pytest.raises(OutageError, match=r"^spec.agent.models\[0\] \(http://m\): away since .* last error: 401"):
            await services.run(Attempts())
