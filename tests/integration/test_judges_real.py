"""A judge and a reward model by real vLLM on CPU, as the operator plans their Pods and `rljob run` runs them.

Each test is one Pod: the server, and vLLM beside it as its sidecar. Models are random and tiny; what the classifier
gives is compared with Hugging Face's own forward pass.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_REWARD
from rljob_api.wire.protocol import GroupRequest, GroupResult, ScoreRequest, ScoreResult
from rljob_cli.check.try_reward import reward_children
from rljob_cli.local import network
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.local.manifests import is_ready

pytestmark = pytest.mark.real

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
    """A byte-level tokenizer; returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Padding is no token of a text: Hugging Face scores the last token that is not padding.
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
    """A reward's Pod that is ready."""

    def __init__(self, address: str, cluster: LocalCluster) -> None:
        self._url = f"http://{address}:{PORT_REWARD}"
        self.cluster = cluster

    async def score(self, *completions: str, prompt: Any = "2+2?") -> list[ScoreResult]:
        requests = [ScoreRequest(id=f"r{i}", prompt=prompt, completion=text) for i, text in enumerate(completions)]
        async with aiohttp.ClientSession(headers=HEADERS) as session:

            async def ask(request: ScoreRequest) -> ScoreResult:
                async with session.post(f"{self._url}/v1/score", json=request.model_dump(mode="json")) as response:
                    assert response.status == 200, await response.text()
                    return ScoreResult.model_validate_json(await response.read())

            return list(await asyncio.gather(*map(ask, requests)))

    async def score_group(self, *completions: str) -> list[ScoreResult]:
        samples = [ScoreRequest(id=f"g{i}", prompt="2+2?", completion=text) for i, text in enumerate(completions)]
        body = GroupRequest(id="g", samples=samples).model_dump(mode="json")
        url = f"{self._url}/v1/score-group"
        async with aiohttp.ClientSession(headers=HEADERS) as session, session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            return GroupResult.model_validate_json(await response.read()).results

    async def get(self, path: str) -> str:
        async with aiohttp.ClientSession(headers=HEADERS) as session, session.get(self._url + path) as response:
            return await response.text()


@asynccontextmanager
async def run_pod(folder: Path, **reward: Any) -> AsyncIterator[Pod]:
    """The Pod of one reward, by the operator's plan on the local backend."""
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}},
        "rewards": [{"name": "good", "timeoutSeconds": 120, **reward}],
    }
    job = RLJob.model_validate({"metadata": {"name": "real"}, "spec": spec})
    claimed = network.claim(str(folder), ports=[PORT_REWARD])
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


async def test_a_judge_by_vllm_answers_in_its_schema_and_its_verdict_is_the_score(tmp_path):
    folder = save_model(tmp_path / "model", Qwen3ForCausalLM)
    judge = {
        "model": {"source": str(folder), "dtype": "float32", "kvCacheGiB": 0.1},
        "template": "Rate: {{ completion }}",
        "systemPrompt": "Be fair.",
        "parser": {"jsonSchema": VERDICT},
        "votes": 3,
        "sampling": {"temperature": 1.0, "maxTokens": 40},
    }
    async with run_pod(tmp_path, judge=judge) as pod:
        results = await pod.score("four", "five", "six")
        assert all(result.valid for result in results), results
        for result in results:
            assert result.score is not None
            assert 1 <= result.score <= 3
            assert 0 <= result.components["clear"] <= 1
            assert result.components["votes"] >= 2
        assert json.loads(await pod.get("/v1/info"))["signature"] == "judge"
        metrics = await pod.get("/metrics")
        assert 'rljob_reward_calls_total{outcome="200",reward="good"} 10.0' in metrics, "9 votes and the warm-up"
        assert 'rljob_reward_tokens_total{kind="completion",reward="good"}' in metrics


async def test_a_judge_by_vllm_compares_each_two_of_a_group(tmp_path):
    judge = {
        "model": {"source": str(save_model(tmp_path / "model", Qwen3ForCausalLM)), "kvCacheGiB": 0.1},
        "compare": "pairwise",
        "template": "{{ first }} or {{ second }}?",
        "parser": {"jsonSchema": VERDICT, "scorePath": "score", "scores": {"1": 0, "2": 0.5, "3": 1}},
        "sampling": {"maxTokens": 40},
    }
    async with run_pod(tmp_path, judge=judge, scope="group") as pod:
        results = await pod.score_group("four", "five", "six")
        assert all(result.valid for result in results), results
        assert sum(result.score or 0.0 for result in results) == pytest.approx(1.5), "what one wins another loses"
        assert [result.components["comparisons"] for result in results] == [4.0] * 3
        metrics = await pod.get("/metrics")
        assert 'rljob_reward_calls_total{outcome="200",reward="good"} 7.0' in metrics, "6 questions and the warm-up"


async def test_a_classifier_by_vllm_scores_as_its_own_forward_pass_does(tmp_path):
    folder = save_model(tmp_path / "model", Qwen3ForSequenceClassification, num_labels=3)
    expected = reference(folder)
    model = {"source": str(folder), "dtype": "float32", "kvCacheGiB": 0.1, "label": 1, "tooLong": "truncateLeft"}
    texts = ["four", "five, I think", "x" * 500]
    async with run_pod(tmp_path, model=model | {"activation": "softmax"}) as pod:
        results = await pod.score(*texts)
        assert [result.reason for result in results] == [None] * 3
        for text, result in zip(texts, results, strict=True):
            assert result.score == pytest.approx(expected(text), abs=2e-3)
        # Many at once are one batch or a few for vLLM, and each its own result for us.
        many = await pod.score(*(f"answer {i}" for i in range(40)))
        assert [r.score for r in many] == pytest.approx([expected(f"answer {i}") for i in range(40)], abs=2e-3)


def reference(folder: Path) -> Callable[[str], float]:
    """Softmax of label 1, of the last tokens of the conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)

    def score(text: str) -> float:
        turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}]
        tokens = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)[-MAX_TOKENS:]
        with torch.no_grad():
            return float(torch.softmax(model(torch.tensor([tokens])).logits[0], 0)[1])

    return score
