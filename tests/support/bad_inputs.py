"""Job files and inputs as people get them wrong, each with what `rljob validate` must answer.

`python -m tests.support.bad_inputs` runs each as a user does, and prints message, exit code and seconds.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.model_folder import write_model, write_weights

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: ./model}
  data:
    train: {source: train.jsonl, prompt: question, answer: answer}
  rewards:
  - name: correct
    function: {file: reward.py}
  schedule: {steps: 2}
  rollout: {maxModelLen: 64, sampling: {maxTokens: 8}}
"""
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
ROW = '{"question": "1 + 1 =", "answer": "2"}\n'
SAID, REPLIED = {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}


def row_of_messages(*messages: dict[str, Any]) -> str:
    return json.dumps({"question": messages, "answer": "2"}) + "\n"


@dataclass(frozen=True)
class BadInput:
    name: str
    message: str
    """Part of the answer."""
    job: str | bytes = JOB
    files: dict[str, str | bytes | None] = field(default_factory=dict)
    """Files that replace those of the good job; None deletes one."""
    arguments: tuple[str, ...] = ()
    calls: bool = False
    """Whether only a call of the reward finds it, in a separate process."""

    def write(self, folder: Path) -> None:
        write_model(folder / "model")
        files = {"train.jsonl": ROW, "reward.py": REWARD, "job.yaml": self.job, **self.files}
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)

    @property
    def command(self) -> list[str]:
        return ["validate", "job.yaml", "--local", *self.arguments]


def edit(name: str, old: str, new: str, message: str, **files: str | bytes | None) -> BadInput:
    """Replace a part of the good job."""
    assert old in JOB, old
    return BadInput(name, message, JOB.replace(old, new), dict(files))


def agent(name: str, settings: str, message: str, *, calls: bool = False, **files: str | bytes | None) -> BadInput:
    """Add an agent."""
    job = JOB.replace("answer: answer}\n", "answer: answer}\n    format: chat\n")
    return BadInput(name, message, f"{job}  agent: {{{settings}}}\n", dict(files), calls=calls)


def add(name: str, line: str, message: str) -> BadInput:
    """Add a line to spec."""
    return BadInput(name, message, f"{JOB}  {line}\n")


def data(name: str, content: str | bytes, message: str) -> BadInput:
    return BadInput(name, message, files={"train.jsonl": content})


def reward(name: str, source: str | bytes, message: str, *, calls: bool = False) -> BadInput:
    return BadInput(name, message, files={"reward.py": source}, calls=calls)


def model(name: str, message: str, **files: str | bytes | None) -> BadInput:
    return BadInput(name, message, files={f"model/{file.replace('__', '.')}": text for file, text in files.items()})


def config(name: str, message: str, **fields: object) -> BadInput:
    with tempfile.TemporaryDirectory() as folder:
        values = json.loads((write_model(Path(folder), fields) / "config.json").read_text())  # type: ignore[arg-type]
    return model(name, message, config__json=json.dumps(values))


def _weights(num_bytes: int | None = None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w"
        write_weights(path, {"embed": [300, 2], "head": [2]}, num_bytes)
        return path.read_bytes()


def _parquet() -> bytes:
    import io

    import pyarrow as pa
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["a"], "label": ["b"]}), stream)
    return stream.getvalue()


_TEMPLATE = "template: {spec: {containers: [{name: trainer, %s}]}}"

