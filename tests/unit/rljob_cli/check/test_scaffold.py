"""The tasks of `rljob init`: each is a valid job whose reward ranks completions from good to bad."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.read.documents import read_documents
from rljob_cli.check import scaffold
from rljob_cli.check.device_fields import DEFAULT_MODEL, Devices
from rljob_cli.check.jobfile import load
from rljob_cli.check.scaffold import TASKS, name_job
from rljob_cli.main import app
from rljob_core.plan.job import render_children
from rljob_inputs.data.rows import read_rows
from rljob_inputs.machine.nvidia import Gpu

SCORES = {"sums": [1.0, 0.5, 0.0], "chat": [1.0, 0.8, 0.7], "gsm8k": [1.0, 0.0, 0.0], "own": [1.0, 0.5, 0.1]}
SCORES["judge"] = SCORES["sums"]
SCORES["products"] = [1.0, 0.6, 0.2]
SMALL = "hf://Qwen/Qwen2.5-0.5B-Instruct"
HOSTED = {"tries": "program", "quiz": "environment"}
"""Tasks whose agent brings the reward."""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without GPUs; `machine(GPU, ...)` gives it some."""

    def show(*gpus):
        monkeypatch.setattr(scaffold, "find_gpus", lambda: [gpu.index for gpu in gpus])
        monkeypatch.setattr(scaffold, "describe_gpus", lambda: list(gpus))

    show()
    return show


