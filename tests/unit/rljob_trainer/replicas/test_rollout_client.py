"""The rollout client: which replica serves a request, and the completions that it accepts."""

import asyncio
import json

import pytest
from aiohttp import web

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.roles import RolloutRole, Sampling
from rljob_api.tracing import spans
from rljob_api.wire.contract import PORT_ROLLOUT
from rljob_api.wire.weights import PullReport, RolloutWeights, WeightManifest
from rljob_trainer.episodes.types import Completion, PromptTooLongError
from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.replicas import fleet, generate
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.pull_reports import PullReports
from rljob_trainer.replicas.rollout_client import RolloutClient, judge_versions, list_addresses
from tests.support import seconds
from tests.support.loopback import next_address
from tests.support.traces import recording
from tests.support.waiting import DEADLINE_SECONDS

ADDRESS = next_address()
NAME = f"{ADDRESS}:{PORT_ROLLOUT}"
MANIFEST = WeightManifest(generation="g", version=1, url="http://x", num_bytes=1, file_hash="s", checksum="c")


def events(*versions, **fields):
    """The events of a response whose tokens were sampled by these versions, one per event."""
    spans = [{"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)]
    for i in range(len(versions)):
        is_last = i == len(versions) - 1
        yield {
            "choices": [
                {
                    "text": f"{i} ",
                    "token_ids": [i + 5],
                    "logprobs": {"content": [{"logprob": -0.1}]},
                    "finish_reason": "stop" if is_last else None,
                    "weight_versions": spans if is_last else None,
                }
                | (fields if is_last else {})
            ]
        }


class Server:
    """Answers each request with the next of `answers`: a response, or the events of a stream. The last one stays."""

    def __init__(self, *answers):
        self.answers = [answer if isinstance(answer, web.Response) else list(answer) for answer in answers]
        self.requests = []
        self.weights = RolloutWeights(generation="g", version=1, file_hash="s", checksum="c")
        self.seconds_between_events = 0.0
        self.context_length = 256
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def complete(self, request):
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, web.Response):
            return answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        hangs = self.hangs
        for event in answer:
            await hangs.wait()
            await asyncio.sleep(self.seconds_between_events)
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve_weights(self, request):
        return web.json_response(self.weights.model_dump())

    async def serve_models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": self.context_length}]})

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post(generate.PATH, self.complete)
        app.router.add_post("/tokenize", self.complete)
        app.router.add_get("/rljob/weights", self.serve_weights)
        app.router.add_get("/v1/models", self.serve_models)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, ADDRESS, PORT_ROLLOUT).start()
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


@pytest.fixture
async def make_client(tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{ADDRESS} rollouts")
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(hosts))
    monkeypatch.setenv("RLJOB_ROLLOUT_SERVICE", "rollouts")
    monkeypatch.setattr(fleet, "_INITIAL_BACKOFF_SECONDS", 0.02)
    clients = []
    async with open_session() as session, asyncio.timeout(DEADLINE_SECONDS):

        async def make(**options):
            role = seconds.validate(RolloutRole, options.pop("role", {}))
            clients.append(RolloutClient(role, session, **options))
            await clients[-1].start()
            return clients[-1]

        yield make
        for client in clients:
            await client.close()


@pytest.fixture
async def rollouts(make_client):
    return await make_client()


async def until(condition):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - any state of a client
            await asyncio.sleep(0.005)


def replica_of(client):
    return client.replicas.fleet.replicas[NAME]


async def test_completion_has_exact_tokens_log_probs_and_versions(rollouts):
    async with Server(events("g:1", "g:1", "g:1")) as server:
        await rollouts.sync(MANIFEST)
        found = await rollouts.complete([1, 2], Sampling(max_tokens=512), seed=9)
    assert found == Completion([5, 6, 7], [-0.1] * 3, [1] * 3, "0 1 2 ", truncated=False, generation="g")
    [request] = server.requests
    assert (request["token_ids"], request["cache_salt"], request["sampling_params"]["seed"]) == ([1, 2], "g:1", 9)


