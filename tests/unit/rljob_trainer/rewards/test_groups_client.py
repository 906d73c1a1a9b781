"""The reward client against real HTTP servers: retries, failures, waits and demand."""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import PORT_SERVICE
from rljob_api.wire.driver_status import RewardDemand
from rljob_api.wire.scores import ScoreRequest
from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RewardClient, RewardClients
from rljob_trainer.services.demand import ScoreForecast
from tests.support import seconds
from tests.support.driver_harness import NETWORK
from tests.support.reward_harness import Decoder, score_alone
from tests.support.waiting import DEADLINE_SECONDS

ADDRESSES = (f"{NETWORK}.251.1", f"{NETWORK}.251.2")
FORECAST = ScoreForecast(RewardDemand(samples=5120, expected=5000, is_open=True, due_seconds=40.0))
REQUEST = ScoreRequest(id="r", prompt="1+1=", completion="2", ground_truth="2", prompt_ids=[1, 2], completion_ids=[3])


def result(score=1.0, reason=None):
    body = {"id": "r", "valid": reason is None, "score": None if reason else score, "reason": reason}
    return web.json_response(body)


class Servers:
    """Two reward servers; both take their responses from the same list."""

    def __init__(self, responses, addresses=ADDRESSES):
        self.addresses = addresses
        self.responses, self.asked, self.headers, self.bodies = list(responses), [], [], []

    async def handle(self, request):
        self.asked.append(request.transport.get_extra_info("sockname")[0])
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        answer = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        if answer == "hang up":
            request.transport.abort()
            return web.Response()
        return answer() if callable(answer) else answer

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/score", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        for address in self.addresses:
            await web.TCPSite(self.runner, address, PORT_SERVICE).start()
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(f"{address} rewards" for address in ADDRESSES))
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(hosts))
    monkeypatch.setenv("RLJOB_TOKEN", "secret")
    monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({"r": "rewards", "s": "rewards"}))


def reward(**fields):
    return seconds.validate(Reward, {"name": "r", "function": {"inline": "x"}, **fields})


async def score(spec, request=REQUEST):
    async with open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        client = RewardClient(spec, session, Decoder())
        await client.start()
        try:
            [found] = await client.score(request)
            return found
        finally:
            await client.close()


async def test_valid_result_is_returned_and_the_token_is_sent():
    async with Servers([lambda: result(0.5)]) as servers:
        found = await score(reward())
    assert (found.valid, found.score) == (True, 0.5)
    assert servers.headers[0]["Authorization"] == "Bearer secret"


async def test_invalid_result_is_retried_on_another_replica():
    async with Servers([lambda: result(reason="exception"), lambda: result(1.0)]) as servers:
        found = await score(reward())
    assert found.valid
    assert len(set(servers.asked)) == 2


@pytest.mark.parametrize("reason", ["exception", "timeout", "not_finite", "worker_died", "bad_return"])
async def test_result_stays_invalid_after_the_last_retry(reason):
    async with Servers([lambda: result(reason=reason)]) as servers:
        found = await score(reward(failurePolicy={"retries": 2}))
    assert (found.valid, found.score, str(found.reason)) == (False, None, reason)
    assert len(servers.asked) == 3


async def test_samples_of_a_group_are_sent_before_those_of_groups_that_came_later():
    """Otherwise half of the groups are whole only at the end, and the trainer waits for them."""
    sent = []

    class Scorer(Servers):
        async def handle(self, request):
            sent.append((await request.json())["id"])
            return web.json_response({"id": sent[-1], "valid": True, "score": 1.0})

    async with Scorer([]), open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        client = RewardClient(reward(slots=1), session)
        async with asyncio.TaskGroup() as requests:
            for name in ("old/0", "other/0", "new/0", "new/1", "other/1", "old/1"):
                requests.create_task(client.score(REQUEST.model_copy(update={"id": name})))
            await asyncio.sleep(0)
            assert client.replicas.num_waiting == 6
            await client.start()
        await client.close()
    assert sorted(sent[:4]) == ["old/0", "old/1", "other/0", "other/1"]
    assert sorted(sent[4:]) == ["new/0", "new/1"]