def init(*arguments):
    done = CliRunner().invoke(app, ["init", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A file with rows of the user's, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "label": "b", "on": "c", "reward_model": {"ground_truth": "d"}}\n')
    return path


def make(task, folder, *options):
    arguments = ["--data", "rows.jsonl"] if task == "own" else ["--task", task]
    done = init(folder, *arguments, *options)
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_job_of_each_task_can_be_planned(rows, tmp_path, task):
    file = load(make(task, tmp_path / f"My {task}") / "rljob.yaml")
    assert (file.job.metadata.name, file.job.spec.model.source) == (f"my-{task}", DEFAULT_MODEL)
    assert render_children(file.job, "token")
    assert file.job.spec.evaluation.accuracy or file.job.spec.data.eval is None or task in HOSTED


L4 = [Gpu(str(index), "GPU-0", "NVIDIA L4", 23034 * 2**20, "580.65.06", 8.9) for index in range(8)]
T4 = Gpu("1", "GPU-1", "Tesla T4", 15360 * 2**20, "580.65.06", 7.5)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("task", TASKS)
def test_job_of_each_task_uses_the_gpus_of_the_machine(rows, machine, tmp_path, task, num_gpus):
    machine(*L4[:num_gpus])
    spec = load(make(task, tmp_path / task) / "rljob.yaml").job.spec
    served = [model for service in spec.services if (model := service.settings.served_model)]
    apart = 0 if spec.shares_trainer else spec.rollout.replicas * spec.rollout.gpus_per_replica
    used = spec.trainer.gpus_per_replica + apart + sum(model.gpus_per_replica for model in served)
    assert used == num_gpus
    assert spec.shares_trainer is (num_gpus - len(served) == 1)
    assert spec.rollout.gpus_per_replica == 1
    assert all(model.gpus_per_replica == 1 for model in served), "vLLM's build for GPUs does not run on CPUs"
    assert spec.trainer.num_ranks * spec.trainer.replicas in (1, 2, 4)
    assert spec.schedule.prompts_per_step * spec.algorithm.group_size % spec.trainer.num_ranks == 0
    assert spec.trainer.dtype == "bfloat16"


@pytest.mark.parametrize(("task", "model"), [("sums", DEFAULT_MODEL), ("gsm8k", SMALL), ("own", SMALL)])
def test_task_that_has_something_to_teach_gets_the_largest_model_that_fits(rows, machine, tmp_path, task, model):
    machine(L4[0])
    done = init(tmp_path / "j", *(["--data", "rows.jsonl"] if task == "own" else ["--task", task]))
    assert source_of(tmp_path / "j") == model
    assert "found 1 GPU (NVIDIA L4, 22.5 GiB); the job: trainer and rollouts share 1 GPU, bfloat16" in done.stdout
    text = (tmp_path / "j" / "rljob.yaml").read_text()
    assert "# For 1 GPU (NVIDIA L4, 22.5 GiB). On another machine: `rljob init` there, or here with --gpus N" in text


def test_models_and_data_may_have_their_names_on_the_hub(rows, tmp_path):
    init(tmp_path / "j", "--model", "Qwen/Qwen3-0.6B", "--data", "https://huggingface.co/datasets/openai/gsm8k")
    spec = load(tmp_path / "j/rljob.yaml").job.spec
    assert (spec.model.source, spec.data.train.source) == ("hf://Qwen/Qwen3-0.6B", "hf://openai/gsm8k")


def test_copy_of_the_default_model_is_used_without_a_network(rows, tmp_path):
    (tmp_path / ".models/smollm2-135m-instruct").mkdir(parents=True)
    init(tmp_path / "jobs/j")
    assert "source: ../../.models/smollm2-135m-instruct" in (tmp_path / "jobs/j/rljob.yaml").read_text()


def test_weakest_gpu_decides_on_model_and_dtype(rows, machine, tmp_path):
    machine(L4[0], T4)
    init(tmp_path / "j", "--task", "gsm8k")
    job = load(tmp_path / "j" / "rljob.yaml").job
    assert (job.spec.trainer.dtype, job.spec.model.source) == ("float16", SMALL)


def test_gpus_that_nvidia_smi_does_not_know_have_unknown_memory(monkeypatch):
    monkeypatch.setattr(scaffold, "find_gpus", lambda: ["MIG-1"])
    monkeypatch.setattr(scaffold, "describe_gpus", list)
    assert scaffold.find_devices() == Devices(1)


@pytest.mark.parametrize(("here", "asked", "gpus"), [(0, 1, 1), (2, 0, 0), (1, 4, 2)])
def test_option_overrides_what_the_machine_has(machine, tmp_path, here, asked, gpus):
    machine(*L4[:here])
    done = json.loads(init(tmp_path / "j", "--gpus", str(asked), "-o", "json").stdout)
    assert (done["gpus_found"], done["gpus"]) == (here, asked)
    spec = load(tmp_path / "j" / "rljob.yaml").job.spec
    assert spec.trainer.gpus_per_replica == gpus


def test_judge_without_a_gpu_of_its_own_asks_an_endpoint(machine, tmp_path):
    machine(L4[0])
    init(tmp_path / "j", "--task", "judge")
    judge = load(tmp_path / "j" / "rljob.yaml").job.spec.rewards[1].judge
    assert (judge.model, judge.endpoint.model) == (None, "gpt-4.1-mini")
    assert "# Or, with a GPU for the judge:" in (tmp_path / "j" / "rljob.yaml").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_rows_of_each_task_have_the_columns_of_its_job(rows, tmp_path, task):
    file = load(make(task, tmp_path / task) / "rljob.yaml")
    for data in filter(None, (file.job.spec.data.train, file.job.spec.data.eval)):
        if data.source.startswith("hf://"):
            continue
        found = [json.loads(line) for line in Path(data.source).read_text().splitlines()]
        assert all({data.prompt, data.answer} <= row.keys() for row in found)


@pytest.mark.parametrize("task", SCORES)
def test_reward_of_each_task_scores_its_completions(rows, tmp_path, task):
    folder = make(task, tmp_path / task)
    module = {}
    exec((folder / "reward.py").read_text(), module)
    found = [json.loads(line) for line in (folder / "data" / "completions.jsonl").read_text().splitlines()]
    results = [module["compute_score"]("", row["completion"], row["answer"], {}) for row in found]
    assert [result["score"] for result in results] == pytest.approx(SCORES[task])
    accuracy = load(folder / "rljob.yaml").job.spec.evaluation.accuracy
    assert accuracy is None or accuracy in results[0]


@pytest.mark.parametrize("task", ["sums", "chat", "products", *HOSTED])
def test_rows_of_the_evaluation_are_not_trained_on(tmp_path, task):
    folder = make(task, tmp_path / task)
    train, held_out = (
        {tuple(re.findall(r"\w+", line)) for line in (folder / "data" / f"{split}.jsonl").read_text().splitlines()}
        for split in ("train", "eval")
    )
    assert len(train) >= 80
    assert len(held_out) >= 16
    assert not train & held_out


@pytest.mark.parametrize("task", TASKS)
def test_readme_names_commands_that_exist_and_the_run_of_the_job(rows, tmp_path, task):
    text = (make(task, tmp_path / task) / "README.md").read_text()
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands = {line.split()[1] for line in text.splitlines() if line.startswith("rljob ")}
    tests = {"test-reward"} if task in SCORES else set()
    tests |= {"test-agent"} if TASKS[task].agent else set()
    assert commands == {"validate", "run", "trajectories", "submit"} | tests
    assert commands <= known
    assert f"rljob trajectories {task} " in text
    assert TASKS[task].about in text
    listed = {name for name in re.findall(r"^\| `(.+?)` \|", text, re.M) if not name.endswith("/")}
    folder = tmp_path / task
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed == written - {"README.md", "data/train.jsonl", "data/eval.jsonl"}


def test_agent_writes_its_task_with_a_user_and_tools_that_the_job_names(tmp_path):
    done = init(tmp_path / "mine", "--agent", "loop")
    agent = load(tmp_path / "mine" / "rljob.yaml").job.spec.agent
    assert (agent.type, agent.user.function.file) == ("loop", str(tmp_path / "mine" / "user.py"))
    assert [tool.function.file for tool in agent.tools] == [str(tmp_path / "mine" / "tools.py")]
    assert f"next: rljob test-agent {tmp_path}/mine/rljob.yaml --completion 'It is 200.' " in done.output
    assert "| `user.py` |" in (tmp_path / "mine" / "README.md").read_text()
    tools, user = {}, {}
    exec((tmp_path / "mine" / "tools.py").read_text(), tools)
    exec((tmp_path / "mine" / "user.py").read_text(), user)
    state = {}
    reply = user["respond"](
        [{"role": "assistant", "content": "It is 200."}], state, answer=str(tools["multiply"](12, 17))
    )
    assert (reply[:2], state) == (("200 is too low. Try again.", -0.02), {"tries": 1})
    assert user["respond"]([{"role": "assistant", "content": "204"}], state, answer="204")[0] is None


@pytest.mark.parametrize(("task", "kind"), HOSTED.items())
def test_hosted_agent_brings_the_reward_and_needs_no_file_for_it(tmp_path, task, kind):
    done = init(tmp_path / "mine", "--agent", kind)
    spec = load(tmp_path / "mine" / "rljob.yaml").job.spec
    assert (spec.agent.type, spec.rewards) == (kind, [])
    assert spec.agent.runner.function.file == str(tmp_path / "mine" / f"{'agent' if task == 'tries' else kind}.py")
    assert f"next: rljob test-agent {tmp_path}/mine/rljob.yaml --completion 'It is 3.' --completion 2" in done.output
    first = json.loads((tmp_path / "mine" / "data" / "train.jsonl").read_text().splitlines()[0])
    assert first == {"question": "What is 1 + 1?", "answer": "2"}


class FakeOpenAI:
    """Answers in order, as OpenAI's client does."""

    def __init__(self, *answers):
        self.answers, self.seen = iter(enumerate(answers)), []
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, model, messages):
        self.seen.append((model, messages[-1]["content"]))
        number, text = next(self.answers)
        choice = SimpleNamespace(message=SimpleNamespace(content=text))
        return SimpleNamespace(id=f"chatcmpl-{number}", choices=[choice])


