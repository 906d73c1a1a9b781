"""`rljob init --from FILE`: a configuration of verl, TRL or prime-rl as a job, by the tables of docs/coming-from.md.

A cell of these tables of settings is computed if it is one setting, or several with `/`, `x`,
`+` or `with` (if the other one is on) between them, each with the trainer's default in parentheses; then come the
values that stand for ours, in the same order. Other cells are for people, and for the list of what is near.

Invariant: nothing of FILE runs. Python is read by its syntax tree. A shell script is expanded by bash in its restricted
mode, which starts no program and writes no file. What the types of a job refuse is left out and listed.
"""

import json
import operator
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import TrainSource
from rljob_api.read.documents import read_documents
from rljob_api.read.load import read_manifest
from rljob_cli.check.jobfile import apply_override
from rljob_cli.check.own_data import relative_to
from rljob_cli.check.peer_settings import find_without_counterpart, name_field, read_table
from rljob_cli.check.scaffold import name_job
from rljob_cli.check.trl_scripts import Computed, read_trl_script
from rljob_cli.output import print_json
from rljob_inputs.data.rows import read_rows
from rljob_inputs.hub import read_source
from rljob_inputs.machine.bounded import bounded

Settings = dict[str, Any]
"""By name, with dots for tables in tables."""

_TERM = r"(?:`[^`]+`|rows)(?: \([^)]*\))?"
_CELL = re.compile(rf"({_TERM}(?: (?:[/x+]|with) {_TERM})*)(?:: ([\w., -]+))?")
_SETTING = re.compile(r"`?([\w.]+)`?(?: \((?:([\w.-]+)|[^)]*)\))?(?: ([/x+]|with) |$)")
"""With its default, and the sign before the next one."""
_OPERATORS = {
    "/": operator.floordiv,
    "x": lambda value, other: round(value * other),
    "+": operator.add,
    "with": lambda value, on: value if on else None,
}
_JOB = """apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: NAME}
spec: {model: {source: ./model}, data: {train: {source: ./rows.jsonl}}}
"""
_ALWAYS = {
    "verl": "{rollout.placement: trainer, data.train.answer: reward_model.ground_truth}",
    "TRL": "{rollout.placement: trainer, rollout.gpusPerReplica: 1, trainer.gpusPerReplica: 1}",
    "prime-rl": "{schedule.type: bounded, data.train.source: 'env://train'}",
}
"""By trainer: what it does without a setting."""
_AGENT = "{type: environment, environment: {framework: verifiers, id: ID, packages: [verifiers==0.4.0, ID]}}"
_OF_VERL = """
{module: verl.utils.reward_score, entrypoint: default_compute_score, requirements: [verl==0.9.1], maxMemory: 64Gi}
"""
_OF_TRL = "{module: trl.rewards, requirements: [trl==1.16.0, math-verify==0.9.0], maxMemory: 64Gi}"
"""Functions of the packages; docs/coming-from.md has the same."""
_EXPAND = """exec 3>&1 >/dev/null
command_not_found_handle() { printf '%s\\0' "$@" $'\\n' >&3; printf '%s' "$FILLER"; return 1; }
set() { :; }; cd() { :; }; source() { :; }; exit() { :; }; exec() { "$@"; }
enable -n kill; ulimit -t 10 -v 1048576; readonly PATH=/nonexistent; builtin set -r
"""
"""Programs are not found, and their arguments printed. No error ends the script, but 10 s of CPU time and 1 GiB do.
Bash itself protects PATH only where it begins in its restricted mode."""
_SECONDS = 10
_TO_FILE = re.compile(r"""(?<=\s)[12&]?>>?\s*(?:/|"?\$|[a-z])[^\s;|)]*""")
"""In the restricted mode, a command with it is refused."""


def write_translation(directory: Path, file: str, output: str) -> int:
    """Write the job, and print the settings that have no counterpart."""
    try:
        settings = _read_settings(Path(file))
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        raise UserError(f"{file}: {error}; correct the file") from None
    known = {peer: sum(f"`{name}`" in str(read_table(peer)) for name in settings) for peer in _ALWAYS}
    if not any(known.values()):
        raise UserError(
            f"{file} has no setting of {', '.join(known)}; pass the file that has them, as .sh, .yaml, .toml or .py"
        )
    peer = max(known, key=lambda peer: known[peer])
    if (path := directory / "rljob.yaml").exists():
        raise UserError(f"{path} exists; choose another folder")
    following = f"rljob validate {shlex.quote(str(path))}"
    job, left = translate(settings, peer, directory, file)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(job)
    if output == "json":
        print_json(
            {
                "directory": str(directory),
                "trainer": peer,
                "left": [dict(zip(("setting", "value", "why"), each, strict=True)) for each in left],
                "next": following,
            }
        )
    else:
        print(f"wrote {path} from {len(settings)} settings of {peer}; without a counterpart:")
        print(*(f"  {name} = {value}: {why}" for name, value, why in left), sep="\n")
        print(f"next: {following}")
    return 0