async def test_each_attempt_is_a_span_with_its_status_or_its_error(rollouts):
    unreadable = web.Response(text="data: {]\n\n", content_type="text/event-stream")
    async with Server(web.Response(status=503), unreadable, events("g:1")):
        await rollouts.sync(MANIFEST)
        with recording() as recorded:
            with spans.root("episode", {}):
                await rollouts.complete([1], Sampling(max_tokens=8), 0)
            attempts = [each for each in recorded.spans() if each.kind == "client"]
    assert [each.attributes["http.response.status_code"] for each in attempts] == [503, 200, 200]
    assert [each.failed for each in attempts] == [True, True, False]
    assert {(each.attributes["server.address"], each.attributes["server.port"]) for each in attempts} == {
        (ADDRESS, PORT_ROLLOUT)
    }


async def test_special_tokens_end_a_completion_by_their_ids(make_client):
    rollouts = await make_client(special_ids={"<|im_end|>": 2})
    async with Server(events("g:1")) as server:
        await rollouts.sync(MANIFEST)
        await rollouts.complete([1], Sampling(max_tokens=8, stop=["END", "<|im_end|>"]), 0)
    [request] = server.requests
    assert (request["sampling_params"]["stop"], request["sampling_params"]["stop_token_ids"]) == (["END"], [2])


async def test_completion_of_other_weights_is_retried(rollouts):
    stale, changed, started = events("g:0"), events("g:1", "g:2"), events("default")
    async with Server(stale, changed, started, events("g:1")) as server:
        await rollouts.sync(MANIFEST)
        found = await rollouts.complete([1], Sampling(max_tokens=512), 0)
    assert len(server.requests) == 4
    assert (found.generation, found.versions) == ("g", [1])


async def test_completion_that_spans_an_update_is_accepted_if_the_schedule_allows_it(make_client):
    rollouts = await make_client(spans_updates=True)
    async with Server(events("g:1", "g:2", "g:2")) as server:
        await rollouts.sync(MANIFEST)
        found = await rollouts.complete([1], Sampling(max_tokens=512), 0)
    assert len(server.requests) == 1
    assert found.versions == [1, 2, 2]
    assert replica_of(rollouts).num_failures == 0


async def test_update_during_a_request_does_not_count_as_a_failure(rollouts):
    async with Server(events("g:1", "g:2"), events("g:2")) as server:
        await rollouts.sync(MANIFEST)
        server.weights.version = 2
        request = asyncio.create_task(rollouts.complete([1], Sampling(max_tokens=512), 0))
        await until(lambda: server.requests and not replica_of(rollouts).serves)
        assert replica_of(rollouts).num_failures == 0
        await rollouts.sync(MANIFEST.model_copy(update={"version": 2}))
        assert (await request).versions == [2]
    assert server.requests[1]["cache_salt"] == "g:2"


@pytest.mark.parametrize(
    ("versions", "generation", "on_policy", "in_flight"),
    [
        ([3, 3], "g", "accept", "accept"),
        ([3, 5], "g", "updated", "accept"),
        ([5, 5], "g", "updated", "accept"),
        ([2, 3], "g", "foreign", "foreign"),
        ([3, 3], "h", "foreign", "foreign"),
    ],
)
def test_completion_never_has_a_token_of_older_or_unknown_weights(versions, generation, on_policy, in_flight):
    completion = Completion([1, 2], [0.0, 0.0], versions, "", truncated=False, generation=generation)
    assert judge_versions(completion, "g:3", spans_updates=False) == on_policy
    assert judge_versions(completion, "g:3", spans_updates=True) == in_flight


async def test_long_completion_outlives_the_timeout_while_tokens_arrive(make_client):
    rollouts = await make_client(role={"stallTimeoutSeconds": 0.5})
    async with Server(events(*["g:1"] * 40)) as server:
        server.seconds_between_events = 0.02
        await rollouts.sync(MANIFEST)
        found = await rollouts.complete([1], Sampling(max_tokens=512), 0)
    assert len(found.token_ids) == 40
    assert len(server.requests) == 1, "0.8 s are more than the timeout"
    assert replica_of(rollouts).num_failures == 0