def test_program_tries_again_and_charges_wrong_answers(tmp_path, monkeypatch):
    init(tmp_path / "mine", "--agent", "program")
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda: client))
    module = {}
    exec((tmp_path / "mine" / "agent.py").read_text(), module)
    client = FakeOpenAI("It is 3.", "2")
    prompt = [{"role": "user", "content": "What is 1 + 1?"}]
    result = module["run"](prompt, "2")
    assert result == {"reward": 1.0, "rewards": {"chatcmpl-0": -0.05}, "info": {"wrong": 1}}
    assert client.seen == [("policy", "What is 1 + 1?"), ("policy", "3 is wrong. Try again.")]
    assert len(prompt) == 1, "the next attempt gets the same prompt"
    client = FakeOpenAI("no idea", "1")
    assert module["run"](prompt, "2")["reward"] == 0.0


def test_environment_replies_until_the_answer_is_right_or_the_tries_are_used(tmp_path):
    init(tmp_path / "mine", "--agent", "environment")
    module = {}
    exec((tmp_path / "mine" / "environment.py").read_text(), module)
    environment = module["AgentInstance"](**load(tmp_path / "mine" / "rljob.yaml").job.spec.agent.environment.args)
    assert asyncio.run(environment.reset({"observation": "1 + 1?"})) == {"observation": "1 + 1?"}
    wrong = asyncio.run(environment.step({"action_text": "no idea", "label": "2"}))
    assert (wrong["rewards"], wrong["done"]) == (-0.05, False)
    right = asyncio.run(environment.step({"action_text": "It is 2.", "label": "2"}))
    assert right == {"rewards": 1.0, "scores": 1.0, "environment_feedback": "", "done": True}