@bounded
def _read_settings(path: Path) -> Settings:
    text = path.read_text()
    if path.suffix == ".py":
        return read_trl_script(text)
    if path.suffix == ".toml":
        return _flatten(tomllib.loads(text), "")
    if path.suffix in (".yaml", ".yml"):
        # As its trainer reads it: a key n is text; in a job it is false.
        settings = _flatten(yaml.safe_load(text), "")
        return {
            name: _parse(f"{each}") if isinstance(each, str) or "${" in f"{each}" else each
            for name, each in settings.items()
        }
    return _read_script(text)


def _read_script(text: str) -> Settings:
    """Return the settings of all commands. Computed is what differs between commands, or with what programs print or
    unset variables have. Raise ValueError if there are none."""
    unset = {*re.findall(r"[A-Za-z_]\w*", text)} - {*re.findall(r"(\w+)(?::?[-=]|\+=)", text)}
    runs: list[dict[str, set[str]]] = []
    for filler in ("", "7", "9"):
        before = "".join(f": ${{{name}={filler}}};" for name in ("FILLER", *unset)) + _EXPAND
        script = ["bash", "-c", before + _TO_FILE.sub(" ", text)]
        try:
            done = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"does not end within {_SECONDS} s; remove the loop that waits for a program") from None
        runs.append({})
        for command in done.stdout.split("\n\0"):
            for name, value in dict(re.findall(r"(?:^|\0)[+~]*(\w+\.[\w.]+)=([^\0]*)", command)).items():
                runs[-1].setdefault(name, set()).add(value)
    settings: Settings = {}
    for name, values in next(filter(None, runs), {}).items():
        shown = " or ".join(sorted(values)) if runs[1].get(name) == runs[2].get(name) else ""
        settings[name] = _parse(shown) if shown in values - {""} else Computed(shown or "?")
    if settings:
        return settings
    for line, why in re.findall(r"line (\d+): (.*)", done.stderr)[-1:]:
        line = int(line) - before.count("\n")
        raise ValueError(f"line {line}: {why}; bash stops there, before a line with the trainer's settings")
    return {}


def _parse(text: str) -> Any:
    """Return the value of YAML as in a job: 1e-6 is a number."""
    documents, problems = read_documents(text)
    if "${" in text or "$(" in text:
        return Computed(text)
    return text if problems else documents[0].data if documents else None


def _flatten(node: Any, path: str) -> Settings:
    if not isinstance(node, dict):
        return {path[1:]: node}
    return {name: value for key, each in node.items() for name, value in _flatten(each, f"{path}.{key}").items()}


def translate(settings: Settings, peer: str, directory: Path, file: str) -> tuple[str, list[tuple[str, Any, str]]]:
    """Return a job; and by setting or field what is not in it, and why."""
    computed = {name: settings.pop(name) for name, value in [*settings.items()] if isinstance(value, Computed)}
    has_unknown = "args" in computed or "**" in "".join(computed)
    fields: Settings = _parse(_ALWAYS[peer]) | _describe(settings, peer, directory, file)
    names: dict[str, str] = {}
    for name in [*settings]:
        parent, _, key = name.rpartition(".")
        if parent.endswith("chat_template_kwargs"):
            settings.setdefault(parent, {})[key] = settings.pop(name)
    for ours, theirs in read_table(peer):
        cell, field = _CELL.fullmatch(theirs), name_field(ours)
        if not cell or field in names:
            continue
        terms = _SETTING.findall(cell[1])
        # A job without a number of GPUs would be one for CPUs: that has its default all the same.
        value, *others = (
            settings.get(
                name, None if has_unknown or (name in computed and "gpus" not in name) else _parse(default or "null")
            )
            for name, default, _ in terms
        )
        if None in (value, *others):
            continue
        for (*_, sign), other in zip(terms, others, strict=False):
            value = _OPERATORS[sign](value, other)
        if cell[2]:
            values = zip(cell[2].split(", "), ours.rpartition(": ")[2].split(", "), strict=False)
            value = _parse(dict(values).get(str(value).lower(), "null"))
        if value is not None:
            fields[field] = value
            names[field] = "" if "one process" in ours else " ".join(name for name, *_ in terms)
    fields |= {
        each: _place(fields[each], directory)
        for each in ("model.source", "data.train.source", "data.eval.source")
        if isinstance(fields.get(each), str)
    }
    used = " ".join(["rows", *names.values()]).split()
    settings |= computed
    left = [
        (name, value, _explain(name, value, peer))
        for name, value in settings.items()
        if name not in used or name in computed
    ]
    fields = {field: value for field, value in fields.items() if value not in ([], {})}
    while True:
        job = _parse(_JOB.replace("NAME", name_job(directory)))
        for field, value in fields.items():
            apply_override(job, f"spec.{field}={json.dumps(value)}")
        text = yaml.safe_dump(job, sort_keys=False)
        problems = read_manifest(read_documents(text)[0][0])[1]
        # A rule names what it is about, which may be a part of the job with the field in it.
        refused = {
            field: str(each) for each in problems for field in fields if f"spec.{field}.".startswith(f"{each.path}.")
        }
        if not refused:
            return text, left
        left += [(names.get(field) or field, fields.pop(field), why) for field, why in refused.items()]


