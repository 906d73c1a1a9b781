"""Each argument of ten functions, for one conversation with a tool: what verl, TRL and OpenRLHF pass, and what we pass.

The projects' own code makes theirs (their_calls.py). It is installed without its dependencies, which the lock file has
except for a few small ones, into a folder of uv's cache (40 MB).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rljob_api.manifest.job_sections import DataSource
from rljob_api.wire.calls import ToolSchema
from rljob_inputs.data.prompts import build_prompt
from rljob_inputs.data.rows import Row
from rljob_service.pool.requirements import find_uv
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from rljob_trainer.conversation.transcript import Conversation
from rljob_trainer.episodes.types import Completion, Episode, EpisodeEnd, Turn
from rljob_trainer.rewards.groups import RequestBuilder
from rljob_trainer.rewards.messages import RewardCall
from tests.support.chat_templates import build_template
from tests.support.episodes import listed
from tests.support.plugins import REFERENCES

pytestmark = [pytest.mark.slow, pytest.mark.packages]

PACKAGES = (
    *("verl==0.9.1", "trl==1.16.0", "openrlhf==0.11.2", "tensordict==0.15.3", "pyvers==0.2.3", "orjson==3.13.0"),
    *("codetiming==1.4.0", "hydra-core==1.3.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
    "pylatexenc==2.11",
)
PROMPT = [{"role": "user", "content": "What is 8 + 9?"}]
ROWS: dict[str, dict[str, Any]] = {
    "verl": {
        "data_source": "sums",
        "prompt": PROMPT,
        "reward_model": {"style": "rule", "ground_truth": "17"},
        "extra_info": {"index": 3, "split": "train", "level": 2},
    },
    "trl": {"prompt": PROMPT, "answer": "17", "level": 2},
    "openrlhf": {"prompt": PROMPT, "answer": "17"},
}
ANSWERS = (
    '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 8, "b": 9}}\n</tool_call>',
    "<think>\nSeventeen.\n</think>\n\nIt is 17.",
)
KEEP = """
import json
def keep(**given):
    with open(PATH, "w") as file:
        json.dump(given, file, default=lambda value: "a function" if callable(value) else type(value).__name__)
"""
FUNCTIONS: list[tuple[str, str, str]] = [
    ("verl", "def compute_score(data_source, solution_str, ground_truth, extra_info=None):", "1.0"),
    ("verl", "async def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):", "1.0"),
    ("verl", "def compute_score(solution_str, ground_truth, **others):", "1.0"),
    ("verl", "def compute_score(data_source, solution_str, ground_truth, extra_info, format_score=0.1):", "1.0"),
    ("trl", "def reward(prompts, completions, **columns):", "[1.0]"),
    ("trl", "def reward(completions, answer, **kwargs):", "[1.0]"),
    ("trl", "def reward(completions, completion_ids, level, log_metric, **kwargs):", "[1.0]"),
    ("trl", "async def reward(prompts, completions, completion_ids, **kwargs):", "[1.0]"),
    ("openrlhf", "def reward_func(queries, prompts, labels):", "[1.0]"),
    ("openrlhf", "def reward_func(queries, prompts, labels, **kwargs):", "{'rewards': [1.0]}"),
]
NOT_SENT = {"trainer_state", "completion_ids"}
"""Documented: the state of TRL's trainer never, and token ids to functions that do not read them."""
VAR = ("kwargs", "columns", "others")


def write_source(header: str, returned: str, path: Path) -> tuple[str, str]:
    """Return the source of a function that writes down all its arguments, and its name."""
    body = f"    keep(**{{name: value for name, value in locals().items() if name not in {VAR!r}}}, **{{}})\n"
    for name in VAR:
        if f"**{name}" in header:
            body = body.replace("**{})", f"**{name})")
    source = f"PATH = {str(path)!r}\n{KEEP}\n{header}\n{body}    return {returned}\n"
    return source, header.partition("(")[0].split()[-1]


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """A folder with the projects, which stays."""
    folder = Path(request.config.cache.mkdir("projects"))
    done = folder / "installed"
    if not done.exists() or done.read_text() != "\n".join(PACKAGES):
        command = [find_uv() or "uv", "pip", "install", "--python", sys.executable, "--no-deps"]
        command += ["--target", str(folder), *PACKAGES]
        subprocess.run(command, check=True)
        done.write_text("\n".join(PACKAGES))
    return folder


