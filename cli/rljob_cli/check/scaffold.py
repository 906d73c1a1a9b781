"""`rljob init`: a small valid job to start from. Overwrites nothing; the texts are in task-templates.

Invariant: every relative path in a job starts at the job's folder.
"""

import json
import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import DataSource
from rljob_api.manifest.sources import parse_source
from rljob_cli.exits import guard
from rljob_cli.output import print_json
from rljob_inputs.data.rows import read_rows
from rljob_inputs.errors import InputError

DEFAULT_MODEL = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
_TEMPLATES = resources.files("rljob_cli.check") / "task-templates"
_MAX_NAME_CHARACTERS = 40
_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "label", "output", "response", "target")


@dataclass(frozen=True)
class Task:
    about: str
    reward: str | None
    """The template that has the reward, and the data. None: the agent brings the reward; the data are sums."""
    agent: str | None = None
    """agent.type, if it has more than one turn."""


TASKS = {
    "sums": Task("The model learns to answer sums with the number alone.", "sums"),
    "chat": Task("Conversations of several turns; short replies with the right fact.", "chat"),
    "products": Task("Conversations with a simulated user and a tool: products of two numbers.", "products", "loop"),
    "tries": Task("A program that calls the model: sums, and another try after a wrong answer.", None, "program"),
    "quiz": Task("An environment asks for sums, and replies to wrong answers.", None, "environment"),
    "gsm8k": Task("Word problems of GSM8K, from the hub, with the usual reward.", "gsm8k"),
    "judge": Task("Sums scored by a function, and by a model that judges how polite the reply is.", "sums"),
    "own": Task("Your own rows: pass --data.", "own"),
}
"""The data of `judge` is that of its reward's task."""
TASK_OF_AGENT = {task.agent: name for name, task in TASKS.items() if task.agent}
"""The task that shows each value of `agent.type` that has more than one turn."""


@dataclass(frozen=True)
class AgentParts:
    files: dict[str, str]
    """Name and contents of each file of the agent."""
    answers: tuple[str, ...]
    """Of an episode on the first row: a wrong one, then the right one."""


AGENTS = {
    "loop": AgentParts(
        {
            "user.py": "the simulated user, a Python function that replies to the policy and rewards its turns",
            "tools.py": "Python functions that the policy may call",
        },
        ("It is 200.", "121"),
    ),
    "program": AgentParts(
        {"agent.py": "the program: it calls the policy through OpenAI's API, and returns the reward"}, ("It is 3.", "2")
    ),
    "environment": AgentParts(
        {"environment.py": "the environment: a class that replies to the policy and rewards its answers"},
        ("It is 3.", "2"),
    ),
}
_REWARD_FILES = {
    "reward.py": "the reward, a Python function in verl's signature",
    "data/completions.jsonl": "completions to test the reward with",
}


@dataclass(frozen=True)
class OwnData:
    """The user's rows. None: chosen by common names."""

    source: str
    prompt: str | None = None
    answer: str | None = None


@guard
def list_tasks(output: str) -> int:
    if output == "json":
        print_json({name: task.about for name, task in TASKS.items()})
    else:
        width = max(map(len, TASKS))
        print("\n".join(f"{name.ljust(width)}  {task.about}" for name, task in TASKS.items()))
    return 0


@guard
def write_scaffold(
    directory: Path, task: str | None, agent: str | None, model: str | None, data: OwnData | None, output: str
) -> int:
    task = task or ("own" if data else TASK_OF_AGENT.get(agent or "", "sums"))
    if task not in TASKS:
        raise UserError(f"--task must be one of {', '.join(TASKS)}, got {task}")
    if agent is not None and task != TASK_OF_AGENT[agent]:
        raise UserError(f"--agent {agent} is for the task {TASK_OF_AGENT[agent]}, got {task}; {_ADD_AGENT}")
    if (task == "own") is not (data is not None):
        raise UserError(f"--data is for the task own, and this one is {task}; leave out one" if data else _NEEDS_DATA)
    values = {"name": name_job(directory), "about": TASKS[task].about, "model": _place_model(model, directory)}
    files = build_files(task, values | (_describe_data(data, directory) if data else {}))
    if taken := [file for file in files if (directory / file).exists()]:
        raise UserError(f"{directory} already has {', '.join(taken)}; choose another folder")
    for file, text in files.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(text)
    following = f"rljob test-reward {directory}/rljob.yaml --file {directory}/data/completions.jsonl"
    if parts := _find_parts(task):
        following = f"rljob test-agent {directory}/rljob.yaml {_show_answers(parts)}"
    if output == "json":
        print_json({"directory": str(directory), "task": task, "files": list(files), "next": following})
    else:
        print(f"wrote {', '.join(files)} in {directory}")
        print(f"next: {following}")
    return 0


_ADD_AGENT = "for other data, write a job without it and add spec.agent, as docs/agents.md shows"
_NEEDS_DATA = "the task own needs --data FILE; --list-tasks shows the tasks that bring their data"