async def test_request_without_tokens_is_retried_after_the_timeout(make_client):
    rollouts = await make_client(role={"stallTimeoutSeconds": 0.1})
    async with Server(events("g:1")) as server:
        await rollouts.sync(MANIFEST)
        server.hangs.clear()
        request = asyncio.create_task(rollouts.complete([1], Sampling(max_tokens=512), 0))
        await until(lambda: replica_of(rollouts).num_failures)
        server.hangs.set()
        assert (await request).token_ids == [5]
    assert len(server.requests) >= 2


async def test_replica_that_serves_others_stays_in_use_when_a_request_gets_no_token(make_client):
    rollouts = await make_client(role={"stallTimeoutSeconds": 0.3})
    async with Server(events("g:1"), events(*["g:1"] * 60)) as server:
        await rollouts.sync(MANIFEST)
        server.hangs.clear()
        queued = asyncio.create_task(rollouts.complete([1], Sampling(max_tokens=512), 0))
        await until(lambda: server.requests)
        server.hangs, server.seconds_between_events = asyncio.Event(), 0.02
        server.hangs.set()  # for the second request: it takes 1.2 s
        suspects = []
        rollouts.replicas.fleet.record_suspect = lambda address, now: suspects.append(address)
        other = asyncio.create_task(rollouts.complete([2], Sampling(max_tokens=512), 0))
        await until(lambda: len(server.requests) == 3 or suspects)
        assert not suspects
        assert len((await other).token_ids) == len((await queued).token_ids) == 60


@pytest.mark.parametrize(
    ("num_tokens", "error", "match"),
    [
        (255, UserError, r"bad value.*maxPromptTokens"),
        (256, PromptTooLongError, r"256 tokens, and the context of the rollouts has 256"),
    ],
)
async def test_prompt_that_vllm_rejects_is_too_long_or_a_user_error(rollouts, num_tokens, error, match):
    rejected = {"error": {"message": "bad value", "code": 400}}
    async with Server(web.json_response(rejected, status=400), [rejected]):
        await rollouts.sync(MANIFEST)
        for _ in range(2):  # before the stream, and as its only event
            with pytest.raises(error, match=match):
                await rollouts.complete([1] * num_tokens, Sampling(max_tokens=512), 0)
    assert replica_of(rollouts).num_failures == 0


async def test_stream_that_ends_early_or_with_an_error_is_retried(rollouts):
    first, *_ = events("g:1", "g:1")
    failed = {"error": {"message": "Internal server error", "code": 500}}
    async with Server([first], [first, failed], events("g:1", "g:1")) as server:
        await rollouts.sync(MANIFEST)
        assert (await rollouts.complete([1], Sampling(max_tokens=512), 0)).token_ids == [5, 6]
    assert len(server.requests) == 3


async def test_job_stops_when_every_rollout_serves_a_wrong_digest(make_client, caplog):
    mismatches = []
    rollouts = await make_client(on_mismatch=lambda: mismatches.append(1))
    async with Server(events("g:1")) as server:
        server.weights.checksum = "other"
        with pytest.raises(TransientError, match="differs from the trainer's"):
            await rollouts.sync(MANIFEST)
    assert mismatches == [1]
    assert "digest other, but the trainer published c" in caplog.text


async def test_new_weights_wait_no_longer_than_the_job_for_rollouts_that_are_away(make_client):
    rollouts = await make_client(outages=Outages(0.3))
    with pytest.raises(OutageError, match=r"^spec.rollout \(.*\): away since"):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await rollouts.sync(MANIFEST)
    assert not rollouts.replicas.is_awaited


async def test_job_stops_when_no_rollout_can_apply_the_weights(make_client):
    rollouts = await make_client(stall_seconds=0.3)
    async with Server(events("g:1")) as server:
        server.weights = RolloutWeights(generation="g", version=0, error="weights g:1: no space left")
        with pytest.raises(TransientError, match=rf"g:1 for 0 s: {NAME}: weights g:1: no space left"):
            async with asyncio.timeout(DEADLINE_SECONDS):
                await rollouts.sync(MANIFEST)