def play() -> tuple[Episode, list[list[int]], str]:
    """Return the episode, the sampled tokens of each turn, and the text of its prompt."""
    template = build_template("qwen3")
    number = {"type": "integer", "description": "A number."}
    parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    conversation = Conversation(template, PROMPT, [ToolSchema(name="add", description="Adds.", parameters=parameters)])
    call = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": {"a": 8, "b": 9}}}
    messages = [
        {"role": "assistant", "content": ANSWERS[0].partition("<tool_call>")[0], "tool_calls": [call]},
        {"role": "assistant", "content": ANSWERS[1]},
    ]
    sampled = [template.encode(f"{text}<|im_end|>") for text in ANSWERS]
    prompt_text = ""
    for number_of_turn, (token_ids, message) in enumerate(zip(sampled, messages, strict=True)):
        prompt = conversation.next_prompt()
        prompt_text = prompt_text or template.decode(prompt)
        zeros = [0.0] * len(token_ids)
        conversation.add_answer(
            Completion(token_ids, zeros, [0] * len(token_ids), ANSWERS[number_of_turn], False, "g"), message
        )
        if number_of_turn == 0:
            conversation.add([{"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "17"}])
    episode = Episode(
        0,
        0,
        0,
        conversation.segments,
        [Turn(text) for text in ANSWERS],
        messages=conversation.messages,
        whole=conversation.read_whole(),
        end=EpisodeEnd.ANSWERED,
    )
    return episode, sampled, prompt_text


def call_ours(project: str, source: str, entrypoint: str, episode: Episode) -> None:
    row = ROWS[project]
    answer = "reward_model.ground_truth" if project == "verl" else "answer"
    data = DataSource(source="./d.jsonl", prompt="prompt", answer=answer)
    prompt = build_prompt(data, Row(row, 0, "d.jsonl:1"), row["prompt"], [], "train", "spec.data.train")
    tokenizer = build_template("qwen3")._tokenizer
    request = RequestBuilder(tokenizer).build("g/0", "train", prompt, episode)
    settings = FunctionSettings(source, "function.py", entrypoint, "auto", {}, 2048, signatures=REFERENCES)
    bound = load(settings)
    [outcome] = Executor(bound, settings).execute(RewardCall(request, "rljob", tokenizer).encode(bound.reads))
    assert outcome.score == 1.0, outcome


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each argument, and how ours is. Ours may have further keys."""
    for name, value in theirs.items():
        if name in NOT_SENT and name not in ours:
            yield name, "not sent"
        elif value and isinstance(value, dict) and isinstance(ours.get(name), dict):
            yield from ((f"{name}.{key}", word) for key, word in compare(value, ours[name]))
        elif name in ours and ours[name] == value:
            yield name, "equal"
        else:
            yield name, f"differs: {value!r} there, {ours.get(name)!r} here"
    for name in ours.keys() - theirs.keys():
        yield name, "only here"


def test_arguments_equal_those_of_the_projects_own_code(packages: Path, tmp_path: Path) -> None:
    episode, sampled, prompt_text = play()
    build_template("qwen3")._tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    )
    [segment] = listed(episode.segments)
    start = next(place for place, trained in enumerate(segment.loss_mask) if trained)
    files = {who: [tmp_path / f"{who}-{n}.json" for n in range(len(FUNCTIONS))] for who in ("theirs", "ours")}
    record = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "rows": ROWS,
        "prompt_text": prompt_text,
        "turns": sampled,
        "response_ids": segment.token_ids[start:],
        "num_turns": 4,  # verl's ToolAgentLoop: answers, results of tools, and one for the prompt
        "functions": [
            (project, *write_source(header, returned, path))
            for (project, header, returned), path in zip(FUNCTIONS, files["theirs"], strict=True)
        ],
    }
    script = Path(__file__).with_name("their_calls.py")
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    subprocess.run([sys.executable, str(script)], input=json.dumps(record), text=True, check=True, env=environment)
    for (project, header, returned), path in zip(FUNCTIONS, files["ours"], strict=True):
        call_ours(project, *write_source(header, returned, path), episode)
    table = [
        (project, header.removesuffix(":"), name, word)
        for (project, header, _), theirs, ours in zip(FUNCTIONS, files["theirs"], files["ours"], strict=True)
        for name, word in compare(json.loads(theirs.read_text()), json.loads(ours.read_text()))
    ]
    for project, header, name, word in table:
        print(f"{project} | {header} | {name} | {word}")
    assert not [line for line in table if line[3].startswith("differs")]
    equal = {(header, name) for _, header, name, word in table if word == "equal"}
    names = ("solution_str", "prompts", "completions", "completion_ids", "queries", "labels", "extra_info.num_turns")
    expected = {(h.removesuffix(":"), n) for _, h, _ in FUNCTIONS for n in names if f"{n}," in h or f"{n})" in h}
    assert expected <= equal, expected - equal
