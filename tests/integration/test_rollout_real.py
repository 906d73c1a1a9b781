"""A real vLLM replica during weight updates: it generates from the weights that it pulled, for authorized clients only.

All tests share one server, since its start takes most of the time, with a minimal head and the trainer's publisher. The
model is random and fp32, so that Hugging Face's forward is an exact reference.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Data
from rljob_api.manifest.roles import Sampling
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire import contract
from rljob_api.wire.scores import ScoreRequest, TokenSegment
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.conversation.transcript import Conversation
from rljob_trainer.episodes.types import Completion, told_dtype
from rljob_trainer.outages import Outages
from rljob_trainer.replicas.generate import PATH, ResponseReader, build_payload, build_score_payload, read_scores
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.hinted import HintedPolicy
from rljob_trainer.weights.store import WeightStore
from tests.support.episodes import listed
from tests.support.loopback import next_address
from tests.support.tiny_qwen3 import TINY_QWEN3
from tests.support.waiting import DEADLINE_SECONDS
from tests.support.weight_files import publish

pytestmark = pytest.mark.real

TOKEN = "real-test-token"
HEAD_IP, TRAINER_IP, ROLLOUT_IP = next_address(), next_address(), next_address()
BASE_URL = f"http://{ROLLOUT_IP}:{contract.PORT_ROLLOUT}"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
PROMPT = [11, 250, 37, 512, 99, 3]
START_SECONDS = 240
JOB: dict[str, Any] = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "real"},
    "spec": {
        "model": {"source": "/set/by/RLJOB_MODEL"},
        "data": {"train": {"source": "/not/read"}},
        "rewards": [{"name": "none", "function": {"inline": "def compute_score(*_): return 0.0"}}],
        "trainer": {"dtype": "float32"},
        "rollout": {"maxModelLen": 512, "kvCacheMemory": "256Mi", "sampling": {"maxTokens": 480}},
    },
}


class Head:
    """The head's endpoint for rollouts, in its own thread: the newest manifest, by long poll."""

    def __init__(self) -> None:
        self._manifest: WeightManifest | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def announce(self, manifest: WeightManifest) -> None:
        self._manifest = manifest

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get(contract.UrlPath.WEIGHTS_CURRENT, self._get_current)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, HEAD_IP, contract.PORT_DRIVER).start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _get_current(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == AUTHORIZED["Authorization"]
        deadline = time.monotonic() + float(request.query["timeout"])
        while time.monotonic() < deadline:
            if self._manifest and self._manifest.key != request.query["after"]:
                return web.json_response(text=self._manifest.model_dump_json())
            await asyncio.sleep(0.02)
        return web.Response(status=204)


class Replica:
    """The server's process, its publisher and head, and a reference model per version."""

    def __init__(
        self,
        folder: Path,
        trainer: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        """`trainer`, `rollout`, `sections`: more settings of these roles and sections."""
        self.folder = folder
        more = {"trainer": trainer or {}, "rollout": rollout or {}, **sections}
        spec = JOB["spec"] | {name: JOB["spec"][name] | settings for name, settings in more.items()}
        self.job = {**JOB, "spec": spec}
        self.head = Head()
        self.store = WeightStore(TRAINER_IP, TOKEN)
        self.references = [self.build(seed) for seed in range(3)]
        _save_model(self.references[0], folder / "model")
        self.process = self._start()

    @staticmethod
    def build(seed: int) -> Qwen3ForCausalLM:
        return _build_model(seed)

    def _start(self) -> subprocess.Popen[bytes]:
        (self.folder / "job.yaml").write_text(json.dumps(self.job))
        (self.folder / "hosts").write_text(f"{HEAD_IP} head\n")
        environment = os.environ | {
            contract.ENV_JOB_FILE: str(self.folder / "job.yaml"),
            contract.ENV_HOSTS_FILE: str(self.folder / "hosts"),
            contract.ENV_HEAD: "head",
            contract.ENV_POD_IP: ROLLOUT_IP,
            contract.ENV_TOKEN: TOKEN,
            "RLJOB_MODEL": str(self.folder / "model"),
            "HF_HUB_OFFLINE": "1",
        }
        self.log = self.folder / "rollout.log"
        command = [sys.executable, "-m", "rljob_trainer.rollout"]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def publish(self, generation: str, version: int, reference: int) -> WeightManifest:
        """Publish and announce the weights of one of the reference models."""
        manifest = publish(self.store, self.references[reference].state_dict(), generation, version)
        self.head.announce(manifest)
        return manifest

    def close(self) -> None:
        self.process.terminate()
        try:
            code = self.process.wait(DEADLINE_SECONDS)
            assert code == contract.ExitCode.SUCCEEDED, f"after SIGTERM:\n{self.log.read_text()[-5000:]}"
        finally:
            self.process.kill()
            self.store.close()
            self.head.close()


def _build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY_QWEN3, tie_word_embeddings=True)).float().eval()
    # Norms are initialized to ones; random values make a wrong or missing one visible.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


