"""One chat template and its variables in all places that render prompts, and the tokens that end answers, in a real
vLLM: a base model without a template, whose job brings one that thinks unless a variable switches it off."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Sampling
from rljob_inputs.data.prompts import tokenize
from rljob_inputs.models.files import open_model
from rljob_inputs.models.own_settings import ModelSettings, load_model_settings
from rljob_inputs.models.tokenizer import load_tokenizer as load_light_tokenizer
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.conversation.transcript import Transcript
from rljob_trainer.episodes.types import Completion
from rljob_trainer.head.inputs import load_tokenizer
from rljob_trainer.replicas.generate import PATH, ResponseReader, build_payload
from tests.integration import test_rollout_real as real
from tests.paths import ROOT
from tests.support.local_run import Run
from tests.support.model_templates import HYBRID_QWEN3

pytestmark = pytest.mark.real

TURN = "<turn>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
VARIABLES = {"enable_thinking": False}
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Ünïcode 🙂\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]
END_IDS = [0, *range(3, 250)]
"""The end-of-sequence tokens of generation_config.json: so many that a random model samples one soon."""


class BaseReplica(real.Replica):
    def _start(self) -> subprocess.Popen[bytes]:
        model = self.folder / "model"
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_special_tokens({"additional_special_tokens": [TURN]})
        tokenizer.save_pretrained(model)
        generation = {"eos_token_id": END_IDS, "do_sample": True, "temperature": 0.6, "max_new_tokens": 7}
        (model / "generation_config.json").write_text(json.dumps(generation))
        return super()._start()


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseReplica]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference must not compete with the engine for every core
    model, data = {"chatTemplate": {"inline": TEMPLATE}}, {"chatTemplateArguments": VARIABLES}
    replica = BaseReplica(tmp_path_factory.mktemp("template"), model=model, data=data)
    try:
        yield replica
    finally:
        torch.set_num_threads(num_threads)
        replica.close()


@pytest.fixture(scope="module")
def settings(replica: BaseReplica) -> ModelSettings:
    return load_model_settings(RLJob.model_validate(replica.job), str(replica.folder / "model"), {})


async def start(replica: BaseReplica) -> str:
    """Return the key of the weights that it serves."""
    await real._wait_for(_answers, replica)
    manifest = replica.publish("g", 0, reference=0)
    await real._weights(manifest)
    return manifest.key


async def _answers() -> bool:
    return (await real._request("GET", "/rljob/ready"))[0] in (200, 503)


async def test_every_place_renders_the_same_tokens(replica: BaseReplica, settings: ModelSettings) -> None:
    await start(replica)
    spec, folder = settings.job.spec, str(replica.folder / "model")
    tokenizer = load_tokenizer(folder, spec.model)
    template = ChatTemplate(tokenizer, "auto", spec.data.chat_template_arguments)
    found = {
        "rljob validate": tokenize(spec.data, CHATS, load_light_tokenizer(open_model(folder, None), TEMPLATE)),
        "data of the head": tokenize(spec.data, CHATS, tokenizer),
        "turns of agents": [template.encode(template.render(chat, [], generate=True)) for chat in CHATS],
        "the gateway": [Transcript(template).plan(chat).prompt for chat in CHATS],
        "vLLM's own server": [await _ask_vllm(chat) for chat in CHATS],
    }
    expected = found["data of the head"]
    assert all(prompts == expected for prompts in found.values()), found
    assert template.decode(expected[0]).endswith("assistant: <think></think>")


async def _ask_vllm(chat: list[dict[str, str]]) -> list[int]:
    body = {"model": "policy", "messages": chat, "max_tokens": 1, "return_token_ids": True}
    status, text = await real._request("POST", "/v1/chat/completions", real.AUTHORIZED, json=body)
    assert status == 200, text
    token_ids: list[int] = json.loads(text)["prompt_token_ids"]
    return token_ids


def test_the_job_takes_lengths_sampling_and_ends_from_the_files(settings: ModelSettings) -> None:
    rollout, evaluation = settings.job.spec.rollout.sampling, settings.job.spec.evaluation.sampling
    assert evaluation is not None
    assert (rollout.max_tokens, rollout.temperature, rollout.stop) == (480, 1.0, [TURN])
    assert (evaluation.temperature, evaluation.max_tokens, evaluation.stop) == (0.6, 480, [TURN])


async def test_all_end_tokens_of_the_model_end_an_answer(replica: BaseReplica, settings: ModelSettings) -> None:
    key = await start(replica)
    sampling = Sampling(max_tokens=200)
    completions = [await _generate(key, sampling, seed, settings.own.special_tokens) for seed in range(6)]
    for completion in completions:
        *others, last = completion.token_ids
        assert not completion.truncated, "it ended at its limit"
        assert last in END_IDS
        assert not {*others} & {*END_IDS}, "an earlier end token did not end it"
    assert len({completion.token_ids[-1] for completion in completions}) > 1, "more than the tokenizer's own"


async def test_the_token_that_a_special_text_stands_for_ends_an_answer(
    replica: BaseReplica, settings: ModelSettings
) -> None:
    key = await start(replica)
    greedy = await _generate(key, Sampling(max_tokens=24, temperature=0), 0, {}, ignore_eos=True)
    assert greedy.truncated
    token = greedy.token_ids[9]
    end = greedy.token_ids.index(token) + 1
    special = {**settings.own.special_tokens, TURN: token}  # a token that the random model samples
    stopped = await _generate(key, Sampling(max_tokens=24, temperature=0, stop=[TURN]), 0, special, ignore_eos=True)
    assert stopped.token_ids == greedy.token_ids[:end], "the token is kept, and trained"
    assert not stopped.truncated


async def _generate(key: str, sampling: Sampling, seed: int, special_ids: Any, **options: Any) -> Completion:
    payload = build_payload(real.PROMPT, sampling, seed, key, special_ids)
    payload["sampling_params"] |= options
    status, text = await real._request("POST", PATH, real.AUTHORIZED, json=payload)
    assert status == 200, text
    reader = ResponseReader()
    for line in text.encode().splitlines():
        reader.add_line(line)
    return reader.finish()


PROGRAM = """
from openai import OpenAI