def _explain(name: str, value: Any, peer: str) -> str:
    """Return why a setting has no counterpart, or what is near."""
    near = [ours for ours, theirs in read_table(peer) if f"`{name}`" in theirs]
    where = find_without_counterpart(name) or (f"near: {near[0].partition(': ')[0]}" if near else "nothing is near")
    return f"computed by the script; set it; {where}" if isinstance(value, Computed) else where


def _describe(settings: Settings, peer: str, directory: Path, file: str) -> Settings:
    """Return the fields of data, rewards and agent, and take what they are made of from the settings."""
    if peer == "prime-rl":
        earlier = ("orchestrator.env", "orchestrator.train.env")
        key = next((name for name in earlier if name in settings), "orchestrator.train.source")
        first, *others = settings.pop(key, None) or [{}]
        environment = first.pop("env", {"taskset": first.pop("taskset", {})})
        name = environment.setdefault("taskset", {}).pop("id", first.pop("id", "TASKSET")).rpartition("/")[2]
        settings |= _flatten({**first, "name": {}}, f".{key}") | ({key: others} if others else {})
        arguments = {name: value for name, value in environment.items() if value}
        return {"agent": _parse(_AGENT.replace("ID", name)), "agent.environment.args": arguments}
    if peer == "TRL":
        weights = settings.pop("reward_weights", None)
        rewards = []
        for place, value in [(each, settings.pop(each)) for each in [*settings] if each.startswith("reward_funcs.")]:
            (module, _, name), index = value.rpartition("."), int(place.rpartition(".")[2])
            source = Path(file).parent / f"{module.replace('.', '/')}.py" if module else Path(file)
            function = {"module": module, "entrypoint": name}
            if module.startswith("trl."):
                function = {**_parse(_OF_TRL), "entrypoint": name}
            elif source.exists():
                function = {"file": relative_to(str(source), directory), "entrypoint": name}
            weight = weights[index] if isinstance(weights, list) else 1
            rewards.append({"name": name.lower()[:40].strip("_"), "weight": weight, "function": function})
        return {"rewards": rewards}
    custom = {name.split(".")[-1]: settings.pop(name) for name in [*settings] if "custom_reward_function." in name}
    function = _parse(_OF_VERL)
    if path := custom.pop("path", None):
        function = {"file": relative_to(path, directory), "entrypoint": custom.pop("name", None), "kwargs": custom}
    columns = {"prompt": settings.pop("data.prompt_key", "prompt"), "answer": "reward_model.ground_truth"}
    train: list[Settings] = []
    held_out: list[Settings] = []
    for key, sources in (("data.train_files", train), ("data.val_files", held_out)):
        files = settings.pop(key, ())
        for path in [files] if isinstance(files, str) else files or ():
            name = re.sub("[^a-z0-9]+", "-", path.lower())[-32:].strip("-")
            sources.append({"name": name, "source": _place(path, directory), **columns})
            if sources is train and os.path.exists(path):
                sources[-1]["weight"] = sum(1 for _ in read_rows(TrainSource(source=path), path, split="train"))
    if train and all("weight" in source for source in train):
        settings["rows"] = sum(source["weight"] for source in train)
    sets = [{"name": source.pop("name"), "data": source} for source in held_out]
    return {
        "rewards": [{"name": "reward", "function": function}],
        "data.train": train[0] if train else {"source": "./rows.parquet", **columns},
        "data.mix": train[1:],
        "evaluation.sets": sets,
    }


def _place(source: str, directory: Path) -> str:
    """Return a model or data as a job names it. What is no path here, and could be a name on the Hub, is one."""
    is_name = re.fullmatch(
        r"(?!(json|csv|text|parquet)$)[\w-][\w.-]*(?<!\.jsonl)(?<!\.parquet)", source
    ) and not os.path.exists(source)
    path = f"hf://{source}" if is_name else read_source(source, Path())
    return path if "://" in path else relative_to(path, directory)