async def test_abstention_is_not_retried():
    async with Servers([lambda: result(reason="abstained")]) as servers:
        found = await score(reward())
    assert found.reason is InvalidReason.ABSTAINED
    assert len(servers.asked) == 1


@pytest.mark.parametrize(
    "failure",
    ["hang up", lambda: web.Response(status=503), lambda: web.Response(status=429, headers={"Retry-After": "0.05"})],
)
async def test_unavailable_replica_uses_up_no_retry(failure):
    async with Servers([failure, failure, failure, lambda: result(1.0)]) as servers:
        found = await score(reward(failurePolicy={"retries": 0}))
    assert found.valid
    assert len(servers.asked) == 4


async def test_server_shutdown_uses_up_no_retry():
    async with Servers([lambda: result(reason="cancelled"), lambda: result(1.0)]) as servers:
        found = await score(reward(failurePolicy={"retries": 0}))
    assert found.valid
    assert len(set(servers.asked)) == 2


async def test_token_of_a_reward_model_is_sent(monkeypatch):
    monkeypatch.setenv("RLJOB_REWARD_TOKENS", json.dumps({"r": "RLJOB_REWARD_TOKEN_0"}))
    monkeypatch.setenv("RLJOB_REWARD_TOKEN_0", "shared")
    spec = Reward.model_validate({"name": "r", "rewardModelRef": {"name": "judge"}})
    async with Servers([lambda: result(0.5)]) as servers, open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        rewards = RewardClients([spec, reward(name="s")], session)
        await rewards.start()
        await score_alone(rewards, REQUEST)
        await rewards.close()
    assert sorted(headers["Authorization"] for headers in servers.headers) == ["Bearer secret", "Bearer shared"]


async def test_missing_token_is_a_user_error_at_startup(monkeypatch):
    monkeypatch.setenv("RLJOB_REWARD_TOKENS", json.dumps({"r": "RLJOB_REWARD_TOKEN_0"}))
    async with open_session() as session:
        with pytest.raises(UserError, match=r"r: RLJOB_REWARD_TOKEN_0.* not set; check that the Secret"):
            RewardClient(reward(), session)


@contextlib.contextmanager
def vanished(address):
    """An address that responses no SYN: the backlog of its listening socket is full."""
    with socket.socket() as gone, contextlib.ExitStack() as fillers:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        gone.bind((address, PORT_SERVICE))
        gone.listen(0)
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((address, PORT_SERVICE))
        yield


async def test_vanished_replica_costs_no_sample(monkeypatch):
    monkeypatch.setattr("rljob_trainer.replicas.http.CONNECT_SECONDS", 0.3)
    with vanished(ADDRESSES[1]):
        async with (
            Servers([lambda: result(1.0)], ADDRESSES[:1]),
            open_session() as session,
            asyncio.timeout(DEADLINE_SECONDS),
        ):
            client = RewardClient(reward(failurePolicy={"retries": 0}), session)
            await client.start()
            requests = [REQUEST.model_copy(update={"id": "r"})] * 2
            found = [result for request in requests for result in await client.score(request)]
            await client.close()
            failures = client.replicas.fleet.replicas[ADDRESSES[1]].num_failures
    assert all(each.valid for each in found)
    assert failures, "this test must hit the vanished replica"


async def test_endpoint_that_refuses_connections_uses_up_no_retry(monkeypatch, caplog):
    monkeypatch.setattr("rljob_trainer.replicas.http.CONNECT_SECONDS", 0.1)
    url = f"http://{ADDRESSES[1]}:{PORT_SERVICE}/v1/score"
    spec = reward(function=None, http={"url": url}, failurePolicy={"retries": 0})
    async with connected(spec) as client:
        with vanished(ADDRESSES[1]):
            scoring = asyncio.create_task(client.score(REQUEST))
            await until(lambda: caplog.text.count("ConnectionTimeoutError: ") > 1)
        async with Servers([lambda: result(1.0)], ADDRESSES[1:]):
            [found] = await scoring
    assert found.valid, "it was never executed before"
    assert found.attempts > 2


