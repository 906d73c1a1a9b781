"""`rljob init`: a small valid job to start from. Overwrites nothing; the texts are in task-templates.

Invariant: every relative path in a job starts at the job's folder.
"""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template

from rljob_api.errors import UserError
from rljob_api.manifest.sources import parse_source
from rljob_cli.check.device_fields import (
    DEFAULT_MODEL,
    Devices,
    build_device_fields,
    choose_model,
    describe_job,
    divide,
)
from rljob_cli.check.job_source import find_copy
from rljob_cli.check.own_data import OwnData, describe_own, quote, relative_to
from rljob_cli.local.node.gpus import describe_gpus, find_gpus, find_least_bytes
from rljob_cli.output import print_json
from rljob_inputs.hub import read_source

_TEMPLATES = resources.files("rljob_cli.check") / "task-templates"
_MAX_NAME_CHARACTERS = 40


@dataclass(frozen=True)
class Task:
    about: str
    reward: str | None
    """The template that has the reward, and the data. None: the agent brings the reward; the data are sums."""
    agent: str | None = None
    """agent.type, if it has more than one turn."""
    is_hard: bool = False
    """Whether a larger model has something to learn from it, too. It answers the others from the start."""


TASKS = {
    "sums": Task("The model learns to answer sums with the number alone.", "sums"),
    "chat": Task("Conversations of several turns; short replies with the right fact.", "chat"),
    "products": Task("Conversations with a simulated user and a tool: products of two numbers.", "products", "loop"),
    "tries": Task("A program that calls the model: sums, and another try after a wrong answer.", None, "program"),
    "quiz": Task("An environment asks for sums, and replies to wrong answers.", None, "environment"),
    "gsm8k": Task("Word problems of GSM8K, from the hub, with the usual reward.", "gsm8k", is_hard=True),
    "judge": Task("Sums scored by a function, and by a model that judges how polite the reply is.", "sums"),
    "own": Task("Your own rows: those of --data.", "own", is_hard=True),
}
"""The data of `judge` is that of its reward's task."""
TASK_OF_AGENT = {task.agent: name for name, task in TASKS.items() if task.agent}
"""The task that shows each value of `agent.type` that has more than one turn."""


@dataclass(frozen=True)
class AgentParts:
    files: dict[str, str]
    """Name and contents of each file of the agent."""
    answers: tuple[str, ...]
    """Answers of an episode on the first row: a wrong one, then the right one."""


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


def list_tasks(output: str) -> int:
    if output == "json":
        print_json({name: task.about for name, task in TASKS.items()})
    else:
        width = max(map(len, TASKS))
        print("\n".join(f"{name.ljust(width)}  {task.about}" for name, task in TASKS.items()))
    return 0


@dataclass(frozen=True)
class Options:
    """What the user asks for. None: not said."""

    task: str | None = None
    agent: str | None = None
    model: str | None = None
    data: OwnData | None = None
    num_gpus: int | None = None


def write_scaffold(directory: Path, options: Options, output: str) -> int:
    task, data = _choose_task(options), options.data
    found = find_devices()
    devices = found if options.num_gpus is None else replace(found, num_gpus=options.num_gpus)
    values = {"name": name_job(directory), "about": TASKS[task].about}
    values |= build_device_fields(devices, has_judge=task == "judge")
    own = describe_own(data, directory) if data else None
    values |= own.values if own else _OWN_ROWS
    if parts := _find_parts(task):
        if own and not own.values["accuracy"]:
            raise UserError(f"--agent {TASKS[task].agent} rewards {_NEEDS_ANSWERS}")
        known = [json.loads(line)["completion"] for line in own.completions.splitlines()[:1]] if own else []
        answers = ("I do not know.", *known) if own else parts.answers
        values["answers"] = " ".join(f"--completion {shlex.quote(answer)}" for answer in answers)
    values["model"] = _place_model(options.model, directory) or (
        choose_model(devices, lambda model: build_job(task, values | {"model": model}, devices))
        if TASKS[task].is_hard
        else DEFAULT_MODEL
    )
    if copy := find_copy(values["model"], directory):
        values["model"] = quote(os.path.relpath(copy, directory.resolve()))
    files = build_files(task, values, devices)
    if own:
        kept = (name for name in files if name not in ("data/train.jsonl", "data/eval.jsonl"))
        files = {name: own.completions * ("completions" in name) or files[name] for name in kept}
    if taken := [file for file in files if (directory / file).exists()]:
        raise UserError(f"{directory} already has {', '.join(taken)}; choose another folder")
    for file, text in files.items():
        try:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(text)
        except OSError:  # such as a full disk: the next call finds nothing in its way
            with contextlib.suppress(OSError):
                for each in files:
                    (directory / each).unlink(missing_ok=True)
            raise
    job = shlex.quote(f"{directory}/rljob.yaml")
    following = f"rljob test-reward {job} --file {shlex.quote(f'{directory}/data/completions.jsonl')}"
    if parts:
        following = f"rljob test-agent {job} {values['answers']}"
    if output == "json":
        result = {"directory": str(directory), "task": task, "files": list(files), "next": following}
        print_json(result | {"gpus_found": found.num_gpus, "gpus": devices.num_gpus, "model": values["model"]})
    else:
        print(f"wrote {', '.join(files)} in {directory}")
        print(describe_job(devices, found, task == "judge", values["model"]))
        print(f"next: {following}")
    return 0