def run(messages):
    answer = OpenAI().chat.completions.create(model="policy", messages=messages)
    info = {"messages": messages, "prompt": answer.usage.prompt_tokens}
    return {"reward": len(answer.choices[0].message.content or "") / 100, "info": info}
"""
TINY = ROOT / ".models" / "tiny-qwen3"


def write_job(folder: Path) -> None:
    """A base model: no chat template, and an end-of-sequence token that the job's template does not write."""
    model = shutil.copytree(TINY, folder / "model")
    (model / "chat_template.jinja").unlink()
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": "<|endoftext|>"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "own.jinja").write_text(HYBRID_QWEN3)
    (folder / "agent.py").write_text(PROGRAM)
    job = yaml.safe_load((ROOT / "examples/tiny/rljob.yaml").read_text())
    spec, data = job["spec"], ROOT / "examples/quickstart/data"
    spec["model"] = {"source": str(model), "chatTemplate": {"file": "own.jinja"}}
    spec["data"] = {
        "train": {"source": str(data / "train.jsonl"), "prompt": "question"},
        "format": "chat",
        "chatTemplateArguments": VARIABLES,
    }
    spec.pop("rewards")
    spec["evaluation"] = {}
    spec["agent"] = {"type": "program", "runner": {"function": {"file": "agent.py"}, "slots": 4}}
    spec["rollout"] |= {"maxModelLen": 256, "sampling": {"maxTokens": 16}}
    spec["schedule"] = {"steps": 1, "promptsPerStep": 4}
    spec["trainer"]["replicas"] = 1
    (folder / "rljob.yaml").write_text(yaml.safe_dump(job))


@pytest.mark.slow
def test_a_run_trains_on_what_a_server_of_its_export_renders(tmp_path: Path) -> None:
    write_job(tmp_path)
    run = Run(tmp_path, None)
    try:
        run.finish()
    finally:
        run.close()
    output = (tmp_path / "output.txt").read_text()
    export = run.folder / "export"
    [served] = [line for line in output.splitlines() if line.startswith("serve it with: ")]
    assert served.endswith(f""" {export} --default-chat-template-kwargs '{{"enable_thinking": false}}'""")
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert (export / "chat_template.jinja").read_text() == HYBRID_QWEN3
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == [0, end]
    rows = pq.read_table(run.folder / "trajectories" / "step-000001.train.parquet").to_pylist()
    assert len(rows) == 4 * yaml.safe_load((tmp_path / "rljob.yaml").read_text())["spec"]["algorithm"]["groupSize"]
    for row in rows:
        info = json.loads(row["info"])
        given = {"add_generation_prompt": True, "tokenize": False, **VARIABLES}
        text = tokenizer.apply_chat_template(info["messages"], **given)
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        [segment] = row["segments"]
        assert segment["spans"][0]["text"] == text, "the policy was trained on another prompt"
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == info["prompt"]
