"""Rewards that score groups: when they receive a request, its content, and how results are merged."""

import asyncio

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.tracing import spans
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import PORT_SERVICE
from rljob_api.wire.driver_status import RewardDemand
from rljob_trainer.services.demand import ScoreForecast
from tests.support.reward_harness import make_request, make_reward, until
from tests.support.traces import recording


async def score_group(rewards, requests):
    scorer = rewards.open_group("g", "train", len(requests))
    return await asyncio.gather(*[scorer.score(i, request) for i, request in enumerate(requests)])


async def test_group_is_sent_when_its_last_sample_ends(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    async with reward_harness.rewards(make_reward(scope="group"), make_reward(name="s")) as rewards:
        scorer = rewards.open_group("g", "eval", 3)
        first = [asyncio.create_task(scorer.score(i, make_request(i))) for i in (2, 0)]
        await until(lambda: len(server.asked) == 2)  # the reward of single samples does not wait
        assert not server.groups
        assert not rewards.clients["r"].in_flight, "no group request is sent yet"
        found = [await scorer.score(1, make_request(1)), *[await task for task in first]]
    assert [each["r"].score for each in found] == [1.0, 2.0, 0.0]
    [group] = server.groups
    assert (group.id, group.lane, group.results) == ("g", "eval", None)
    assert [sample.id for sample in group.samples] == ["s0", "s1", "s2"], "in the group's order"
    assert all(each["s"].components == {"alone": 1.0} for each in found)


async def test_sample_then_group_scores_only_valid_samples_together(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.fault = lambda body: {"valid": False, "reason": "exception", "message": "m"} if body["id"] == "s1" else None
    server.judge_group = lambda samples, results: [10 * result.score for result in results]
    async with reward_harness.rewards(make_reward(scope="sampleThenGroup", failurePolicy={"retries": 0})) as rewards:
        found = [each["r"] for each in await score_group(rewards, [make_request(i) for i in range(3)])]
    [group] = server.groups
    assert [sample.id for sample in group.samples] == ["s0", "s2"]
    assert [result.score for result in group.results] == [0.0, 2.0]
    assert [result.score for result in found] == [0.0, None, 20.0]
    assert (found[1].reason, found[1].message) == (InvalidReason.EXCEPTION, "m"), "it is unchanged"
    assert found[2].components == {"alone": 1.0, "together": 2.0}
    assert found[2].execute_seconds == 4.0
    assert [(found[i].attempts, found[i].retries) for i in (1, 2)] == [(1, 0), (2, 0)]


async def test_failed_group_step_makes_valid_samples_invalid(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.fault = lambda body: {"valid": False, "reason": "abstained"} if body["id"] == "s0" else None
    server.judge_group = lambda samples, results: ["timeout"] * len(samples)
    async with reward_harness.rewards(make_reward(scope="sampleThenGroup", failurePolicy={"retries": 1})) as rewards:
        found = [each["r"] for each in await score_group(rewards, [make_request(i) for i in range(3)])]
    assert [str(result.reason) for result in found] == ["abstained", "timeout", "timeout"]
    assert all(result.components == {} for result in found[1:])
    assert len(server.groups) == 2


async def test_group_of_invalid_samples_is_not_sent(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.fault = lambda body: {"valid": False, "reason": "abstained"}
    async with reward_harness.rewards(make_reward(scope="sampleThenGroup")) as rewards:
        found = await score_group(rewards, [make_request(i) for i in range(3)])
    assert not server.groups
    assert all(each["r"].reason is InvalidReason.ABSTAINED for each in found)


async def test_group_with_an_invalid_sample_is_retried_and_keeps_valid_ones(reward_harness):
    servers = [await reward_harness.serve(), await reward_harness.serve()]
    reward_harness.list(*servers)
    for server, judged in zip(servers, ([1.0, "exception", 3.0], ["exception"] * 3), strict=True):
        server.judge_group = lambda samples, results, judged=judged: judged
    async with reward_harness.rewards(make_reward(scope="group", failurePolicy={"retries": 1})) as rewards:
        found = [each["r"] for each in await score_group(rewards, [make_request(i) for i in range(3)])]
    assert [len(server.groups) for server in servers] == [1, 1], "once on each"
    assert [result.score for result in found] == [1.0, None, 3.0]
    assert all((result.attempts, result.retries) == (2, 1) for result in found)


async def test_abstention_in_a_group_is_not_retried(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.judge_group = lambda samples, results: [1.0, "abstained"]
    async with reward_harness.rewards(make_reward(scope="group")) as rewards:
        found = [each["r"] for each in await score_group(rewards, [make_request(i) for i in range(2)])]
    assert [result.valid for result in found] == [True, False]
    assert len(server.groups) == 1


async def test_fail_job_fails_every_sample_of_the_group(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.judge_group = lambda samples, results: [1.0, "exception"]
    spec = make_reward(scope="group", failurePolicy={"retries": 0, "action": "failJob"})
    async with reward_harness.rewards(spec) as rewards:
        scorer = rewards.open_group("g", "train", 2)
        tasks = [asyncio.create_task(scorer.score(i, make_request(i))) for i in range(2)]
        await asyncio.wait(tasks)
    for task in tasks:
        assert isinstance(task.exception(), UserError), "each has the cause, and none was cancelled"


async def test_demand_of_a_group_reward_counts_executions(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.open.clear()
    demand = RewardDemand(samples=80, expected=30, is_open=True, due_seconds=100.0)
    forecast = ScoreForecast(demand, ends=(1.0, 2.0), group_size=4, group_ends=(90.0, 95.0))
    async with reward_harness.rewards(make_reward(scope="group"), make_reward(name="s")) as rewards:
        scoring = asyncio.create_task(score_group(rewards, [make_request(i) for i in range(4)]))
        await until(lambda: server.groups and len(server.asked) == 4)
        demand = rewards.demand(forecast)
        assert (demand["r"].samples, demand["r"].expected, demand["r"].in_flight) == (20, 8, 1)
        assert (demand["s"].samples, demand["s"].expected, demand["s"].in_flight) == (80, 30, 4)
        assert demand["r"].window_seconds < demand["s"].window_seconds, "groups end later than samples"
        assert rewards.clients["r"].statistics()["in_flight"] == 4
        server.open.set()
        await scoring
        assert rewards.demand(forecast)["r"].latency_seconds == 3.0
        assert rewards.clients["r"].num_requests["train"] == 1


async def test_demand_of_sample_then_group_counts_samples_only(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    async with reward_harness.rewards(make_reward(scope="sampleThenGroup")) as rewards:
        await score_group(rewards, [make_request(i) for i in range(4)])
        demand = rewards.demand(ScoreForecast(RewardDemand(samples=80, expected=30), group_size=4))["r"]
    assert (demand.samples, demand.expected, demand.latency_seconds) == (80, 30, 1.0)


@pytest.mark.parametrize("protocol", ["rljob", "openrlhf"])
async def test_an_endpoint_of_scope_group_gets_the_group_at_its_url(reward_harness, protocol):
    server = await reward_harness.serve()
    bodies = []

    async def handle(request):
        bodies.append(await request.json())
        if protocol == "openrlhf":
            return web.json_response({"rewards": [0.25, 0.5]})
        results = [{"id": f"s{i}", "valid": True, "score": 0.25 * (i + 1)} for i in range(2)]
        return web.json_response({"id": "g", "results": results})

    app = web.Application()
    app.router.add_post("/any", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, server.address, PORT_SERVICE + 1)
    await site.start()
    url = f"http://{server.address}:{PORT_SERVICE + 1}/any"
    spec = make_reward(function=None, scope="group", http={"url": url, "protocol": protocol})
    async with reward_harness.rewards(spec) as rewards:
        ids = {"prompt_ids": [1], "completion_ids": [2]}
        found = await score_group(rewards, [make_request(i, ground_truth=i, **ids) for i in range(2)])
    await runner.cleanup()
    assert [each["r"].score for each in found] == [0.25, 0.5]
    if protocol == "openrlhf":
        assert bodies == [{"query": ["1 2", "1 2"], "prompts": ["1", "1"], "labels": [0, 1]}]
    else:
        assert [sample["id"] for sample in bodies[0]["samples"]] == ["s0", "s1"]


@pytest.mark.parametrize("scope", ["group", "sampleThenGroup"])
@pytest.mark.parametrize("is_last", [True, False])
async def test_group_is_scored_without_an_episode_that_failed(reward_harness, scope, is_last):
    server = await reward_harness.serve()
    reward_harness.list(server)
    async with reward_harness.rewards(make_reward(scope=scope), make_reward(name="s")) as rewards:
        scorer = rewards.open_group("g", "train", 3)
        if not is_last:
            await scorer.skip()
        scored = [asyncio.create_task(scorer.score(i, make_request(i))) for i in (0, 2)]
        if is_last:
            await until(lambda: len(server.asked) >= 2)
            await scorer.skip()
        found = await asyncio.gather(*scored)
    assert [each["r"].score for each in found] == [0.0, 2.0]
    assert [sample.id for sample in server.groups[0].samples] == ["s0", "s2"]


async def test_group_without_any_episode_is_not_scored(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    async with reward_harness.rewards(make_reward(scope="group")) as rewards:
        scorer = rewards.open_group("g", "train", 2)
        await scorer.skip()
        await scorer.skip()
    assert not server.groups


@pytest.mark.parametrize("scope", ["sample", "sampleThenGroup"])
async def test_failure_with_a_score_is_valid_and_keeps_its_reason(reward_harness, scope):
    server = await reward_harness.serve()
    reward_harness.list(server)
    reasons = {"s1": "timeout", "s2": "exception"}
    server.fault = lambda body: (
        {"valid": False, "reason": reasons[body["id"]], "message": "m"} if body["id"] in reasons else None
    )
    server.judge_group = lambda samples, results: [10.0 for _ in results]
    policy = {"retries": 0, "scores": {"timeout": -0.5}, "action": "dropGroup"}
    async with reward_harness.rewards(make_reward(scope=scope, failurePolicy=policy)) as rewards:
        found = [each["r"] for each in await score_group(rewards, [make_request(i) for i in range(3)])]
    assert (found[1].valid, found[1].score, found[1].reason) == (True, -0.5, None)
    assert (found[1].failed_as, found[1].message) == (InvalidReason.TIMEOUT, "m")
    assert (found[2].valid, found[2].score, found[2].reason) == (False, None, InvalidReason.EXCEPTION)
    assert found[0].failed_as is None
    for group in server.groups:
        assert [sample.id for sample in group.samples] == ["s0"], "a failed sample stays out of the group step"


async def test_failure_with_a_score_does_not_fail_the_job(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.fault = lambda body: {"valid": False, "reason": "timeout", "message": "m"}
    policy = {"retries": 0, "scores": {"timeout": 0.0}, "action": "failJob"}
    async with reward_harness.rewards(make_reward(failurePolicy=policy)) as rewards:
        [found] = await score_group(rewards, [make_request(0)])
    assert found["r"].score == 0.0


async def test_trajectories_are_scored_with_their_seat_once_all_episodes_have_ended(reward_harness):
    server = await reward_harness.serve()
    reward_harness.list(server)
    server.judge_group = lambda samples, results: [float(len(samples))] * len(samples)
    async with reward_harness.rewards(make_reward(scope="group")) as rewards:
        scorer = rewards.open_group("g", "train", 2)

        async def play(sample, *seats):
            scorer.expect(len(seats))
            scored = [
                scorer.score(sample * 64 + i, make_request(i), peers=(seat, None)) for i, seat in enumerate(seats)
            ]
            return [each["r"].score for each in await asyncio.gather(*scored)]

        first = asyncio.create_task(play(0, "a", "b"))
        await asyncio.sleep(0)
        assert not server.groups, "an episode of the group is open"
        assert [await play(1, "a", "b", "b"), await first] == [[2.0, 3.0, 3.0], [2.0, 3.0]]
    assert sorted(len(group.samples) for group in server.groups) == [2, 3]


async def test_a_groups_request_is_in_one_episode_and_links_to_the_others(reward_harness):
    async def play(scorer, number):
        with spans.root("episode", {"number": number}):
            return await scorer.score(number, make_request(number))

    reward_harness.list(await reward_harness.serve())
    async with reward_harness.rewards(make_reward(scope="group")) as rewards:
        with recording() as recorded:
            scorer = rewards.open_group("g", "train", 3)
            await asyncio.gather(*(play(scorer, number) for number in range(3)))
            traces = sorted(recorded.traces(), key=lambda each: each.root.attributes["number"])
    assert [each.names() for each in traces] == [
        ["episode", ["reward r", ["score group", "queue", "POST /v1/score-group"]]],
        ["episode", "reward r"],
        ["episode", "reward r"],
    ]
    waits = [trace.named("reward r")[0].id for trace in traces]
    assert traces[0].named("score group")[0].links == (waits[1], waits[2])


async def test_a_groups_request_is_recorded_with_any_of_its_episodes(reward_harness):
    """Here the last one, which sends it, is not traced."""
    reward_harness.list(await reward_harness.serve())
    async with reward_harness.rewards(make_reward(scope="group")) as rewards:
        with recording() as recorded:
            scorer = rewards.open_group("g", "train", 2)

            async def play_traced():
                with spans.root("episode", {}):
                    await scorer.score(0, make_request(0))

            first = asyncio.create_task(play_traced())
            await asyncio.sleep(0)
            await scorer.score(1, make_request(1))
            await first
            [trace] = recorded.traces()
    assert trace.names() == ["episode", ["reward r", ["score group", "queue", "POST /v1/score-group"]]]