def _choose_task(options: Options) -> str:
    data, agent = options.data, options.agent
    task = options.task or ("own" if data else TASK_OF_AGENT.get(agent or "", "sums"))
    if task not in TASKS:
        raise UserError(f"--task must be one of {', '.join(TASKS)}, got {task}")
    if agent in ("program", "environment") and data and not options.task:
        return TASK_OF_AGENT[agent]
    if agent is not None and task != TASK_OF_AGENT[agent]:
        raise UserError(f"--agent {agent} is for the task {TASK_OF_AGENT[agent]}, got {task}; {_ADD_AGENT}")
    if (task == "own") is not (data is not None):
        raise UserError(f"--data is for the task own, and this one is {task}; leave out one" if data else _NEEDS_DATA)
    return task


_COLUMNS = "prompt: question, answer: answer"
_OWN_ROWS = {
    "train": f"{{source: ./data/train.jsonl, {_COLUMNS}}}",
    "held_out": f"eval: {{source: ./data/eval.jsonl, {_COLUMNS}}}",
    "template": '"{question} Reply with the number only."',
}
"""Placeholders of the tasks that bring their data."""
_ADD_AGENT = "for other data, write a job without it and add spec.agent, as docs/agents.md shows"
_NEEDS_ANSWERS = "the answer of a row, and these rows have none; pass --answer COLUMN, or leave out --data"
_NEEDS_DATA = "the task own needs --data FILE; --list-tasks shows the tasks that bring their data"


def name_job(directory: Path) -> str:
    """Return the folder's name as the name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "my-job"
    name = name if name[0].isalpha() else f"job-{name}"
    return name[:_MAX_NAME_CHARACTERS].rstrip("-")


def build_job(task: str, values: dict[str, str], devices: Devices) -> str:
    """Return the text of rljob.yaml."""
    if task == "judge":
        values = values | {"judge": _build_judge(values, devices)}
    return Template(_read(task, "rljob.yaml")).substitute(values)


def _build_judge(values: dict[str, str], devices: Devices) -> str:
    """Return the judge's model and endpoint, one of them as a comment: without a GPU of its own it has an endpoint."""
    has_gpu = divide(devices.num_gpus, has_judge=True).judge > 0
    memory = {"judge_memory": "gpusPerReplica: 1" if devices.num_gpus else "kvCacheMemory: 512Mi"}
    texts = [Template(_read("judge", f"{name}.yaml")).substitute(values | memory) for name in ("model", "endpoint")]
    used, other = texts if has_gpu or not devices.num_gpus else reversed(texts)
    why = "" if used == texts[0] else ", with a GPU for the judge"
    comment = [f"# Or{why}:", *(f"# {line}" for line in other.splitlines())]
    return "\n      ".join([*used.splitlines(), *comment])


def build_files(task: str, values: dict[str, str], devices: Devices) -> dict[str, str]:
    """Return the text of each file. `values` are the placeholders of the templates."""
    reward, parts = TASKS[task].reward, _find_parts(task)
    values = values | _describe_files(values, reward is not None, parts)
    readme = (_TEMPLATES / "README.md").read_text()
    files = {"rljob.yaml": build_job(task, values, devices), "README.md": Template(readme).substitute(values)}
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


def _describe_files(values: Mapping[str, str], has_reward: bool, parts: AgentParts | None) -> dict[str, str]:
    """Return the placeholders of the README that depend on the files."""
    listed, commands = (dict(_REWARD_FILES) if has_reward else {}), []
    if parts:
        listed |= parts.files
        commands += [
            (f"rljob test-agent rljob.yaml {values['answers']}", "plays an episode with these answers"),
            ("rljob test-agent rljob.yaml", "plays one with the base model"),
        ]
    if has_reward:
        command = "rljob test-reward rljob.yaml --file data/completions.jsonl"
        commands.append((command, "scores completions in the server that training uses"))
    return {
        "files": "\n".join(f"| `{name}` | {about} |" for name, about in listed.items()),
        "shown": f"rljob trajectories {values['name']}".ljust(_COMMENT_COLUMN),
        "tests": "".join(f"{command.ljust(_COMMENT_COLUMN)} # {about}\n" for command, about in commands),
    }


_COMMENT_COLUMN = 58


def find_devices() -> Devices:
    """Return the GPUs that this user may use, with the least memory and the lowest capability among them."""
    num_gpus, gpus = len(find_gpus()), describe_gpus()
    if not gpus:
        return Devices(num_gpus)
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    least = find_least_bytes(gpus) or 0
    name = next(gpu.name for gpu in gpus if gpu.memory_bytes == least or not least)
    return Devices(num_gpus, name, least, min(known, default=None))


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


def _place_model(model: str | None, directory: Path) -> str | None:
    """Return the model's source as the job must name it; None if none is given. Raise UserError if it is neither a
    folder nor on the hub."""
    if model is None:
        return None
    model = read_source(model, Path())
    if "://" in model:
        parse_source(model)
        return model
    if not Path(model).is_dir():
        raise UserError(f"--model {model}: folder not found; correct the path")
    return quote(relative_to(model, directory))
