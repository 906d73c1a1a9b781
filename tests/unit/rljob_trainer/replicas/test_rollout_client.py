"""The rollout client: its requests to vLLM, and the responses that it accepts."""

import asyncio

import pytest
from aiohttp import web

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.roles import RolloutRole, Sampling
from rljob_api.wire.contract import PORT_ROLLOUT
from rljob_api.wire.protocol import RolloutWeights, WeightManifest
from rljob_trainer.replicas import fleet
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.rollout_client import RolloutClient, build_payload, parse_completion
from tests.support.loopback import next_address

ADDRESS = next_address()
MANIFEST = WeightManifest(generation="g", version=1, url="http://x", num_bytes=1, sha256="s", checksum="c")


def choice(**fields):
    base = {"text": "31", "token_ids": [5, 6, 2], "finish_reason": "stop"}
    return base | {"logprobs": {"token_logprobs": [-0.1, -0.2, -0.3]}} | fields


def test_payload_requests_sampled_tokens_and_their_log_probs():
    payload = build_payload([1, 2], Sampling(temperature=0.7, top_k=0, stop=["\n"]), seed=9)
    assert payload["prompt"] == [1, 2], "tokens, not text"
    assert (payload["logprobs"], payload["return_token_ids"], payload["seed"]) == (0, True, 9)
    assert payload["top_k"] == -1, "vLLM's value for off"
    assert build_payload([1], Sampling(top_k=5), 0)["top_k"] == 5


def test_completion_keeps_its_end_of_sequence_token():
    found = parse_completion({"choices": [choice()]}, "g:1")
    assert found.token_ids == [5, 6, 2]
    assert found.logprobs == [-0.1, -0.2, -0.3]
    assert not found.truncated
    assert parse_completion({"choices": [choice(finish_reason="length")]}, "g:1").truncated


@pytest.mark.parametrize("fields", [{"finish_reason": "abort"}, {"token_ids": [5]}, {"finish_reason": None}])
def test_response_that_cannot_be_trained_on_is_rejected(fields):
    with pytest.raises(ValueError, match=r"ended with|one log-prob per token"):
        parse_completion({"choices": [choice(**fields)]}, "g:1")


class Server:
    def __init__(self, responses):
        self.responses, self.num_requests = list(responses), 0
        self.weights = RolloutWeights(generation="g", version=1, sha256="s", checksum="c")

    async def complete(self, request):
        self.num_requests += 1
        return self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]

    async def serve_weights(self, request):
        return web.json_response(self.weights.model_dump())

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/rljob/weights", self.serve_weights)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, ADDRESS, PORT_ROLLOUT).start()
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


@pytest.fixture
async def rollouts(tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{ADDRESS} rollouts")
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(hosts))
    monkeypatch.setenv("RLJOB_ROLLOUT_SERVICE", "rollouts")
    monkeypatch.setattr(fleet, "_INITIAL_BACKOFF_SECONDS", 0.02)
    async with open_session() as session, asyncio.timeout(20):
        rollouts = RolloutClient(RolloutRole(), session)
        await rollouts.start()
        yield rollouts
        await rollouts.close()


def completion(**headers):
    return web.json_response({"choices": [choice()]}, headers=headers)


async def test_completion_of_other_weights_is_retried(rollouts):
    stale = completion(**{"x-rljob-weights": "g:0"})
    changed = completion(**{"x-rljob-weights": "g:1", "x-rljob-weights-begin": "g:0"})
    good = completion(**{"x-rljob-weights": "g:1", "x-rljob-weights-begin": "g:1"})
    async with Server([stale, changed, good]) as server:
        await rollouts.sync(MANIFEST)
        found = await rollouts.complete([1], Sampling(), 0)
    assert server.num_requests == 3
    assert (found.generation, set(found.versions)) == ("g", {1})


async def test_prompt_that_vllm_rejects_is_a_user_error(rollouts):
    async with Server([web.Response(status=400, text="maximum context length is 256 tokens")]):
        await rollouts.sync(MANIFEST)
        with pytest.raises(UserError, match=r"256 tokens.*maxPromptTokens"):
            await rollouts.complete([1], Sampling(), 0)


async def test_job_stops_when_every_rollout_serves_a_wrong_digest(rollouts):
    messages = []
    rollouts.on_mismatch = messages.append
    async with Server([completion()]) as server:
        server.weights.checksum = "other"
        with pytest.raises(TransientError, match="differs from the trainer's"):
            await rollouts.sync(MANIFEST)
    assert "digest other, but the trainer published c" in messages[0]


async def test_wait_for_weights_is_described(rollouts):
    assert rollouts.describe_wait() == ""
    rollouts.replicas.fleet.required_key = "g:1"
    assert "waits for a rollout to serve weights g:1" in rollouts.describe_wait()