BAD_INPUTS: list[BadInput] = [
    # YAML and the file itself
    BadInput("tab", "job.yaml:5: the line is indented with a tab; use spaces", JOB.replace("  model:", "\tmodel:")),
    BadInput("unclosed bracket", "the YAML cannot be read", JOB.replace("{name: sums}", "{name: sums")),
    BadInput("wrong indentation", "the YAML cannot be read", JOB.replace("  schedule:", "   schedule:")),
    BadInput("missing space after a colon", "spec must be a mapping", JOB.split("spec:")[0] + "spec: model:./model\n"),
    BadInput("empty file", "must contain exactly one RLJob, got none", ""),
    BadInput("only comments", "must contain exactly one RLJob, got none", "# my job\n"),
    BadInput("a list", "must be a mapping with apiVersion and kind, got a list of 1", "- a\n"),
    BadInput("plain text", "must be a mapping with apiVersion and kind", "hello\n"),
    BadInput("binary data", "is not UTF-8 text", bytes(range(128, 256))),
    BadInput("a control character", "U+0000", JOB + "\0"),
    BadInput("UTF-16", "is not UTF-8 text", JOB.encode("utf-16")),
    BadInput("JSON with a trailing comma", "job.yaml", '{"apiVersion": "rljob.dev/v1alpha1",, }'),
    BadInput("unknown alias", "the YAML cannot be read", JOB.replace("{steps: 2}", "*common")),
    BadInput("recursive alias", "contains itself", "a: &a [*a]\n"),
    BadInput("duplicate key", "spec.schedule is a duplicate (first in line 11)", JOB + "  schedule: {steps: 3}\n"),
    BadInput("two jobs", "must contain exactly one RLJob, got 2", f"{JOB}---\n{JOB}"),
    BadInput("a custom tag", "the YAML cannot be read", JOB.replace("{steps: 2}", "!!python/object:os.system {}")),
    BadInput("no file", "none.yaml: not found", arguments=("none.yaml",)),
    BadInput("a folder", "model: not a file", arguments=("model",)),
    # header
    edit("wrong apiVersion", "v1alpha1", "v1beta1", "apiVersion must be rljob.dev/v1alpha1"),
    edit("misspelled kind", "kind: RLJob", "kind: RLjob", "did you mean RLJob?"),
    edit("missing kind", "kind: RLJob\n", "", "kind is required"),
    edit("missing metadata", "metadata: {name: sums}\n", "", "metadata is required"),
    edit("name with capitals", "name: sums", "name: My_Sums", "metadata.name must be lower-case letters"),
    edit("name that is a number", "name: sums", "name: 7", "metadata.name must be text, got 7; put it in quotes"),
    edit("name that is too long", "name: sums", f"name: {'s' * 41}", "metadata.name must have at most 40 characters"),
    # fields
    edit("misspelled field", "schedule:", "shedule:", "spec.shedule is unknown; did you mean schedule?"),
    edit("snake case", "maxModelLen", "max_model_len", "did you mean maxModelLen?"),
    edit("field in the wrong section", "schedule: {steps: 2}", "steps: 2", "steps belongs in spec.schedule"),
    edit("number in quotes", "steps: 2", 'steps: "2"', 'must be a whole number, got "2"; write it without quotes'),
    edit("fraction", "steps: 2", "steps: 2.5", "spec.schedule.steps must be a whole number, got 2.5"),
    edit("negative number", "steps: 2", "steps: -1", "spec.schedule.steps must be at least"),
    edit("nothing after a colon", "{steps: 2}", "{steps: }", "spec.schedule.steps must be a whole number, got nothing"),
    edit("text for a list", "sampling: {maxTokens: 8}", "sampling: {stop: x}", "stop must be a list"),
    edit("list for a mapping", "{steps: 2}", "[steps]", "spec.schedule must be a mapping"),
    edit("rewards as a mapping", "- name: correct\n   ", "  name: correct\n   ", "spec.rewards must be a list"),
    edit(
        "no rewards",
        "rewards:\n  - name: correct\n    function: {file: reward.py}\n",
        "rewards: []\n",
        "spec.rewards must have at least one entry",
    ),
    edit("missing model", "  model: {source: ./model}\n", "", "spec.model is required"),
    edit("missing data", "source: train.jsonl, ", "", "spec.data.train.source is required"),
    edit("infinite number", "{steps: 2}", "{steps: .inf}", "must be a whole number"),
    add("unknown choice", "algorithm: {loss: {level: tokens}}", "did you mean token?"),
    add("unknown field of a section", "algorithm: {clip: 0.2}", "spec.algorithm.clip is unknown"),
    add("field above its section", "algorithm: {clipHigh: 0.3}", "clipHigh belongs in spec.algorithm.loss"),
    add("unit in a name", "tracking: {trajectoriesMiB: 4096}", "is unknown; did you mean trajectoriesSize?"),
    add("number without a unit", "tracking: {trajectoriesSize: 4096}", "must be 0 or at least 1Mi, got 4096; write"),
    add("boolean with three values", "trainer: {compile: true}", "must be one of auto, always, never"),
    edit(
        "unknown dtype", "schedule:", "trainer: {dtype: bf16}\n  schedule:", "must be one of bfloat16, float16, float32"
    ),
    add("batch that does not divide", "trainer: {replicas: 7}", "must be divisible by the number of trainer ranks"),
    edit("completion without room", "maxTokens: 8", "maxTokens: 64", "must leave room for the prompt"),
    add(
        "evaluation without data",
        "evaluation: {everySteps: 1}",
        "must be 0 without data.eval and evaluation.sets, got 1; add data.eval",
    ),
    add("suspended job", "suspend: true", "spec.suspend is true, so nothing would run"),
    edit("temperature zero", "maxTokens: 8", "maxTokens: 8, temperature: 0", "must be more than 0 for training"),
    edit("no rollouts", "maxModelLen: 64", "maxModelLen: 64, replicas: 0", "spec.rollout.replicas must be at least 1"),
    # rewards
    edit(
        "two rewards with one name",
        "  schedule:",
        "  - {name: correct, http: {url: 'http://x'}}\n  schedule:",
        "must have different names, got correct in rewards[0] and rewards[1]",
    ),
    edit("reward without a kind", "    function: {file: reward.py}\n", "", "must have exactly one of function, model"),
    edit(
        "file and inline", "{file: reward.py}", "{file: reward.py, inline: x}", "must have exactly one of inline, file"
    ),
    edit("wrong file name", "reward.py}", "rewards.py}", "rewards.py not found; did you mean reward.py?"),
    edit("reward is a folder", "reward.py}", "model}", "must be a Python file, got a folder"),
    edit("reward outside", "reward.py}", "../nowhere/reward.py}", "not found either"),
    edit(
        "ConfigMap that is missing",
        "{file: reward.py}",
        "{configMapKeyRef: {name: f, key: k}}",
        "names the ConfigMap f, which is not in this file",
    ),
    edit(
        "signature with a typo",
        "reward.py}",
        "reward.py, signature: verll}",
        "spec.rewards[0].function.signature verll is not installed; known are auto, msSwift",
    ),
    BadInput(
        "function that is missing",
        "the entry point score was not found (it defines compute_score); correct function.entrypoint",
        JOB.replace("reward.py}", "reward.py, entrypoint: score}"),
        calls=True,
    ),
    BadInput(
        "inline function of an unknown form",
        "job.yaml:13: spec.rewards[0].function.inline cannot be used: line 2: compute_score(a, b) does not match",
        JOB.replace("{file: reward.py}", "\n      inline: |\n        x = 1\n        def compute_score(a, b): ..."),
        calls=True,
    ),
    reward("syntax error", "def compute_score(:\n", "reward.py:1: syntax error: "),
    reward("no function", "x = 1\n", "reward.py:1: none of compute_score, ", calls=True),
    reward(
        "unknown parameters", "def compute_score(a, b): ...\n", "reward.py:1: compute_score(a, b) does not", calls=True
    ),
    reward(
        "unknown column",
        REWARD.replace("extra_info=None", "level"),
        "is not a column of the data; the columns are",
        calls=True,
    ),
    reward("binary source", b"\xff\xfe\x00", "is not UTF-8 text"),
    reward(
        "tabs and spaces",
        "def compute_score(data_source, solution_str, ground_truth):\n\tx = 1\n        return x\n",
        "syntax error",
    ),
    reward("Python 2", "def compute_score(data_source, solution_str, ground_truth):\n    print 'x'\n", "syntax error"),
    reward("missing package", "import no_such_module\n" + REWARD, "No module named 'no_such_module'", calls=True),
    reward("exception at import", "x = 1 / 0\n" + REWARD, "reward.py:1: ZeroDivisionError", calls=True),
    reward("exception in a call", REWARD.replace("1.0", "{}['k']"), "reward.py:2: KeyError: 'k'", calls=True),
    reward("text as a score", REWARD.replace("1.0", "'good'"), "bad_return", calls=True),
    reward("dict without a score", REWARD.replace("1.0", "{'a': 1}"), "bad_return", calls=True),
    reward("NaN", REWARD.replace("1.0", "float('nan')"), "not_finite", calls=True),
    reward("exit", "import sys\nsys.exit(1)\n" + REWARD, "cannot be used", calls=True),
    BadInput("unknown accuracy", "returned: score", f"{JOB}  evaluation: {{accuracy: exact}}\n", calls=True),
    edit("negative weight as text", "name: correct", 'name: correct\n    weight: "1"', "must be a number"),
    edit("reward name with capitals", "name: correct", "name: Correct", "spec.rewards[0].name must be lower-case"),
    edit("reward named by a boolean", "name: correct", "name: yes", "must be text, got true; put it in quotes"),
    edit(
        "requirement with an option",
        "{file: reward.py}",
        "{file: reward.py, requirements: [-r x.txt]}",
        "must be one requirement",
    ),
    edit(
        "regex without a group",
        "function: {file: reward.py}",
        "judge: {template: x, parser: {regex: x}, endpoint: {url: 'http://x', model: m}}",
        "has no group",
    ),
    edit(
        "broken regex",
        "function: {file: reward.py}",
        "judge: {template: x, parser: {regex: '(x'}, endpoint: {url: 'http://x', model: m}}",
        "judge.parser.regex",
    ),
    BadInput(
        "broken template of a judge",
        "judge.template:1: ",
        JOB.replace(
            "function: {file: reward.py}",
            "judge: {template: '{{ x', parser: {regex: '(x)'}, endpoint: {url: 'http://x', model: m}}",
        ),
        calls=True,
    ),
    edit(
        "URL without a scheme",
        "function: {file: reward.py}",
        "http: {url: scorer/}",
        "must begin with http:// or https://",
    ),
    edit("URL without a host", "function: {file: reward.py}", "http: {url: 'http:///x'}", "must name a host"),
    edit(
        "missing key of an endpoint",
        "function: {file: reward.py}",
        "judge: {template: x, parser: {regex: '(x)'}, endpoint: {url: 'http://x', model: m, apiKeySecretRef: {name: k, "
        "key: NO_SUCH_KEY}}}",
        "set that variable",
    ),
    # data
    edit("wrong data file", "train.jsonl", "trian.jsonl", "trian.jsonl not found; did you mean train.jsonl?"),
    edit("wrong folder", "train.jsonl", "data/train.jsonl", "not found either"),
    edit("wrong column", "prompt: question", "prompt: questoin", "did you mean question?"),
    edit("wrong nested column", "answer: answer", "answer: reward_model.ground_truth", "reward_model"),
    edit(
        "unknown scheme",
        "train.jsonl",
        "ftp://host/train",
        "spec.data.train.source must be hf://org/name, pvc://claim/path, s3://bucket/path, env://split or a path",
    ),
    edit("claim without a folder", "train.jsonl", "pvc://data/train.jsonl", "add --volume data=DIR"),
    edit(
        "text",
        "train.jsonl",
        "train.txt",
        "or .tsv file, also compressed as .gz, got .txt",
        **{"train.txt": "question\n"},
    ),
    edit("empty folder", "train.jsonl", "empty", "empty has no data: a .jsonl", **{"empty/x.txt": ""}),
    edit("Parquet with other columns", "train.jsonl", "t.parquet", "prompt, label", **{"t.parquet": _parquet()}),
    edit("Parquet that is none", "train.jsonl", "t.parquet", "is not a readable Parquet file", **{"t.parquet": "PAR1"}),
    data("empty data", "", "has no rows"),
    data("JSON array", "[\n" + ROW + "]\n", "train.jsonl:1: is a JSON array; name it .json"),
    data("rows of text", '"a"\n', "must be a JSON object"),
    data("broken row", ROW + "{oops\n", "train.jsonl:2: not JSON"),
    data("single quotes", "{'question': 'a', 'answer': 'b'}\n", "train.jsonl:1: not JSON"),
    data("row without the column", ROW + '{"answer": "2"}\n', "train.jsonl:2"),
    data(
        "chat with the answer",
        row_of_messages(SAID, REPLIED),
        "the last message is the assistant's, so the prompt would",
    ),
    data("image", row_of_messages({"role": "user", "content": [{"type": "image"}]}), "a part of type image; only text"),
    data("null prompt", ROW + '{"question": null, "answer": "2"}\n', "train.jsonl:2"),
    data("number as a prompt", '{"question": 7, "answer": "2"}\n', "train.jsonl:1"),
    data("binary rows", bytes(range(256)), "train.jsonl:1"),
    data("only long prompts", '{"question": "' + "x" * 500 + '", "answer": "2"}\n', "maxModelLen"),
    # models
    edit("wrong model folder", "./model", "./modle", "modle not found"),
    edit("model is a file", "./model", "./train.jsonl", "is a file; a model is a folder"),
    edit("unknown scheme of a model", "./model", "https://huggingface.co/x", "must be hf://org/name"),
    edit("hf without a name", "./model", "hf://", "must be hf://org/name"),
    edit("Hub without a network", "./model", "hf://org/model", "cannot reach the Hub"),
    model("no config", "config.json is missing", config__json=None),
    model("broken config", "is not JSON", config__json="{"),
    model("no weights", "no weights", model__safetensors=None),
    model("truncated weights", "model.safetensors", model__safetensors=_weights(200)),
    model("weights that are none", "model.safetensors", model__safetensors="<html>Not found</html>"),
    model("huge header", "model.safetensors", model__safetensors=struct.pack("<Q", 2**60)),
    model("no tokenizer", "no tokenizer", tokenizer__json=None, tokenizer_config__json=None),
    model("broken tokenizer", "tokenizer", tokenizer__json="{}"),
    config("encoder model", "BertForMaskedLM", architectures=["BertForMaskedLM"], model_type="bert"),
    config("no model_type", "model_type", model_type=None),
    edit("context that is too short", "maxModelLen: 64", "maxModelLen: 4096", "spec.rollout.maxModelLen"),
    edit(
        "chat without a template",
        "  rewards:",
        "    format: chat\n  rewards:",
        "chat template",
        **{"model/chat_template.jinja": None},
    ),
    # Pods
    add("env name with =", "trainer: {env: {A=B: x}}", "spec.trainer.env.A=B must be an environment variable's name"),
    add("env value y", "trainer: {env: {DEBUG: y}}", "spec.trainer.env.DEBUG must be text, got true; put it in quotes"),
    add("env value as a number", "trainer: {env: {RANKS: 8}}", "must be text, got 8; put it in quotes"),
    add("reserved env", "head: {env: {RLJOB_TOKEN: x}}", "names that begin with RLJOB_"),
    add("wrong quantity", "trainer: {resources: {limits: {memory: 16 GB}}}", "must be a Kubernetes quantity such as"),
    add("node selector as a list", "trainer: {template: {spec: {nodeSelector: [a]}}}", "must be a mapping"),
    add("section that exists already", "rollout: {nodePool: {nodeSelector: {'my gpu': a}}}", "is a duplicate"),
    add("template field", "trainer: {template: {spec: {tolerationz: []}}}", "did you mean tolerations?"),
    add(
        "template without spec",
        "trainer: {template: {containers: []}}",
        "template may have metadata and spec, got containers",
    ),
    add("container without a name", "trainer: {template: {spec: {containers: [{image: x}]}}}", "by which it is merged"),
    add("command as text", f"trainer: {{{_TEMPLATE % 'command: python'}}}", "must be a list"),
    add("queue without kueue", "scheduling: {queue: main}", "spec.scheduling.queue has no meaning"),
    add("too many GPUs", "trainer: {gpusPerReplica: 8}", "the job requests 8 GPUs, this machine has"),
    # agents
    agent(
        "framework with a typo",
        "type: environment, environment: {framework: gymnasim, id: 'a:B'}",
        "spec.agent.environment.framework gymnasim is not installed; known are gymnasium, openenv, openrlhf, skyrlGym",
    ),
    agent("environment without a name", "type: environment, environment: {framework: trl}", "needs environment.id or"),
    agent("type without its section", "type: environment", "spec.agent.environment must be set with type environment"),
    agent("program without code", "type: program", "spec.agent.runner must have a function or a command"),
    agent(
        "package with an option",
        "type: environment, environment: {framework: trl, id: 'a:B', packages: ['-r x']}",
        "spec.agent.environment.packages[0]",
    ),
    agent("runner of a single turn", "runner: {command: [python]}", "is for the types environment and program"),
    agent(
        "function and command",
        "type: program, runner: {command: [python], function: {file: agent.py}}",
        "are alternatives",
        **{"agent.py": "def run(client): ...\n"},
    ),
    agent(
        "program without run",
        "type: program, runner: {function: {file: agent.py}}",
        "agent.py:1: neither run nor a class with run was found (it defines main); set function.entrypoint: main",
        calls=True,
        **{"agent.py": "def main(client): ...\n"},
    ),
    agent(
        "parameter that nothing gives",
        "type: program, runner: {function: {file: agent.py}}",
        "agent.py:1: run(promt) requires promt; passed are prompt, ",
        calls=True,
        **{"agent.py": "def run(promt): ...\n"},
    ),
    agent(
        "user without respond",
        "type: loop, user: {function: {file: user.py}}",
        "user.py:1: neither respond nor a class with respond was found (it defines reply)",
        calls=True,
        **{"user.py": "def reply(messages): ...\n"},
    ),
    agent(
        "tool without types",
        "type: loop, user: {function: {file: user.py}}, tools: [{name: t, function: {file: tools.py}}]",
        "tools.py:2: add(a, b): the parameter b has no type, which becomes its schema",
        calls=True,
        **{"user.py": "def respond(messages): ...\n", "tools.py": "\ndef add(a: int, b): ...\n"},
    ),
    agent("missing program", "type: program, runner: {function: {file: agent.py}}", "agent.py not found"),
    agent("unknown command", "type: program, runner: {command: [pyhton]}", "spec.agent.runner.command[0]"),
    agent(
        "script without its folder",
        "type: program, runner: {command: [python, agent.py]}",
        "set runner.workingDir to its folder",
        **{"agent.py": ""},
    ),
    # arguments
    BadInput("--set without a value", "--set must be PATH=VALUE", arguments=("--set", "spec.schedule.steps")),
    BadInput("--set of nothing", "does not exist", arguments=("--set", "spec.rewards[3].name=x")),
    BadInput(
        "--set with a wrong value",
        "spec.schedule.steps must be a whole number",
        arguments=("--set", "spec.schedule.steps=many"),
    ),
    BadInput("--volume without a folder", "--volume must be CLAIM=DIR", arguments=("--volume", "data")),
    BadInput("both targets", "pass --cluster or --local", arguments=("--cluster",)),
]