def test_tasks_are_listed():
    assert json.loads(init("--list-tasks", "-o", "json").stdout) == {name: task.about for name, task in TASKS.items()}
    assert [line.split()[0] for line in init("--list-tasks").stdout.splitlines()] == list(TASKS)


def source_of(folder):
    return load(folder / "rljob.yaml").job.spec.model.source


def test_model_is_a_source_or_a_folder_that_starts_at_the_job(rows, tmp_path):
    (tmp_path / "models" / "my model").mkdir(parents=True)
    init("jobs/first", "--model", "models/my model")
    assert source_of(tmp_path / "jobs" / "first") == str(tmp_path / "models" / "my model")
    assert "../../models/my model" in (tmp_path / "jobs" / "first" / "rljob.yaml").read_text()
    init("second", "--model", "hf://Qwen/Qwen2.5-0.5B-Instruct")
    assert source_of(tmp_path / "second") == "hf://Qwen/Qwen2.5-0.5B-Instruct"
    init("third", "--model", tmp_path / "models")
    assert source_of(tmp_path / "third") == str(tmp_path / "models")


def test_judge_has_the_same_model(tmp_path):
    init(tmp_path / "j", "--task", "judge", "--model", "hf://org/name")
    judge = load(tmp_path / "j" / "rljob.yaml").job.spec.rewards[1].judge
    assert judge.model.source == "hf://org/name"


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ([], ("question", "label")),
        (["--prompt", "on", "--answer", "question"], ("on", "question")),
        (["--answer", "reward_model.ground_truth"], ("question", "reward_model.ground_truth")),
    ],
)
def test_columns_of_own_rows_are_given_or_found_by_their_usual_names(rows, tmp_path, options, columns):
    assert init("own", "--data", rows.name, *options).exit_code == 0
    train = load(tmp_path / "own" / "rljob.yaml").job.spec.data.train
    assert (train.prompt, train.answer, train.source) == (*columns, str(rows))


@pytest.mark.parametrize(("of_verl", "answer"), [({"ground_truth": "d"}, "reward_model.ground_truth"), ({}, None)])
def test_rows_of_verl_have_their_answer_in_a_column_of_objects(rows, tmp_path, of_verl, answer):
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "a"}], "reward_model": of_verl}
    rows.write_text(f"{json.dumps(row)}\n")
    done = init("own", "--data", rows.name)
    assert done.exit_code == 0, done.output
    train = load(tmp_path / "own/rljob.yaml").job.spec.data.train
    assert (train.prompt, train.answer) == ("prompt", answer)
    assert ('"completion": "d", "answer": "d"' in (tmp_path / "own/data/completions.jsonl").read_text()) is bool(answer)


def test_rows_without_an_answer_have_none_in_the_job_and_a_reward_that_needs_none(rows, tmp_path):
    rows.write_text('{"text": "a", "gold": "b"}\n')
    done = init("own", "--data", rows.name, "--prompt", "text")
    assert "no answer among the columns text, gold: the job has answer: null; else pass --answer" in done.output
    spec = load(tmp_path / "own/rljob.yaml").job.spec
    assert (spec.data.train.answer, spec.evaluation.accuracy) == (None, None)
    module = {}
    exec((tmp_path / "own/reward.py").read_text(), module)
    completions = map(json.loads, (tmp_path / "own/data/completions.jsonl").read_text().splitlines())
    scores = [module["compute_score"]("", each["completion"], None)["score"] for each in completions]
    assert scores == [1.0, 50 / 60]


