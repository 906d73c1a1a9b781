"""Judges, a model user and a classifier on real vLLM (CPU), with Pods as the operator plans them and `rljob run` runs
them.

A Pod is a reward server with its vLLM sidecar. Both judges and the user share one vLLM. Models are random and tiny; the
scores of the classifier are compared with a forward pass of Hugging Face.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_VLLM_SOCKET, PORT_SERVICE
from rljob_api.wire.scores import ScoreRequest, ScoreResult, TokenSegment
from rljob_cli.check.try_reward import reward_children
from rljob_cli.local import network
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.manifests import is_ready
from rljob_service.worker.settings import USER
from tests.support.judge_servers import run_reward
from tests.support.reward_process import build_group

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

READY_SECONDS = 900
HEADERS = {"Authorization": "Bearer test-reward"}
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
MAX_TOKENS = 96
VERDICT = {
    "type": "object",
    "properties": {"score": {"enum": [1, 2, 3]}, "clear": {"type": "boolean"}},
    "required": ["score", "clear"],
    "additionalProperties": False,
}


def save_tokenizer(folder: Path) -> int:
    """Save a byte-level tokenizer; return its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Padding needs its own token: Hugging Face scores the last token that is not padding.
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEMPLATE], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return len(fast)


def save_model(folder: Path, kind: type, **config: Any) -> Path:
    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": MAX_TOKENS}
    vocabulary = save_tokenizer(folder)
    model = kind(Qwen3Config(vocab_size=vocabulary, pad_token_id=1, eos_token_id=0, **sizes, **heads, **config))
    model.eval().float().save_pretrained(folder)
    return folder


class Pod:
    """A ready Pod of a reward."""

    def __init__(self, address: str, cluster: LocalCluster) -> None:
        self._url = f"http://{address}:{cluster.network.port(PORT_SERVICE)}"
        self.cluster = cluster

    async def score(self, *completions: str, prompt: Any = "2+2?") -> list[ScoreResult]:
        requests = [ScoreRequest(id=f"r{i}", prompt=prompt, completion=text) for i, text in enumerate(completions)]
        async with aiohttp.ClientSession(headers=HEADERS) as session:

            async def ask(request: ScoreRequest) -> ScoreResult:
                async with session.post(f"{self._url}/v1/score", json=request.model_dump(mode="json")) as response:
                    assert response.status == 200, await response.text()
                    return ScoreResult.model_validate_json(await response.read())

            return list(await asyncio.gather(*map(ask, requests)))

    async def get(self, path: str) -> str:
        async with aiohttp.ClientSession(headers=HEADERS) as session, session.get(self._url + path) as response:
            return await response.text()


@asynccontextmanager
async def run_pod(folder: Path, **reward: Any) -> AsyncIterator[Pod]:
    """Run the Pod of one reward on the local backend."""
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}},
        "rewards": [{"name": "good", "timeoutSeconds": 120, **reward}],
        "hangDetection": {"minSeconds": 20, "maxSeconds": 600},
    }
    job = RLJob.model_validate({"metadata": {"name": "real"}, "spec": spec})
    claimed = network.claim_block(str(folder))
    async with LocalCluster(job, claimed, folder / "run") as cluster:
        for child in reward_children(job, job.spec.rewards[0]):
            await cluster.store.apply(child)
        deadline = time.monotonic() + READY_SECONDS
        while not (ready := [pod for pod in cluster.store.pods.values() if is_ready(pod)]):
            cluster.check()
            assert time.monotonic() < deadline, tail(cluster)
            await asyncio.sleep(0.2)
        yield Pod(ready[0]["status"]["podIP"], cluster)