def name_job(directory: Path) -> str:
    """Return the folder's name as the name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "my-job"
    name = name if name[0].isalpha() else f"job-{name}"
    return name[:_MAX_NAME_CHARACTERS].rstrip("-")


def build_files(task: str, values: dict[str, str]) -> dict[str, str]:
    """Return the text of each file. `values` are the placeholders of the templates."""
    reward, parts = TASKS[task].reward, _find_parts(task)
    values = values | _describe_files(reward is not None, parts)
    texts = {"rljob.yaml": _read(task, "rljob.yaml"), "README.md": (_TEMPLATES / "README.md").read_text()}
    files = {name: Template(text).substitute(values) for name, text in texts.items()}
    files |= {name: _read(task, name) for name in (parts.files if parts else ())}
    if reward:
        files |= {name: _read(reward, Path(name).name) for name in _REWARD_FILES}
    rows = {None: build_sums, "sums": build_sums, "products": build_products}.get(reward, dict)()
    if reward == "chat":
        rows = {split: _read("chat", f"{split}.jsonl") for split in ("train", "eval")}
    return files | {f"data/{split}.jsonl": text for split, text in rows.items()}


def _find_parts(task: str) -> AgentParts | None:
    agent = TASKS[task].agent
    return AGENTS[agent] if agent else None


def _show_answers(parts: AgentParts) -> str:
    """Return the options of `rljob test-agent`, as a shell takes them."""
    return " ".join("--answer " + (f'"{answer}"' if " " in answer else answer) for answer in parts.answers)


def _describe_files(has_reward: bool, parts: AgentParts | None) -> dict[str, str]:
    """Return the placeholders of the README that depend on the files."""
    listed, commands = (dict(_REWARD_FILES) if has_reward else {}), []
    if parts:
        listed |= parts.files
        commands += [
            (f"rljob test-agent rljob.yaml {_show_answers(parts)}", "plays an episode with these answers"),
            ("rljob test-agent rljob.yaml", "plays one with the base model"),
        ]
    if has_reward:
        command = "rljob test-reward rljob.yaml --file data/completions.jsonl"
        commands.append((command, "scores completions in the server that training uses"))
    return {
        "files": "\n".join(f"| `{name}` | {about} |" for name, about in listed.items()),
        "tests": "".join(f"{command.ljust(_COMMENT_COLUMN)} # {about}\n" for command, about in commands),
    }


_COMMENT_COLUMN = 58


def _read(task: str, name: str) -> str:
    return (_TEMPLATES / task / name).read_text()


def build_sums() -> dict[str, str]:
    """Return the rows of the sums. No sum of the evaluation, nor its mirror, is in the training data."""
    return _split({(a, b): (f"What is {a} + {b}?", a + b) for a in range(1, 13) for b in range(1, 13)})


def build_products() -> dict[str, str]:
    """Return the rows of the products, split like the sums."""
    return _split({(a, b): (f"What is {a} * {b}?", a * b) for a in range(11, 23) for b in range(11, 23)})


def _split(questions: dict[tuple[int, int], tuple[str, int]]) -> dict[str, str]:
    """Return the rows for training and evaluation by a rule that does not depend on the order of the two numbers."""
    is_held_out = {(a, b): (a * b) % 5 == 0 for a, b in questions}
    rows = {pair: {"question": text, "answer": str(answer)} for pair, (text, answer) in questions.items()}
    return {
        split: "".join(json.dumps(row) + "\n" for pair, row in rows.items() if is_held_out[pair] is held_out)
        for split, held_out in (("train", False), ("eval", True))
    }


def _place_model(model: str | None, directory: Path) -> str:
    """Return the model's source as the job must name it. Raise UserError if it is neither a folder nor on the hub."""
    if model is None:
        return DEFAULT_MODEL
    if "://" in model:
        parse_source(model)
        return model
    if not Path(model).is_dir():
        on_hub = f"; for a model on the hub write hf://{model}" if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else ""
        raise UserError(f"--model {model}: folder not found{on_hub or '; correct the path'}")
    return _quote(_relative(model, directory))


def _relative(path: str, directory: Path) -> str:
    """Return a path that starts at the job's folder."""
    if os.path.isabs(path):
        return path
    relative = os.path.relpath(path, directory)
    return relative if relative.startswith("..") else f"./{relative}"


def _describe_data(data: OwnData, directory: Path) -> dict[str, str]:
    """Return the placeholders of the user's rows; check that the columns exist."""
    if "://" in data.source:
        parse_source(data.source)
        prompt, answer = data.prompt or "prompt", data.answer or "answer"
        return {"data": data.source, "prompt": _quote(prompt), "answer": _quote(answer)}
    path = Path(data.source)
    if not path.exists():
        raise UserError(f"--data {path}: not found; correct the path")
    try:
        row = next(read_rows(DataSource(source=data.source), data.source, split="train"), None)
    except InputError as error:
        raise UserError(f"--data {error.message}") from None
    if row is None:
        raise UserError(f"--data {path}: has no rows")
    columns = list(row.values)
    prompt = _choose(data.prompt, _PROMPT_COLUMNS, columns, "--prompt")
    answer = _choose(data.answer, _ANSWER_COLUMNS, columns, "--answer")
    return {"data": _quote(_relative(data.source, directory)), "prompt": _quote(prompt), "answer": _quote(answer)}


def _choose(given: str | None, common: tuple[str, ...], columns: list[str], option: str) -> str:
    """Return the column of an option, or the first common name among the columns."""
    found = given or next((name for name in common if name in columns), None)
    # reward_model.ground_truth is a key in the column reward_model.
    if found is None or (found not in columns and found.partition(".")[0] not in columns):
        got = f", got {given}" if given else ""
        raise UserError(f"{option} must be a column of the rows{got}; they have {', '.join(columns)}")
    return found


def _quote(text: str) -> str:
    """Return text as a YAML scalar: plain if it can be."""
    return text if re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.lower() not in _YAML_WORDS else json.dumps(text)


_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