@pytest.mark.parametrize("kind", ["program", "environment"])
def test_own_rows_may_have_an_agent_of_ones_own(rows, tmp_path, kind):
    done = init("own", "--data", rows.name, "--agent", kind)
    assert "next: rljob test-agent own/rljob.yaml --completion 'I do not know.' --completion b" in done.output
    spec = load(tmp_path / "own/rljob.yaml").job.spec
    assert (spec.agent.type, spec.data.train.source, spec.data.template) == (kind, str(rows), "{prompt}")
    assert not (tmp_path / "own/data").exists(), "the rows are elsewhere"


@pytest.mark.parametrize("kind", ["program", "environment"])
def test_an_agent_that_rewards_the_answer_is_not_written_for_rows_without_one(rows, tmp_path, kind):
    rows.write_text('{"question": "a", "gold": "b"}\n')
    done = init("own", "--data", rows.name, "--agent", kind)
    assert f"--agent {kind} rewards the answer of a row, and these rows have none; pass --answer" in done.output
    assert (done.exit_code, (tmp_path / "own").exists()) == (2, False)


def test_an_agent_for_rows_of_the_hub_has_no_answer_that_nobody_has_read(rows):
    done = init("own", "--data", "hf://org/rows", "--agent", "program")
    assert "next: rljob test-agent own/rljob.yaml --completion 'I do not know.'\n" in done.output


def test_job_for_cpus_fits_16_gib(rows, tmp_path):
    spec = load(make("own", tmp_path / "j") / "rljob.yaml").job.spec
    assert spec.trainer.micro_batch_tokens == 2048


def test_full_disk_leaves_no_file_in_the_way(rows, tmp_path, monkeypatch):
    def write(path, text):
        path.touch()
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    done = init("d")
    assert (done.exit_code, done.output) == (1, "No space left on device; free disk space, or write to another disk\n")
    assert [*(tmp_path / "d").rglob("*.*")] == []


def test_paths_are_quoted_in_the_next_command(rows, tmp_path):
    assert "next: rljob test-reward 'my job/rljob.yaml' --file 'my job/data/completions.jsonl'" in init("my job").output


def test_own_rows_on_the_hub_need_no_file(tmp_path):
    init(tmp_path / "own", "--data", "hf://org/rows", "--prompt", "text")
    train = load(tmp_path / "own" / "rljob.yaml").job.spec.data.train
    assert (train.source, train.prompt, train.answer) == ("hf://org/rows", "text", "answer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["d", "--task", "suns"],
            "--task must be one of sums, chat, products, tries, quiz, gsm8k, judge, own, got suns",
        ),
        (["d", "--task", "sums", "--agent", "loop"], "--agent loop is for the task products, got sums; for other data"),
        (["d", "--data", "rows.jsonl", "--agent", "loop"], "--agent loop is for the task products, got own"),
        (["d", "--task", "own"], "the task own needs --data FILE"),
        (["d", "--task", "sums", "--data", "rows.jsonl"], "--data is for the task own, and this one is sums"),
        (["d", "--data", "env://train"], "--data must be a file or hf://org/name; for rows of an agent"),
        (["d", "--data", "none.jsonl"], "--data file none.jsonl not found; did you mean rows.jsonl?"),
        (["d", "--data", "rows.jsonl", "--prompt", "text"], "--prompt must be a column of the rows, got text; they ha"),
        (["d", "--model", "./Qwen2.5"], "--model ./Qwen2.5: folder not found; correct the path"),
        (
            ["d", "--model", "ftp://b/m"],
            "must be hf://org/name, pvc://claim/path, s3://bucket/path or a path, got ftp://b/m",
        ),
        (["d", "--prompt", "text"], "--prompt and --answer name columns of --data"),
        ([], "pass the folder to write: rljob init DIR"),
    ],
)
def test_wrong_arguments_write_nothing(rows, tmp_path, arguments, message):
    done = init(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My first job", "my-first-job"), ("2024", "job-2024"), ("数学", "my-job"), ("a" * 50, "a" * 40)],
)
def test_job_has_the_name_of_its_folder(tmp_path, folder, name):
    assert name_job(tmp_path / folder) == name