async def test_response_that_breaks_the_protocol_is_invalid():
    async with Servers([lambda: web.Response(text='{"id": "r", "valid": true, "score": NaN}')]):
        found = await score(reward(failurePolicy={"retries": 0}))
    assert found.reason is InvalidReason.BAD_RETURN


@pytest.mark.parametrize("protocol", ["rljob", "openrlhf"])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("body", [b"\xff\xfe\x00garbage", b'{"rewards": [1' + b"0" * 400 + b"]}", b"[" * 200_000])
async def test_garbage_from_an_external_endpoint_costs_one_result(protocol, status, body):
    url = f"http://{ADDRESSES[0]}:{PORT_SERVICE}/v1/score"
    spec = reward(function=None, http={"url": url, "protocol": protocol}, failurePolicy={"retries": 0})
    async with Servers([lambda: web.Response(body=body, status=status, content_type="application/json")]):
        found = await score(spec)
    assert found.reason is (InvalidReason.BAD_RETURN if status == 200 else InvalidReason.EXCEPTION)


async def test_rejected_request_is_a_user_error():
    async with Servers([lambda: web.Response(status=422, text="no completion")]):
        with pytest.raises(UserError, match="returned 422: no completion"):
            await score(reward())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirect_of_an_endpoint_is_not_followed(status):
    spec = reward(function=None, http={"url": f"http://{ADDRESSES[0]}:{PORT_SERVICE}/v1/score"})
    target = f"http://{ADDRESSES[1]}:{PORT_SERVICE}/v1/score"
    redirect = web.Response(status=status, headers={"Location": target})
    async with Servers([lambda: redirect], ADDRESSES[:1]), Servers([lambda: result(1.0)], ADDRESSES[1:]) as other:
        with pytest.raises(UserError, match=f"returned {status}, and redirects are not followed; set url .*{target}"):
            await score(spec)
        assert not other.asked, "nothing is sent to the target"


async def test_rejected_request_of_an_external_endpoint_costs_one_result():
    spec = reward(function=None, http={"url": f"http://{ADDRESSES[0]}:{PORT_SERVICE}/v1/score"})
    async with Servers([lambda: web.Response(status=422, text="this text is odd"), lambda: result(1.0)]):
        found = await score(spec)
    assert found.valid


REFUSALS = [401, 403, 404, 405]
EXTERNAL = {"url": f"http://{ADDRESSES[0]}:{PORT_SERVICE}/v1/score"}


class Refusing(Servers):
    """An endpoint that refuses the samples with a completion in `refused`, or while `is_away` every sample."""

    def __init__(self, status, refused=(), is_away=False):
        super().__init__([], ADDRESSES[:1])
        self.status, self.refused, self.is_away = status, set(refused), is_away
        self.num_refused = 0

    async def handle(self, request):
        body = await request.json()
        if self.is_away or body["completion"] in self.refused:
            self.num_refused += 1
            return web.Response(status=self.status, text="not this one")
        return web.json_response({"id": body["id"], "valid": True, "score": 1.0})