def tail(cluster: LocalCluster) -> str:
    logs = [f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in cluster.paths.logs.glob("*.log")]
    return "\n".join(logs) + json.dumps([pod.get("status") for pod in cluster.store.pods.values()], indent=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge_pod(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pod]:
    folder = tmp_path_factory.mktemp("judge")
    judge = {
        "model": {
            "source": str(save_model(folder / "model", Qwen3ForCausalLM)),
            "dtype": "float32",
            "kvCacheMemory": "102Mi",
        },
        "template": "Rate: {{ completion }}",
        "systemPrompt": "Be fair.",
        "parser": {"jsonSchema": VERDICT},
        "votes": 3,
        "sampling": {"temperature": 1.0, "maxTokens": 40},
    }
    async with run_pod(folder, judge=judge) as pod:
        yield pod


async def test_judge_answers_in_its_schema(judge_pod):
    results = await judge_pod.score("four", "five", "six")
    assert all(result.valid for result in results), results
    for result in results:
        assert result.score is not None
        assert 1 <= result.score <= 3
        assert 0 <= result.components["clear"] <= 1
        assert result.components["votes"] >= 2
    assert json.loads(await judge_pod.get("/v1/info"))["signature"] == "judge"
    metrics = await judge_pod.get("/metrics")
    assert 'rljob_reward_calls_total{outcome="200",reward="good"} 10.0' in metrics, "9 votes and the warm-up"
    assert 'rljob_reward_tokens_total{kind="completion",reward="good"}' in metrics


@pytest.fixture
def socket(judge_pod, monkeypatch):
    """The judge's vLLM serves the reward of the test, too."""
    environments = (process.environ() for process in psutil.Process().children(recursive=True))
    monkeypatch.setenv(ENV_VLLM_SOCKET, next(env[ENV_VLLM_SOCKET] for env in environments if ENV_VLLM_SOCKET in env))


async def test_a_teachers_log_probs_are_those_of_transformers(socket, tmp_path):
    folder = save_model(tmp_path / "model", Qwen3ForCausalLM)  # the judge's weights
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(5, len(tokenizer), (2, 40), generator=drawn).tolist()
    texts = [[tokenizer.decode([token]) for token in each] for each in ids]
    segments = [
        TokenSegment(token_ids=ids[0], sampled=[(9, 20), (25, 40)], texts=texts[0]),
        TokenSegment(token_ids=ids[1], sampled=[(1, 30)], texts=texts[1]),
    ]
    settings = {"name": "good", "teacher": {"model": {"source": "/m"}}, "timeoutSeconds": 120}
    async with run_reward(tmp_path, settings) as reward:
        result = await reward.score("", segments=segments)
        long = await reward.score("", segments=[TokenSegment(token_ids=[5] * (MAX_TOKENS + 1), sampled=[(1, 97)])])
    assert result.valid, result.message
    with torch.no_grad():
        logprobs = model(torch.tensor(ids)).logits.log_softmax(-1)
    for number, (segment, encoded) in enumerate(zip(segments, result.logprobs, strict=True)):
        places = [place for start, end in segment.sampled for place in range(start, end)]
        expected = [float(logprobs[number, place - 1, segment.token_ids[place]]) for place in places]
        found = np.frombuffer(base64.b64decode(encoded), "<f4")
        assert np.abs(found - expected).max() < 1e-5
    assert not long.valid
    assert "maximum context length" in long.message


@pytest.mark.parametrize("stop", [None, "clear"])
async def test_model_plays_a_user(socket, tmp_path, stop):
    """It is random, so a schema makes its messages end."""
    response_format = {"type": "json_schema", "json_schema": {"name": "message", "schema": VERDICT}}
    user = {
        "model": {"source": "/m"},
        "persona": "{{ turn }}",
        "stop": stop,
        "sampling": {"maxTokens": 40, "extraBody": {"response_format": response_format}},
    }
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "3"}]
    settings = {"name": "user", "userModel": user, "timeoutSeconds": 120}
    async with run_reward(tmp_path, settings, USER) as running:
        result = await running.call(*messages)
    assert result.valid, result.message
    text = result.value["info"]["last_message"] if stop else result.value["text"]
    assert set(json.loads(text)) == {"score", "clear"}
    assert (result.value["text"] is None) is bool(stop)


async def test_judge_compares_each_pair_of_a_group(socket, tmp_path):
    judge = {
        "model": {"source": "/m"},
        "compare": "pairwise",
        "template": "{{ first }} or {{ second }}?",
        "parser": {"jsonSchema": VERDICT, "scorePath": "score", "scores": {"1": 0, "2": 0.5, "3": 1}},
        "sampling": {"maxTokens": 40},
    }
    settings = {"name": "good", "judge": judge, "scope": "group", "timeoutSeconds": 120}
    async with run_reward(tmp_path, settings) as reward:
        results = (await reward.score_group(build_group("four", "five", "six"))).results
        calls = reward.metric('rljob_reward_calls_total{outcome="200",reward="good"}')
    assert all(result.valid for result in results), results
    assert sum(result.score or 0.0 for result in results) == pytest.approx(1.5), "the scores of each pair sum to 1"
    assert [result.components["comparisons"] for result in results] == [4.0] * 3
    assert calls == 7, "6 questions and the warm-up"


@pytest.mark.nightly
async def test_a_judge_whose_engine_is_stopped_is_replaced(judge_pod: Pod) -> None:
    """The API server next to the engine runs, and says so."""
    [engine] = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM::EngineCor")]
    engine.suspend()
    [result] = await judge_pod.score("four")
    assert result.valid, f"its next engine answers: {result.message}"
    log = tail(judge_pod.cluster)
    assert "the engine hangs: it owes " in log
    assert "is stopped: it gives no stacks" in log
    assert not engine.is_running()


async def test_classifier_scores_like_its_own_forward_pass(tmp_path):
    folder = save_model(tmp_path / "model", Qwen3ForSequenceClassification, num_labels=3)
    expected = reference(folder)
    model = {"source": str(folder), "dtype": "float32", "kvCacheMemory": "102Mi", "label": 1, "tooLong": "truncateLeft"}
    texts = ["four", "five, I think", "x" * 500]
    async with run_pod(tmp_path, model=model | {"activation": "softmax"}) as pod:
        results = await pod.score(*texts)
        assert [result.reason for result in results] == [None] * 3
        for text, result in zip(texts, results, strict=True):
            assert result.score == pytest.approx(expected(text), abs=2e-3)
        # vLLM batches concurrent requests; each has its own result.
        many = await pod.score(*(f"answer {i}" for i in range(40)))
        assert [r.score for r in many] == pytest.approx([expected(f"answer {i}") for i in range(40)], abs=2e-3)


def reference(folder: Path) -> Callable[[str], float]:
    """Return a function for the softmax of label 1 over the last tokens of the conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)

    def score(text: str) -> float:
        turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}]
        tokens = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)[-MAX_TOKENS:]
        with torch.no_grad():
            return float(torch.softmax(model(torch.tensor([tokens])).logits[0], 0)[1])

    return score