def _save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["one two three"], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


@torch.no_grad()
def _greedy(model: Qwen3ForCausalLM, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    inputs, cache = torch.tensor([PROMPT]), None
    for _ in range(num_tokens):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens.append(int(output.logits[0, -1].argmax()))
        inputs = torch.tensor([tokens[-1:]])
    return tokens


@torch.no_grad()
def _compute_logprobs(
    models: dict[int, Qwen3ForCausalLM], prompt: list[int], completion: Completion, temperature: float
) -> torch.Tensor:
    """Return the log-prob of each token [sampled] by the model of its version, with the keys and values that the models
    of the tokens before it computed."""
    found, cache, inputs = [], None, prompt
    for token, version in zip(completion.token_ids, completion.versions, strict=True):
        output = models[version](torch.tensor([inputs]), past_key_values=cache, use_cache=True)
        cache, inputs = output.past_key_values, [token]
        found.append((output.logits[0, -1] / temperature).log_softmax(-1)[token])
    return torch.stack(found)


def _differences(models: dict[int, Qwen3ForCausalLM], prompt: list[int], completion: Completion) -> torch.Tensor:
    """Return |engine - reference| of each token's log-prob [sampled], at temperature 1."""
    return (_compute_logprobs(models, prompt, completion, 1.0) - torch.tensor(completion.logprobs)).abs()


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference must not compete with the engine for every core
    replica = Replica(tmp_path_factory.mktemp("rollout"))
    try:
        yield replica
    finally:
        torch.set_num_threads(num_threads)
        replica.close()


async def _wait_for(condition: Callable[[], Any], replica: Replica, seconds: float = START_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert replica.process.poll() is None, f"the server died:\n{replica.log.read_text()[-4000:]}"
        try:
            if result := await condition():
                return result
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(f"not in {seconds} s:\n{replica.log.read_text()[-4000:]}")


async def _request(method: str, path: str, headers: dict[str, str] | None = None, **options: Any) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, BASE_URL + path, headers=headers, **options) as response,
    ):
        return response.status, await response.text()


async def _generate(key: str, prompt: list[int] = PROMPT, seed: int = 0, **sampling: Any) -> Completion:
    """Generate as the driver does, past the end-of-sequence token unless `sampling` says otherwise."""
    payload = build_payload(prompt, Sampling(max_tokens=512), seed, key)
    payload["sampling_params"] |= {"ignore_eos": True} | sampling
    status, text = await _request("POST", PATH, AUTHORIZED, json=payload)
    assert status == 200, text
    reader = ResponseReader()
    for line in text.encode().splitlines():
        reader.add_line(line)
    return reader.finish()