def _cpu_seconds() -> float:
    """Return what ended children used: unlike the clock, it does not depend on what else runs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Run all, print a table, and return 1 if an answer is wrong or late."""
    failures, slowest, slowest_cpu = [], 0.0, 0.0
    print("| input | seconds | of CPU | exit | answer |\n|---|---|---|---|---|")
    for bad in BAD_INPUTS:
        with tempfile.TemporaryDirectory() as name:
            bad.write(Path(name))
            started, used = time.monotonic(), _cpu_seconds()
            command = [sys.executable, "-m", "rljob_cli.main", *bad.command]
            done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
            seconds, cpu = time.monotonic() - started, _cpu_seconds() - used
        lines = [line for line in (done.stdout + done.stderr).splitlines() if bad.message in line]
        answer = (lines or [done.stderr.strip() or done.stdout.strip()])[0].replace(f"{name}/", "").replace("|", "\\|")
        print(f"| {bad.name} | {seconds:.1f} | {cpu:.1f} | {done.returncode} | {answer} |", flush=True)
        slowest, slowest_cpu = max(slowest, seconds), max(slowest_cpu, cpu)
        if not lines or done.returncode != 2:
            failures.append(bad.name)
    count = f"{len(BAD_INPUTS)} inputs, {len(failures)} with another answer {failures}"
    print(f"\n{count}; slowest {slowest:.1f} s, {slowest_cpu:.1f} s of CPU")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
