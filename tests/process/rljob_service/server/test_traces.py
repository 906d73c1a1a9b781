"""One trace over the driver's clients, real servers of rewards, a judge's endpoint, and the user's code."""

import contextlib
import http.client
import json
import subprocess
import sys
import time

import pytest
from aiohttp import web

from rljob_api.manifest.services.reward import Reward
from rljob_api.tracing import spans
from rljob_api.wire.scores import ScoreRequest
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RewardClients
from tests.support.fake_endpoint import Endpoint, completion
from tests.support.judge_servers import judge_reward, new_address, start_judge
from tests.support.reward_process import TOKEN
from tests.support.traces import Collector, Trace, group_traces, recording
from tests.support.waiting import DEADLINE_SECONDS, wait_for

__all__ = ["start_judge"]

FUNCTION = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "pred": os.environ.get("TRACEPARENT", "none")}
"""
SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(600)
"""
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def collector():
    running = Collector(new_address())
    yield running
    running.close()


@pytest.fixture(scope="module")
def traced(collector):
    """Return what sends a server's spans to the collector, soon."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "20"}


@pytest.fixture(scope="module")
def endpoint():
    running = Endpoint(new_address())
    yield running
    running.close()


async def score(rewards, servers, monkeypatch, folder):
    """Score one sample in an episode, with the driver's clients, and return the results."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{server.host} {name}\n" for name, server in servers.items()))
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(hosts))
    monkeypatch.setenv("RLJOB_TOKEN", TOKEN)
    monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({name: name for name in servers}))
    request = ScoreRequest(id="r1", prompt="2+2?", completion="4", ground_truth="4")
    async with open_session() as session:
        clients = RewardClients(rewards, session)
        await clients.start()
        try:
            clients.begin()
            with spans.root("episode", {}):
                return await clients.open_group("g", "train", 1).score(0, request, time.monotonic())
        finally:
            await clients.close()


async def test_a_function_and_a_judge_are_in_the_episodes_trace(
    start_server, start_judge, endpoint, traced, collector, monkeypatch, tmp_path
):
    def answer(body, number):
        return completion("Score: 0.5") if number else web.Response(status=429, headers={"Retry-After": "0"})

    endpoint.reset(answer)
    rewards = [
        Reward.model_validate({"name": "code", "function": {"inline": FUNCTION}}),
        Reward.model_validate(judge_reward(endpoint.url, {}, name="judge")),
    ]
    servers = {"code": start_server(FUNCTION, environment=traced), "judge": start_judge({}, traced)}
    with recording() as recorded:
        results = await score(rewards, servers, monkeypatch, tmp_path)
        collector.wait_for("execute", 2)
        collector.wait_for("POST /v1/score", 2)
        [trace] = group_traces([*recorded.spans(), *collector.spans()])
    assert [results[name].score for name in ("code", "judge")] == [1.0, 0.5]
    served = ["POST /v1/score", "queue"]
    chats = ["chat gpt-judge", "back off", "chat gpt-judge"]
    [code] = trace.named("reward code")
    [judge] = trace.named("reward judge")
    assert trace.names(code) == ["reward code", "queue", ["POST /v1/score", [*served, "execute"]]]
    assert trace.names(judge) == ["reward judge", "queue", ["POST /v1/score", [*served, ["execute", *chats]]]]
    execution = find_under(trace, code, "execute")
    assert results["code"].pred == f"00-{execution.trace}-{execution.id}-01", "the function works for its execution"
    first, second = trace.named("chat gpt-judge")
    sent = [each.get("traceparent") for each in endpoint.headers]
    assert sent == [f"00-{each.trace}-{each.id}-01" for each in (first, second)], "and so does the endpoint"
    assert (first.failed, first.attributes["error.type"], second.failed) == (True, "429", False)
    assert (second.kind, second.attributes["gen_ai.usage.input_tokens"]) == ("client", 70)
    assert {each.service for each in trace.spans} == {"test", "rljob-reward"}
    assert not any("Rate:" in str(each) or "Score:" in str(each) for each in trace.spans), "no text is recorded"


def find_under(trace: Trace, of, name):
    """Return the span with this name below `of`."""
    below = [of]
    while below:
        span = below.pop()
        if span.name == name:
            return span
        below += trace.children(span)
    raise AssertionError(name)


def post(server, name, traceparent=None, **fields):
    """Return the status and the body."""
    headers = {"Authorization": f"Bearer {TOKEN}", **({"traceparent": traceparent} if traceparent else {})}
    body = json.dumps({"id": name, "prompt": "2+2?", "completion": "4", "ground_truth": "4", **fields})
    connection = http.client.HTTPConnection(server.host, 8080, timeout=DEADLINE_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/score", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_only_what_belongs_to_a_recorded_trace_is_recorded(start_server, traced, collector):
    server = start_server(FUNCTION, environment=traced)
    for number, each in enumerate([None, PARENT.removesuffix("01") + "00", "nonsense\t\xff"]):
        assert post(server, f"no-{number}", each)[1]["pred"] == "none"
    assert post(server, "yes", PARENT)[1]["pred"].startswith(PARENT[:36])
    assert post(server, "yes", PARENT)[0] == 200, "again, from what is known"
    assert post(server, "refused", PARENT, completion=7)[0] == 422
    server.stop()  # it sends all that it has
    found = [each for each in collector.spans() if each.trace == PARENT[3:35]]
    executed = [each for each in found if each.name == "execute"]
    assert [each.attributes["rljob.request"] for each in executed] == ["yes"], "a retry executes nothing"
    assert sorted(each.attributes["http.response.status_code"] for each in found if each.kind == "server") == [
        200,
        200,
        422,
    ]
    assert {each.attributes.get("rljob.request") for each in collector.spans()} & {"no-0", "no-1", "no-2"} == set()


def test_a_client_that_leaves_ends_the_span(start_server, traced, collector):
    server = start_server(SLOW, environment=traced, timeoutSeconds=600)
    trace = "a" * 32
    connection = http.client.HTTPConnection(server.host, 8080, timeout=DEADLINE_SECONDS)
    headers = {"Authorization": f"Bearer {TOKEN}", "traceparent": f"00-{trace}-{'b' * 16}-01"}
    connection.request("POST", "/v1/score", json.dumps({"id": "r", "prompt": "", "completion": ""}), headers)
    wait_for(lambda: server.metric('rljob_reward_slots_in_use{lane="train"'), "the execution")
    connection.close()

    def find(name):
        return [each for each in collector.spans() if (each.trace, each.name) == (trace, name)]

    [left] = wait_for(lambda: find("POST /v1/score"), "the request's span")
    assert left.attributes["rljob.cancelled"] is True
    [execution] = wait_for(lambda: find("execute"), "the execution's span")
    assert execution.attributes["error.type"] == "cancelled"


def test_without_a_collector_no_module_of_opentelemetry_is_loaded():
    imports = "import sys, rljob_service.server.lifecycle, rljob_service.server.traces"
    program = f"{imports}; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_collector_that_is_away_does_not_delay_the_end(start_server):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    server = start_server(FUNCTION, environment=environment)
    assert post(server, "r1", PARENT)[0] == 200
    server.stop()
    assert server.process.returncode == 0