class Scoring:
    """The rollouts of one replica, as a teacher sees them."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.replicas = SimpleNamespace(fleet=SimpleNamespace(health=Outages().watch("spec.rollout", "")))

    async def score(self, token_ids: list[int], top_k: int) -> Any:
        payload = build_score_payload(token_ids, self._key, top_k)
        status, text = await _request("POST", PATH, AUTHORIZED, json=payload)
        assert status == 200, text
        return read_scores(json.loads(text), token_ids, top_k)


async def _is_ready() -> bool:
    return (await _request("GET", contract.UrlPath.READY))[0] == 200


async def _weights(manifest: WeightManifest) -> dict[str, Any]:
    path = f"{contract.UrlPath.ROLLOUT_WEIGHTS}?want={manifest.key}&timeout=60"
    status, text = await _request("GET", path, AUTHORIZED)
    assert status == 200, text
    return json.loads(text)


async def test_replica_is_ready_once_it_serves_the_announced_version(replica: Replica) -> None:
    started = time.perf_counter()

    async def waits_for_weights() -> tuple[int, str] | None:
        status, text = await _request("GET", contract.UrlPath.READY)
        return (status, text) if "no weights" in text else None

    status, text = await _wait_for(waits_for_weights, replica)
    print(f"\nwarm after {time.perf_counter() - started:.1f} s")
    assert status == 503, text
    manifest = replica.publish("g1", 0, reference=0)
    served = await _weights(manifest)
    assert (served["generation"], served["version"], served["file_hash"]) == ("g1", 0, manifest.file_hash)
    assert served["checksum"] == manifest.checksum, "the digest read back from the engine is not the publisher's"
    assert await _is_ready()


async def test_every_path_except_readiness_and_metrics_needs_the_token(replica: Replica) -> None:
    await _wait_for(_is_ready, replica)
    guarded = [
        "/v1/completions",
        PATH,
        "/v1/models",
        "/update_weights",
        "/pause",
        "/collective_rpc",
        "/health",
        "/nothing",
    ]
    for path in (*guarded, contract.UrlPath.ROLLOUT_WEIGHTS, f"{contract.UrlPath.READY}/"):
        assert (await _request("POST", path, json={}))[0] == 401, f"{path} responds without a token"
        wrong = {"Authorization": "Bearer wrong"}
        assert (await _request("POST", path, wrong, json={}))[0] == 401, f"{path} accepts a wrong token"
    assert (await _request("GET", contract.UrlPath.METRICS))[0] == 200


async def test_engine_generates_from_the_pulled_version(replica: Replica) -> None:
    for generation, version, reference in (("g1", 1, 1), ("g2", 0, 2), ("g2", 1, 0)):
        manifest = replica.publish(generation, version, reference)
        served = await _weights(manifest)
        assert (served["generation"], served["version"]) == (generation, version), "a new generation starts over"
        assert served["checksum"] == manifest.checksum
        found = await _generate(manifest.key, temperature=0, max_tokens=16)
        assert found.token_ids == _greedy(replica.references[reference], 16), "not the new weights' tokens"
        assert (found.generation, found.versions) == (generation, [version] * 16)
        print(f"\n{manifest.key}: " + ", ".join(f"{k} {served[k]:.4f}" for k in served if k.endswith("seconds")))


async def test_log_probs_equal_those_of_an_independent_forward(replica: Replica) -> None:
    await _wait_for(_is_ready, replica)
    manifest = replica.publish("g3", 0, reference=1)
    await _weights(manifest)
    completions = [await _generate("g3:0", seed=seed, temperature=0.7, max_tokens=24) for seed in range(8)]
    differences = torch.cat(
        [
            _compute_logprobs({0: replica.references[1]}, PROMPT, completion, 0.7) - torch.tensor(completion.logprobs)
            for completion in completions
        ]
    ).abs()
    print(f"\nmean |log-prob difference| {differences.mean():.2e} over {len(differences)} tokens")
    assert differences.mean() < 0.002
    assert len({tuple(completion.token_ids) for completion in completions}) == 8, "each seed has its own sample"


@pytest.mark.parametrize(("top_k", "generation"), [(0, "g4"), (3, "g41")])
async def test_log_probs_after_a_hint_equal_those_of_an_independent_forward(
    replica: Replica, top_k: int, generation: str
) -> None:
    """The episode has two segments; the hint is a text with a column of the row."""
    manifest = replica.publish(generation, 0, reference=2)
    await _wait_for(_is_ready, replica)
    await _weights(manifest)
    first = await _generate(manifest.key, seed=1, max_tokens=24)
    second = await _generate(manifest.key, [*PROMPT, *first.token_ids, 40, 41], seed=2, max_tokens=8)
    ids = [*PROMPT, *first.token_ids, 40, 41, *second.token_ids]
    starts = [len(PROMPT), len(PROMPT) + 26]
    runs = [(starts[0], starts[0] + 24), (starts[1], starts[1] + 8)]
    segments = [TokenSegment(token_ids=ids, sampled=runs), TokenSegment(token_ids=[*PROMPT, 7, 8], sampled=[(7, 8)])]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(replica.folder / "model")
    reward = Reward.model_validate(
        {"name": "self", "use": "training", "teacher": {"hint": "one {way} three", "topK": top_k}}
    )
    data = Data.model_validate({"train": {"source": "rows.jsonl"}, "format": "text"})
    async with open_session() as session:
        teacher = HintedPolicy(cast(RolloutClient, Scoring(manifest.key)), data, reward, session, tokenizer, index=0)
        row = {"extra_info": {"way": "two", "index": 0}, "segments": segments}
        [result] = await teacher.score(
            ScoreRequest.model_validate({"id": "g/0", "prompt": "", "completion": "", **row})
        )
    assert result.valid, result.message
    hint = tokenizer("one two three")["input_ids"]
    assert len(hint) == 3
    told = [np.frombuffer(base64.b64decode(each), told_dtype(top_k)) for each in result.logprobs or ()]
    seen = [torch.tensor((each["logprob"] if top_k else each).copy()) for each in told]
    for segment, found, each in zip(segments, seen, told, strict=True):
        with torch.no_grad():
            logits = replica.references[2](torch.tensor([[*hint, *segment.token_ids]])).logits[0]
        places = [len(hint) + i for start, end in segment.sampled for i in range(start, end)]
        targets = torch.tensor([segment.token_ids[i - len(hint)] for i in places])
        all_expected = logits.log_softmax(-1)[torch.tensor(places) - 1]
        expected = all_expected.gather(1, targets[:, None])[:, 0]
        if top_k:
            likeliest = torch.tensor(each["top"]["logprob"].copy())
            torch.testing.assert_close(likeliest, all_expected.topk(top_k).values, rtol=0, atol=1e-5)
            named = all_expected.gather(1, torch.tensor(each["top"]["token"].astype(np.int64)))
            torch.testing.assert_close(likeliest, named, rtol=0, atol=1e-5)
        print(f"\nlargest |log-prob difference| {(found - expected).abs().max():.2e} over {len(found)} tokens")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    without = torch.tensor(first.logprobs)
    assert (seen[0][:24] - without).abs().max() > 0.01, "the hint matters"


async def test_a_conversation_trains_on_what_the_engine_saw(replica: Replica) -> None:
    """Five turns, new weights after the second: the trainer's log-probs of the whole segment are the engine's."""
    manifest = replica.publish("g9", 0, reference=0)
    await _wait_for(_is_ready, replica)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(replica.folder / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    conversation = Conversation(ChatTemplate(tokenizer), [{"role": "user", "content": "one two"}])
    num_stopped = 0
    for turn in range(5):
        if turn == 2:
            manifest = replica.publish("g9", turn, reference=turn)
        await _weights(manifest)
        ends = {"stop_token_ids": list(range(200))} if turn % 2 else {}
        completion = await _generate(manifest.key, conversation.next_prompt(), turn, max_tokens=24, **ends)
        num_stopped += not completion.truncated
        conversation.add_answer(completion, {"role": "assistant", "content": completion.text})
        conversation.add([{"role": "user", "content": f"three {turn}"}])
    [segment] = listed(conversation.segments)
    assert num_stopped > 0, "one of the answers must end before the limit"
    # This tokenizer writes a space at the start of each text.
    assert tokenizer.decode(segment.token_ids).count("<end> \nuser: three") == 4, "the template ends each answer"
    token_ids = torch.tensor(segment.token_ids)
    sampled = torch.tensor(segment.loss_mask).bool()
    versions, engine = torch.tensor(segment.versions), torch.tensor(segment.logprobs)
    assert set(versions[sampled].tolist()) == {0, 2}
    for version in (0, 2):
        with torch.no_grad():
            logits = replica.references[version](token_ids[None]).logits[0, :-1]
        trainer = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        of_version = (sampled & (versions == version))[1:]
        difference = (trainer - engine[1:]).abs()[of_version]
        print(f"\nversion {version}: max |log-prob difference| {difference.max():.2e} over {len(difference)} tokens")
        assert difference.max() < 0.01


async def test_text_is_that_of_the_openai_endpoint(replica: Replica) -> None:
    await _wait_for(_is_ready, replica)
    fixed = {"max_tokens": 80, "allowed_token_ids": list(range(260))}  # those that the tokenizer has: one byte each
    whole = await _generate("g3:0", seed=3, **fixed)
    stop = next(letter for letter in whole.text[20:] if letter.isascii() and letter not in whole.text[:20])
    for sampling in (fixed | {"stop": []}, fixed | {"stop": [stop]}):
        body = {"model": "policy", "prompt": PROMPT, "return_token_ids": True, "ignore_eos": True, "seed": 3}
        status, text = await _request("POST", "/v1/completions", AUTHORIZED, json=body | sampling)
        assert status == 200, text
        expected, found = json.loads(text)["choices"][0], await _generate("g3:0", seed=3, **sampling)
        assert len(found.text) >= 20
        assert (found.text, found.token_ids) == (expected["text"], expected["token_ids"])
        assert found.truncated == (expected["finish_reason"] == "length") == (not sampling["stop"])


async def test_prompt_that_is_too_long_is_a_user_error(replica: Replica) -> None:
    await _wait_for(_is_ready, replica)
    with pytest.raises(UserError, match=r"maximum model length of 512.*maxPromptTokens"):
        await _generate("g3:0", prompt=[5] * 600)


async def test_seeded_prompts_that_exceed_a_batch_are_all_served(replica: Replica) -> None:
    await _wait_for(_is_ready, replica)
    prompts = [[(7 * i + k) % 500 + 3 for k in range(200)] for i in range(48)]  # 9,600 tokens in all
    requests = (_generate("g3:0", prompt, seed=i, max_tokens=2) for i, prompt in enumerate(prompts))
    for completion in await asyncio.gather(*requests):
        assert len(completion.token_ids) == 2


async def test_in_flight_request_continues_with_the_new_weights(replica: Replica) -> None:
    await _weights(replica.publish("g4", 0, reference=0))
    request = asyncio.create_task(_generate("g4:0", seed=1, max_tokens=480))

    async def is_generating() -> bool:
        _, metrics = await _request("GET", contract.UrlPath.METRICS)
        return any(
            line.startswith("vllm:num_requests_running") and float(line.split()[-1]) for line in metrics.splitlines()
        )

    await _wait_for(is_generating, replica, seconds=30)
    manifest = replica.publish("g4", 1, reference=1)
    served = await _weights(manifest)
    assert not request.done(), "the update came after the request; make the request longer"
    assert served["checksum"] == manifest.checksum
    completion = await request
    assert (len(completion.token_ids), set(completion.versions)) == (480, {0, 1})
    models = dict(enumerate(replica.references))
    differences = _differences(models, PROMPT, completion)
    print(f"\n{completion.versions.count(0)} old tokens; mean |log-prob difference| {differences.mean():.2e}")
    assert differences.mean() < 0.002, "the labels are not those of the weights that sampled the tokens"
    boundary = completion.versions.index(1)
    mislabelled = replace(completion, versions=[0] * (boundary + 8) + [1] * (472 - boundary))
    assert _differences(models, PROMPT, mislabelled)[boundary : boundary + 8].mean() > 0.1


async def test_new_request_does_not_use_prefixes_that_old_weights_computed(replica: Replica) -> None:
    prompt = [(5 * k) % 700 + 3 for k in range(300)]  # more than two blocks of the cache
    await _weights(replica.publish("g5", 0, reference=0))
    await _generate("g5:0", prompt, max_tokens=1)
    await _weights(replica.publish("g5", 1, reference=1))
    models = {1: replica.references[1]}
    new = await _generate("g5:1", prompt, max_tokens=24)
    assert new.versions == [1] * 24
    assert _differences(models, prompt, new).mean() < 0.002
    again = await _generate("g5:1", prompt, max_tokens=24)
    assert (again.token_ids, again.logprobs) == (new.token_ids, pytest.approx(new.logprobs, abs=1e-4))
    stale = await _generate("g5:0", prompt, max_tokens=24)
    assert _differences(models, prompt, stale).mean() > 0.1, "nothing was cached, so the test shows nothing"