class Faulty(Servers):
    """One endpoint that scores each sample, unless `fault` returns something else, or waits."""

    def __init__(self, fault=lambda body: None):
        super().__init__([], ADDRESSES[:1])
        self.fault = fault

    async def handle(self, request):
        body = await request.json()
        self.asked.append(body["id"])
        answer = self.fault(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer == "hang up":
            request.transport.abort()
            return web.Response()
        return answer or web.json_response({"id": body["id"], "valid": True, "score": 1.0})


def sample(completion):
    return REQUEST.model_copy(update={"id": f"s/{completion}", "completion": completion})


@contextlib.asynccontextmanager
async def connected(spec, outages=None):
    async with open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        client = RewardClient(spec, session, Decoder(), outages=outages)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


@pytest.mark.parametrize("status", REFUSALS)
async def test_endpoint_that_never_answered_and_refuses_is_a_user_error(status):
    async with Refusing(status, is_away=True):
        with pytest.raises(UserError, match=f"spec.rewards: r: .* returned {status}: not this one"):
            await score(reward(function=None, http=EXTERNAL))


async def test_servers_of_the_job_that_refuse_all_after_an_answer_cost_no_sample():
    """A RewardModel that was created again has another token, until the driver restarts with it."""
    async with Faulty() as server, connected(reward(failurePolicy={"retries": 0})) as client:
        await client.score(sample("first"))
        server.fault = lambda body: web.Response(status=401)
        scoring = asyncio.create_task(client.score(sample("second")))
        await until(lambda: server.asked.count("s/second") > 1)
        server.fault = lambda body: None
        [found] = await scoring
    assert found.valid


@pytest.mark.parametrize("status", REFUSALS)
async def test_samples_that_an_answering_endpoint_refuses_are_invalid_with_the_status(status):
    spec = reward(function=None, http=EXTERNAL, failurePolicy={"retries": 1})
    refused = [f"odd {i}" for i in range(8)]
    async with Refusing(status, refused) as endpoint, connected(spec) as client:
        [first] = await client.score(sample("fine"))
        found = await asyncio.gather(*(client.score(sample(text)) for text in refused))  # as of one prompt, at the end
        [last] = await client.score(sample("fine again"))
    assert (first.valid, last.valid) == (True, True)
    assert {(each.reason, each.message) for [each] in found} == {("exception", f"{status} not this one")}
    assert endpoint.num_refused == 8 * 3, "each is sent a second time, and then retried as failurePolicy says"


async def test_endpoint_that_refuses_everything_for_a_while_costs_no_sample():
    spec = reward(function=None, http=EXTERNAL, failurePolicy={"retries": 0})
    async with Refusing(404) as endpoint, connected(spec) as client:
        [first] = await client.score(sample("fine"))
        endpoint.is_away = True
        scored = asyncio.gather(*(client.score(sample(f"fine {i}")) for i in range(8)))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while endpoint.num_refused < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        endpoint.is_away = False
        found = await scored
    assert first.valid
    assert all(each.valid for [each] in found), "404 of a route that is away for a minute"


AWAY = {
    "404": lambda body: web.Response(status=404, text="default backend"),
    "500": lambda body: web.Response(status=500, text="no database"),
    "hangs": lambda body: asyncio.sleep(60),
}


@pytest.mark.parametrize("kind", AWAY)
async def test_endpoint_that_is_away_costs_no_sample_and_then_the_job(kind):
    spec = reward(function=None, http=EXTERNAL, timeoutSeconds=0.2, failurePolicy={"retries": 0})
    outages = Outages(2.0)
    async with Faulty() as endpoint, connected(spec, outages) as client:
        await client.score(sample("fine"))
        endpoint.fault = AWAY[kind]
        waiting = asyncio.gather(*(client.score(sample(f"{i}")) for i in range(4)))
        await until(outages.is_open)
        assert outages.describe().startswith(f"waits for spec.rewards[0].http ({EXTERNAL['url']}), away for 1 s: ")
        endpoint.fault = lambda body: None
        assert all(each.valid for [each] in await waiting)
        assert not outages.is_open()
        assert outages.seconds() > 1
        endpoint.fault = AWAY[kind]
        with pytest.raises(OutageError, match=r"^spec.rewards\[0\].http .* make it answer at its url"):
            await client.score(sample("last"))


async def test_what_answered_before_a_restart_of_the_driver_is_no_wrong_configuration():
    spec, outages = reward(function=None, http=EXTERNAL), Outages()
    outages.recall([f"spec.rewards[0].http ({EXTERNAL['url']})"])
    async with Refusing(404, is_away=True) as endpoint, connected(spec, outages) as client:
        scoring = asyncio.create_task(client.score(sample("fine")))
        await until(lambda: endpoint.num_refused > 1)
        endpoint.is_away = False
        [found] = await scoring
    assert found.valid


async def test_error_next_to_the_scores_of_an_endpoint_makes_them_invalid():
    spec = reward(function=None, http=EXTERNAL | {"protocol": "openrlhf"}, failurePolicy={"retries": 0})
    for error, text in (("out of memory", "out of memory"), ({"code": 3}, '{"code": 3}'), (["bad"], "bad")):
        async with Servers([lambda error=error: web.json_response({"rewards": [0.0], "error": error})]):
            found = await score(spec)
        assert (found.reason, found.message) == ("exception", f"the endpoint returned an error: {text}")
    for nothing in (None, "", [], [None]):
        async with Servers([lambda error=nothing: web.json_response({"rewards": [0.5], "error": error})]):
            assert (await score(spec)).score == 0.5
    async with Servers([lambda: web.json_response({"id": "r", "valid": True, "score": 0.0, "error": "x"})]):
        found = await score(reward(function=None, http=EXTERNAL, failurePolicy={"retries": 0}))
    assert found.reason is InvalidReason.BAD_RETURN


async def test_endless_response_costs_one_result():
    url = f"http://{ADDRESSES[0]}:{PORT_SERVICE}/v1/score"
    spec = reward(function=None, http={"url": url}, failurePolicy={"retries": 0})
    async with Servers([lambda: web.Response(body=b'{"id": "r", ' + b" " * (1 << 20))]):
        found = await score(spec)
    assert found.reason is InvalidReason.BAD_RETURN
    assert found.message.startswith("the response is too long for a result: ")


async def test_text_is_sent_as_valid_utf_8():
    request = REQUEST.model_copy(update={"completion": "2\ud83d \U0001f600", "extra_info": {"x": float("nan")}})
    async with Servers([lambda: result(1.0)]) as servers:
        assert (await score(reward(), request)).valid
    assert servers.bodies[0]["completion"] == "2? \U0001f600"


async def test_data_without_a_json_form_costs_one_result_without_a_request():
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    async with Servers([lambda: result(1.0)]) as servers:
        found = await score(reward(), REQUEST.model_copy(update={"ground_truth": deep}))
    assert found.reason is InvalidReason.BAD_REQUEST
    assert "cannot be sent as JSON" in found.message
    assert servers.asked == []


async def test_data_that_the_server_cannot_read_is_not_sent_again():
    async with Servers([lambda: result(reason="bad_request")]) as servers:
        assert (await score(reward())).reason is InvalidReason.BAD_REQUEST
    assert len(servers.asked) == 1


async def test_replicas_that_are_away_for_long_end_the_job():
    async with connected(reward(), Outages(0.5)) as client:
        with pytest.raises(
            OutageError, match=r"^spec.rewards\[0\].function \(rewards\): .* see `kubectl rljob explain`"
        ):
            await client.score(REQUEST)


async def test_sample_that_alone_breaks_its_connection_is_unreachable():
    """Others are answered meanwhile, so the reward is not away."""
    is_poison = lambda body: body["id"] == "s/poison"  # noqa: E731
    async with (
        Faulty(lambda body: "hang up" if is_poison(body) else None),
        connected(reward(deadlineSeconds=1)) as client,
    ):
        poison, fine = asyncio.create_task(client.score(sample("poison"))), []
        while not poison.done():
            fine += await client.score(sample("fine"))
        [found] = await poison
    assert any(each.valid for each in fine)
    assert found.reason is InvalidReason.UNREACHABLE


async def test_external_endpoint_gets_no_token_and_may_use_openrlhfs_protocol():
    url = f"http://{ADDRESSES[0]}:{PORT_SERVICE}/v1/score"
    spec = Reward.model_validate({"name": "r", "http": {"url": url, "protocol": "openrlhf"}})
    async with Servers([lambda: web.json_response({"rewards": [0.25]})]) as servers:
        found = await score(spec)
    assert found.score == 0.25
    assert servers.bodies == [{"query": ["1 2 3"], "prompts": ["1 2"], "labels": ["2"]}]
    assert "Authorization" not in servers.headers[0], "the job's token must not leave the job"


async def test_several_rewards_score_concurrently():
    specs = [reward(), reward(name="s", weight=2.0)]
    async with Servers([lambda: result(0.5)]), open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        rewards = RewardClients(specs, session)
        await rewards.start()
        found = await score_alone(rewards, REQUEST)
        await rewards.close()
    assert {name: r.score for name, r in found.items()} == {"r": 0.5, "s": 0.5}


class SlowServers(Servers):
    """They respond once `go` is set."""

    def __init__(self, addresses=ADDRESSES):
        super().__init__([result()], addresses)
        self.go = asyncio.Event()

    async def handle(self, request):
        body = await request.json()
        self.asked.append(request.transport.get_extra_info("sockname")[0])
        await self.go.wait()
        return web.json_response({"id": body["id"], "valid": True, "score": 1.0, "execute_seconds": 2.0})


async def until(condition):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def write_hosts(addresses):
    Path(os.environ["RLJOB_HOSTS_FILE"]).write_text("\n".join(f"{address} rewards" for address in addresses))


async def test_replica_that_appears_during_a_burst_gets_its_share():
    write_hosts(ADDRESSES[:1])
    async with SlowServers() as servers, open_session() as session, asyncio.TaskGroup() as tasks:
        client = RewardClient(reward(slots=2), session)
        await client.start()
        for i in range(12):
            tasks.create_task(client.score(REQUEST.model_copy(update={"id": f"r{i}"})))
        await until(lambda: len(servers.asked) == 4)
        demand = FORECAST.demand_on(client.load())
        assert (demand.in_flight, demand.waiting) == (12, 8), "two per slot are sent, the others wait in the driver"
        write_hosts(ADDRESSES)
        await until(lambda: servers.asked.count(ADDRESSES[1]) == 4)
        servers.go.set()
        await until(lambda: not client.in_flight)
        await client.close()


async def test_samples_wait_while_scaled_to_zero():
    write_hosts([])
    scaled = reward(timeoutSeconds=0.001, slots=2, autoscaling={"minReplicas": 0, "maxReplicas": 2})
    async with SlowServers() as servers, open_session() as session, asyncio.TaskGroup() as tasks:
        servers.go.set()
        rewards = RewardClients([scaled], session)
        await rewards.start()
        asked = [tasks.create_task(score_alone(rewards, REQUEST.model_copy(update={"id": f"r{i}"}))) for i in range(5)]
        await until(lambda: rewards.clients["r"].replicas.num_waiting == 5)
        assert "no replica exists yet" in rewards.describe_wait(5, 5)
        demand = rewards.demand(FORECAST)["r"]
        assert (demand.waiting, demand.oldest_in_flight_seconds) == (5, 0.0), "a waiting request is not in flight"
        client = rewards.clients["r"]
        first = client.statistics()["waiting_oldest_seconds"]
        await until(lambda: client.statistics()["waiting_oldest_seconds"] > first)
        assert client.statistics()["waiting"] == 5
        write_hosts(ADDRESSES)
        await until(lambda: all(task.done() for task in asked))
        statistics = client.statistics()
        assert (statistics["waiting"], statistics["waiting_oldest_seconds"]) == (0, 0.0)
        assert all(task.result()["r"].valid for task in asked)
        await rewards.close()


async def test_demand_latency_includes_retries():
    responses = [
        web.json_response({"id": "r", "valid": False, "reason": "exception", "execute_seconds": 3.0}),
        web.json_response({"id": "r", "valid": True, "score": 1.0, "execute_seconds": 2.0}),
    ]
    async with Servers(responses), open_session() as session:
        client = RewardClient(reward(), session)
        await client.start()
        assert FORECAST.demand_on(client.load()).latency_seconds is None, "unknown, not zero"
        await client.score(REQUEST)
        await client.close()
    demand = FORECAST.demand_on(client.load())
    assert (demand.latency_seconds, demand.latency_p95_seconds) == (5.0, 5.0)
    assert (demand.samples, demand.expected, demand.due_seconds) == (5120, 5000, 40.0)