async def test_job_waits_for_weights_while_a_rollout_makes_progress(make_client):
    reports = PullReports()
    rollouts = await make_client(stall_seconds=3, reports=reports)
    started = rollouts.replicas.now()
    rollouts.replicas.now = lambda: started + len(times)
    times = []
    async with Server(events("g:1")) as server:
        server.weights = RolloutWeights(generation="g", version=0, error="no space left")
        sync = asyncio.create_task(rollouts.sync(MANIFEST))
        for progress in range(10):
            await asyncio.sleep(0.03)  # it looks whether one is nearer
            times.append(progress)
            reports.record(PullReport(replica="other", key="g:1", progress=progress), rollouts.replicas.now())
        server.weights = RolloutWeights(generation="g", version=1, file_hash="s", checksum="c")
        assert list(await sync) == [NAME]


async def test_wait_for_weights_is_described(make_client):
    reports = PullReports()
    rollouts = await make_client(reports=reports)
    assert rollouts.describe_wait() == ""
    rollouts.replicas.fleet.required_key = "g:1"
    assert rollouts.describe_wait().startswith("waits for a rollout to serve weights g:1 (0 of")
    reports.record(PullReport(replica="10.0.0.7", key="g:1", error="no space left"), rollouts.replicas.now())
    assert rollouts.describe_wait().endswith(": 10.0.0.7: no space left")


def test_replicas_of_one_pod_have_consecutive_ports(tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("10.0.0.7 trainers\n10.0.0.8 trainers\n")
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(hosts))
    expected = [f"10.0.0.{host}:{PORT_ROLLOUT + number}" for host in (7, 8) for number in (0, 1)]
    assert list_addresses("trainers", 2) == expected
    monkeypatch.setenv("RLJOB_PORT_OFFSET", "100")
    assert list_addresses("trainers", 1) == [f"10.0.0.{host}:{PORT_ROLLOUT + 100}" for host in (7, 8)]


async def test_a_prompt_is_scored_and_a_text_tokenized_by_a_replica(make_client):
    scores = {"choices": [], "prompt_logprobs": [None, {"6": {"logprob": -0.5}}, {"7": {"logprob": -1.5}}]}
    broken = web.Response(status=500)
    aborted = web.json_response({"choices": [], "prompt_logprobs": [None]})  # by an engine that ends
    async with Server(broken, aborted, web.json_response(scores), web.json_response({"tokens": [5, 6]})) as server:
        client = await make_client()
        await client.sync(MANIFEST)
        assert (await client.score([5, 6, 7])).tolist() == [-0.5, -1.5], "the request is repeated"
        assert server.requests[-1]["sampling_params"]["prompt_logprobs"] == 0
        assert server.requests[-1]["cache_salt"] == "g:1"
        assert await client.tokenize("x") == [5, 6]
    assert server.requests[-1] == {"model": "policy", "prompt": "x", "add_special_tokens": False}


async def test_a_prompt_is_scored_with_its_likeliest_tokens(make_client):
    entry = {"6": {"logprob": -3.0}, "8": {"logprob": -1.5}, "9": {"logprob": -0.5}}
    async with Server(web.json_response({"prompt_logprobs": [None, entry]})) as server:
        client = await make_client()
        await client.sync(MANIFEST)
        found = await client.score([5, 6], 2)
        assert found["logprob"].tolist() == [-3.0]
        assert found["top"].tolist() == [[(9, -0.5), (8, -1.5)]]
        assert server.requests[-1]["sampling_params"]["prompt_logprobs"] == 2


async def test_an_engine_that_refuses_to_score_prompts_is_not_asked_again(make_client):
    async with Server(web.json_response({"error": {}}, status=400)) as server:
        client = await make_client()
        await client.sync(MANIFEST)
        assert await client.score([5, 6, 7]) is None
        assert len(server.requests) == 1
