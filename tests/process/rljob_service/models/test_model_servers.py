"""Real reward servers with a judge or a classifier: readiness, exit codes, the API key, and shared limits.

The unit tests of models cover scores and failures in this process.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from rljob_api.wire.contract import ExitCode
from tests.support.fake_endpoint import completion
from tests.support.fake_vllm import FakeVllm
from tests.support.judge_servers import new_address
from tests.support.reward_process import Server, build_group
from tests.support.waiting import DEADLINE_SECONDS, wait_for

KEY = "sk-very-secret-key"


def test_judge_scores_samples_and_never_shows_its_key(start_judge, endpoint):
    endpoint.reset(lambda body, number: completion(f"Score: {body['messages'][0]['content'][-1]}"))
    reference = {"apiKeySecretRef": {"name": "keys", "key": "OPENAI"}}
    server = start_judge({"endpoint": reference}, {"RLJOB_JUDGE_API_KEY": KEY})
    assert server.score("4")["score"] == 4.0
    assert endpoint.keys == [f"Bearer {KEY}"]
    assert server.metric('rljob_reward_calls_total{outcome="200",reward="test"}') == 1
    assert KEY not in server.log.read_text()


def test_judge_compares_groups(start_judge, endpoint):
    endpoint.reset(lambda body, number: completion('{"order": [2, 1]}'))
    judge = {
        "compare": "ranking",
        "template": "{{ completions }}",
        "parser": {"jsonSchema": {"type": "object"}, "scorePath": "order"},
    }
    result = start_judge(judge, scope="group").score_group(build_group("a", "b"))
    assert [each.score for each in result.results] == [0.0, 1.0]


def test_invalid_judge_exits_with_the_user_error_code(start_judge):
    server = start_judge({"template": "{{ completon }}"}, wait=False)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    assert "judge.template:1: unknown variable completon" in server.log.read_text()


def test_replicas_divide_the_limits(start_judge, endpoint, tmp_path):
    hosts = tmp_path / "hosts"
    addresses = [new_address(), new_address()]
    hosts.write_text("".join(f"{address} judges\n" for address in addresses))
    environment = {"RLJOB_PEERS": "judges", "RLJOB_HOSTS_FILE": str(hosts)}
    judge = {"endpoint": {"limits": {"concurrency": 4}}}
    servers = [start_judge(judge, environment, host=address, replicas=2, wait=False) for address in addresses]
    for server in servers:
        wait_for(server.is_ready, "the server to be ready")
        assert server.metric("rljob_reward_limit_peers") == 2
    endpoint.reset(lambda body, number: completion("Score: 1"))
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: servers[i % 2].score(f"x{i}"), range(20)))
    assert all(result["valid"] for result in results)
    assert endpoint.max_in_flight <= 4


@pytest.fixture
def start_classifier(tmp_path):
    """start_classifier(socket): a server with a classifier."""
    servers: list[Server] = []

    def start(socket: str) -> Server:
        reward = {"name": "test", "model": {"source": "/m"}, "timeoutSeconds": 5}
        (tmp_path / "service.yaml").write_text(yaml.safe_dump(reward))
        servers.append(Server(tmp_path, new_address(), ["--grace", "2"], {"RLJOB_VLLM_SOCKET": socket}))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_classifier_is_ready_only_while_vllm_is_up(start_classifier):
    with tempfile.TemporaryDirectory(prefix="rm-") as folder:  # the path of a socket must be short
        socket = f"{folder}/socket"
        server = start_classifier(socket)
        wait_for(lambda: "waiting for vLLM" in server.log.read_text(), "the server to wait")
        assert not server.is_ready()
        vllm = FakeVllm(socket, 0.5)
        wait_for(server.is_ready, "the server to be ready")
        assert server.score("four")["score"] == 0.5
        vllm.close()
        wait_for(lambda: not server.is_ready(), "the server to be unready")
        os.unlink(socket)
        vllm = FakeVllm(socket, 0.25)
        wait_for(server.is_ready, "the server to be ready again")
        assert server.score("six")["score"] == 0.25
        vllm.close()