@pytest.mark.parametrize("task", TASKS)
def test_files_of_the_templates_are_in_yaml_that_kubectl_reads_alike(rows, tmp_path, task):
    text = (make(task, tmp_path / task) / "rljob.yaml").read_text()
    [document], problems = read_documents(text)
    assert not problems
    assert yaml.safe_load(text)["spec"] == document.data["spec"]
    assert "$" not in text.replace("$OPENAI_API_KEY", "")


def write_rows(path, count, **columns):
    rows = [{"question": f"q{i}", "label": f"a{i}", "level": i} | columns for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("count", "held_out"), [(9, 0), (10, 1), (200, 20), (1000, 64)])
def test_rows_are_held_out_for_evaluation(tmp_path, monkeypatch, count, held_out):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", count)
    data = load(make("own", tmp_path / "own") / "rljob.yaml").job.spec.data
    assert data.train.offset == held_out
    assert (data.eval.limit if data.eval else 0) == held_out
    if held_out:
        read = [
            [row.values["question"] for row in read_rows(source, source.source, split="train")]
            for source in (data.train, data.eval)
        ]
        assert (len(read[0]), len(read[1])) == (count - held_out, held_out)
        assert not set(read[0]) & set(read[1])


def test_completions_are_of_the_users_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", 5)
    folder = make("own", tmp_path / "own")
    lines = [json.loads(line) for line in (folder / "data" / "completions.jsonl").read_text().splitlines()]
    assert lines[0] == {"prompt": "q0", "completion": "a0", "answer": "a0", "level": 0}
    assert [line["completion"] for line in lines] == ["a0", "It is a0.", "a0 or something else", "a1", "a2"]


def test_a_conversation_gives_its_last_message_as_the_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    write_rows(tmp_path / "rows.jsonl", 1, messages=messages)
    folder = tmp_path / "own"
    init(folder, "--data", "rows.jsonl", "--prompt", "messages")
    train = load(folder / "rljob.yaml").job.spec.data.train
    assert (train.prompt, train.answer) == ("messages", "messages")
    first = json.loads((folder / "data" / "completions.jsonl").read_text().splitlines()[0])
    assert (first["prompt"], first["completion"], first["answer"]) == (messages[:1], "2", "2")


def test_a_saved_dataset_is_evaluated_with_its_own_split(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"question": str(i), "answer": str(i)} for i in range(20)])
    for name, split in (("a", "test"), ("b", "validation")):
        datasets.DatasetDict({"train": rows, split: rows}).save_to_disk(tmp_path / name)
        init(tmp_path / f"job-{name}", "--data", tmp_path / name)
    first, second = (load(tmp_path / f"job-{name}" / "rljob.yaml").job.spec.data for name in "ab")
    assert (first.train.offset, first.eval.limit, first.eval.split) == (0, None, None)
    assert (second.train.offset, second.eval.limit, second.eval.split) == (2, 2, "train")


def test_a_dataset_of_the_hub_is_split_by_its_rows(tmp_path):
    init(tmp_path / "own", "--data", "hf://org/rows")
    data = load(tmp_path / "own" / "rljob.yaml").job.spec.data
    assert (data.train.offset, data.eval.limit, data.eval.split) == (64, 64, "train")


@pytest.mark.parametrize("kind", [None, "program", "environment"])
def test_answers_that_are_objects_are_json_wherever_a_model_would_write_them(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    gold, shown = {"name": "Zoë", "ok": True}, '{"name": "Zoë", "ok": true}'
    write_rows(tmp_path / "rows.jsonl", 1, label=gold)
    done = init("own", "--data", "rows.jsonl", *(["--agent", kind] if kind else []))
    module = {}
    if kind is None:
        lines = map(json.loads, (tmp_path / "own/data/completions.jsonl").read_text().splitlines())
        assert next(lines) == {"prompt": "q0", "completion": shown, "answer": gold, "level": 0}
        exec((tmp_path / "own/reward.py").read_text(), module)
        assert module["compute_score"]("", shown, gold)["score"] == 1.0
    else:
        assert f"--completion 'I do not know.' --completion '{shown}'\n" in done.output
        monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=None))
        exec((tmp_path / "own" / f"{'agent' if kind == 'program' else kind}.py").read_text(), module)
        assert module["check"](f"It is {shown}", gold) == ""
