"""One call of each reward before anything starts: what it finds, where, and that it leaves nothing behind."""

from __future__ import annotations

import textwrap
import zipfile
from dataclasses import replace

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from rljob_cli.check.jobfile import load
from rljob_cli.check.trial import call_rewards, find_missed_groups, find_problems
from rljob_cli.check.verdict import judge
from rljob_inputs.prompts import Prompt
from rljob_service.pool import requirements

PROMPT = Prompt(3, "1 + 1 =", [], "2", "sums", {"level": 1})
_HEADER = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def body(*lines):
    return _HEADER + "".join(f"    {line}\n" for line in lines)


@pytest.fixture
def call(tmp_path):
    """Return the trials and findings of rewards by their sources."""

    def call(*sources, limit=60.0, prompt=None, **reward):
        rewards = []
        for index, source in enumerate(sources):
            (tmp_path / f"reward{index}.py").write_text(textwrap.dedent(source))
            rewards.append({"name": f"r{index}", "function": {"file": f"reward{index}.py"}, **reward})
        spec = {
            "model": {"source": "hf://org/m"},
            "data": {"train": {"source": "train.jsonl"}},
            "rewards": rewards,
        }
        job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        loaded, reports = load(tmp_path / "job.yaml").job, []
        asked = replace(PROMPT, prompt=prompt or PROMPT.prompt)
        trials = call_rewards(loaded, asked, reports.append, limit)
        findings = [*find_problems(loaded, trials), *find_missed_groups(loaded, trials)]
        found = [f"{finding.path} {finding.message}" for finding in findings]
        return trials, found, reports

    return call


def test_function_is_loaded_where_no_row_was_read(tmp_path):
    job = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "j"},
        "spec": {
            "model": {"source": "pvc://models/m"},
            "data": {"train": {"source": "pvc://rows/train.jsonl"}},
            "rewards": [{"name": "r", "function": {"inline": body("return 1.0")}}],
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    verdict = judge(load(tmp_path / "job.yaml"), tmp_path / "runs" / "j", {})
    assert verdict.problems == []
    assert [trial.describe() for trial in verdict.trials] == ["reward r: loaded, but not called, since no row was read"]
    [warning] = (each for each in verdict.warnings if "no reward was called" in each.message)
    assert warning.path == "spec.data.train.source"
    job["spec"]["rewards"][0]["function"]["inline"] = "import nothing_of_this_name\n" + body("return 1.0")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    [problem] = judge(load(tmp_path / "job.yaml"), tmp_path / "runs" / "j", {}).problems
    assert "nothing_of_this_name" in problem.message


STRIPS = """
def compute_score(solution_str, ground_truth):
    if "Assistant:" in solution_str:
        solution_str = solution_str.split("Assistant:", 1)[1]
    return float(solution_str.strip() == ground_truth)
"""


def test_form_that_the_source_led_to_is_named_with_the_field_that_sets_another(call):
    trials, _, _ = call(STRIPS)
    assert "taken as verl0.2" in trials[0].describe()
    assert "function.signature: verl" in trials[0].describe()
    trials, _, _ = call(body("return 1.0"))
    assert "taken as" not in trials[0].describe(), "its parameters say the form"


def test_function_of_verl_that_strips_a_tag_gets_the_answer_alone_where_that_scores(call):
    trials, _, _ = call(STRIPS.replace("    return", "        return 0.0\n    return"))
    assert trials[0].remedy == "signature: verl"


def test_each_reward_is_called_with_the_rows_answer(call):
    score = "return {'score': 1, 'same': solution_str == ground_truth, 'level': extra_info['level']}"
    trials, found, _ = call(body(score), body("return 0.25"))
    assert found == []
    assert [trial.result.score for trial in trials] == [1, 0.25]
    assert trials[0].result.components == {"same": 1, "level": 1}
    assert (
        "reward r0: score 1 for right, wrong and empty answers alike (same 1, level 1), ready" in trials[0].describe()
    )


OLD_VERL = """
def extract(text):
    found = text.split("<answer>")
    return found[2].split("</answer>")[0] if len(found) > 2 else None
def compute_score(solution_str, ground_truth):
    return float(extract(solution_str) == ground_truth)
"""
TEXTS = """
import re
def correct(completions, answer, **kwargs):
    return [float(bool(re.search(f"#### {a}$", text))) for text, a in zip(completions, answer)]
"""


def test_right_answers_are_tried_in_the_forms_that_rewards_expect(call):
    boxed = "return {'score': float(solution_str == '\\\\boxed{2}'), 'length': len(solution_str)}"
    trials, found, _ = call(body(boxed), body("return float(solution_str == ground_truth)"), body("return -1"))
    assert found == []
    assert [trial.result.score for trial in trials] == [1, 1, -1]
    assert trials[0].describe().startswith("reward r0: score 1 for `\\boxed{12}` (length 9), ready after ")
    assert trials[1].describe().startswith("reward r1: score 1, ready after ")
    assert trials[2].describe().startswith("reward r2: score -1 for right, wrong and empty answers alike, ready after ")


def test_what_a_reward_wants_instead_is_found_out(call, tmp_path):
    """The old scorer counts the example in the prompt; the other one wants texts, where a chat has messages."""
    prompt = [{"role": "user", "content": "1 + 1? Answer in tags, such as <answer> 7 </answer>"}]
    trials, found, _ = call(OLD_VERL, TEXTS, prompt=prompt)
    assert [trial.remedy for trial in trials] == [
        "signature: verl0.2",
        "signature: trl, columns: {completions: completion}",
    ]
    [problem] = found
    assert "expected string or bytes-like object, got 'list'; it scores with function.signature: trl, col" in problem
    assert trials[0].is_blind


def test_function_with_requirements_is_called_once_they_are_installed(call, tmp_path, monkeypatch):
    """An environment counts as installed when test-reward or a run has created it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "kit-1.0.dist-info").mkdir()
    with zipfile.ZipFile(wheel := tmp_path / "kit-1.0-py3-none-any.whl", "w") as file:
        file.writestr("kit.py", body("return float(solution_str == ground_truth)"))
        file.writestr("kit-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kit\nVersion: 1.0\n")
        file.writestr(
            "kit-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("kit-1.0.dist-info/RECORD", "")
    lines = [f"kit @ file://{wheel}"]
    function = {"file": "reward0.py", "requirements": lines}
    trials, found, _ = call("from kit import compute_score", function=function)
    assert (trials, found) == ([], [])
    requirements.ensure_environment(lines)
    trials, found, _ = call("from kit import compute_score", function=function)
    assert (trials[0].result.score, found) == (1.0, [])


def test_requirement_that_no_index_has_is_an_error_of_its_field(call, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    _, [problem], _ = call(body("return 1.0"), function={"file": "reward0.py", "requirements": ["rljob-nowhere"]})
    assert problem.startswith("spec.rewards[0].function.requirements cannot be used: ")
    assert "rljob-nowhere was not found" in problem


LENGTHS = """
def shorter_is_better(prompts, completions, **kwargs):
    lengths = [len(completion) for completion in completions]
    spread = max(lengths) - min(lengths) or 1
    return [0.5 - (length - min(lengths)) / spread for length in lengths]
"""


def test_function_that_compares_samples_is_found_and_one_that_does_not_is_left_alone(call):
    own = (
        "def correct(completions, answer, **kwargs):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    )
    trials, [found], _ = call(LENGTHS, own)
    assert found == (
        "spec.rewards[0].scope scores the answer of the first row, and a longer text with it, 0.5 and 0.5 one at a "
        "time and 0.5 and -0.5 together: if it compares the samples of a prompt, set scope: group"
    )
    assert [score.score for score in trials[1].together] == [1.0, 1.0]
    assert call(LENGTHS, scope="group")[1] == []


def test_calls_without_a_valid_result_are_reported_with_their_places(call, tmp_path):
    expected = {
        body("x = {}", "return x['k']"): f"exception: {tmp_path}/reward0.py:3: KeyError: 'k'",
        body("import os", "os._exit(3)"): "worker_died: ",
        body("return float('nan')"): "not_finite: ",
        body("return 'good'"): "bad_return: ",
    }
    _, found, _ = call(*expected)
    for index, message in enumerate(expected.values()):
        assert found[index].startswith(f"spec.rewards[{index}].function is invalid for the first row")
        assert message in found[index]
        assert found[index].endswith("skip this call with --no-call")


def test_failed_import_is_reported_with_its_place(call, tmp_path):
    _, found, _ = call("import json\nimport no_such_module\n" + body("return 1"), body("return 1"))
    (found,) = found
    assert found.startswith(f"spec.rewards[0].function cannot be used: {tmp_path}/reward0.py:2: ModuleNotFoundError")


def test_import_and_call_that_hang_are_reported_while_they_last_and_end_at_the_limit(call, tmp_path):
    hangs = ("import time\ntime.sleep(600)\n" + body("return 1"), body("import time", "time.sleep(600)"))
    _, (of_import, of_call), reports = call(*hangs, limit=12.0)
    assert "cannot be used: its import did not end within 12 s" in of_import
    assert f"at {tmp_path}/reward0.py:2" in of_import
    assert "cannot be used: its call did not return within 12 s" in of_call
    assert reports[0].startswith("waits for the import of reward r0")


def test_accuracy_must_be_a_component_that_a_reward_returned(call, tmp_path):
    trials, found, _ = call(body("return {'score': 1, 'acc': 1}"))
    assert found == []
    for accuracy in ("acc", "r0/acc", "score"):
        assert list(find_problems(load_with(tmp_path, accuracy), trials)) == []
    (finding,) = find_problems(load_with(tmp_path, "exact"), trials)
    assert finding.path == "spec.evaluation.accuracy"
    assert finding.message == "must be a component that a reward returns, got exact; returned: acc, score"
    assert list(find_problems(load_with(tmp_path, "exact"), [])) == [], "not all rewards were called"


def load_with(tmp_path, accuracy):
    return load(tmp_path / "job.yaml", [f"spec.evaluation.accuracy={accuracy}"]).job


def test_abstention_is_accepted(call):
    trials, found, _ = call(body("return None"))
    assert (found, trials[0].describe()) == ([], "reward r0: no score")


def test_group_reward_is_called_with_a_group(call):
    source = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):\n"
    trials, found, _ = call(source + "    return [len(solution_strs)] * len(solution_strs)\n", scope="group")
    assert (found, trials[0].result.score) == ([], 8), "algorithm.groupSize"


def test_reward_with_another_image_is_a_problem_of_this_machine_alone(call, tmp_path):
    (tmp_path / "x").touch()
    call("import no_such_module\n" + body("return 1"), image="own:1")
    job = load(tmp_path / "job.yaml").job
    (finding,) = find_problems(job, call_rewards(job, PROMPT, print))
    assert finding.only == "local"


ENDPOINT = {"endpoint": {"url": "http://127.0.0.1:9", "model": "m"}}
SERVED = {"model": {"source": "hf://org/served"}}


def test_chat_models_are_not_asked_and_their_templates_are_checked():
    """By the servers, which need no vLLM for it."""

    def judge(name, template, model):
        return {"name": name, "judge": {"template": template, "parser": {"regex": "(.)"}, **model}}

    user = {"persona": "You are\n{{ extra_info.name", **SERVED}
    wrong = [judge("j", "{{ completion", ENDPOINT), judge("k", "{{ complete }}", SERVED)]
    right = [judge("j", "{{ completion }}", ENDPOINT), judge("k", "{{ completion }}", SERVED)]
    jobs = [make_job(rewards, user) for rewards, user in ((wrong, user), (right, user | {"persona": "Be kind."}))]
    (broken, fine) = ((job, call_rewards(job, PROMPT, print, 300.0)) for job in jobs)
    assert [(finding.path, finding.message.partition(": ")[2][:24]) for finding in find_problems(*broken)] == [
        ("spec.rewards[0].judge", "judge.template:1: unexpe"),
        ("spec.rewards[1].judge", "judge.template:1: unknow"),
        ("spec.agent.user.model", "model.persona:2: unexpec"),
    ]
    assert list(find_problems(*fine)) == []
    assert [trial.describe().partition(", ready")[0] for trial in fine[1]] == [
        "reward j: started; its model was not asked",
        "reward k: started; its model was not asked",
        "simulated user: hf://org/served",
    ]


def make_job(rewards, user):
    data = {"train": {"source": "/d"}, "format": "chat"}
    agent = {"type": "loop", "user": {"model": user}}
    spec = {"model": {"source": "hf://org/m"}, "data": data, "rewards": rewards, "agent": agent}
    return RLJob.model_validate({"metadata": {"name": "j"}, "spec": spec})


def agent_job(tmp_path, user, tools):
    (tmp_path / "user.py").write_text(user)
    (tmp_path / "tools.py").write_text(tools)
    spec = {
        "model": {"source": "hf://org/m"},
        "data": {"train": {"source": "train.jsonl"}, "format": "chat"},
        "rewards": [{"name": "r", "function": {"inline": body("return 1")}}],
        "agent": {
            "type": "loop",
            "user": {"function": {"file": "user.py"}, "replicas": 3},
            "tools": [{"name": "math", "function": {"file": "tools.py"}, "replicas": 3}],
        },
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return load(tmp_path / "job.yaml").job


TOOLS = """\
def add(a: int, b: int) -> int:
    return a + b


def negate(a: int) -> int:
    return -a
"""


def test_user_and_tools_are_started_and_listed(tmp_path):
    job = agent_job(tmp_path, "def respond(messages): return None, 1.0, {}\n", TOOLS)
    trials = call_rewards(job, PROMPT, print)
    assert list(find_problems(job, trials)) == []
    _, user, tool = trials
    assert user.describe().startswith("simulated user: respond, ready after ")
    assert tool.describe().startswith("tool math: add, negate, ready after ")


def runner_job(tmp_path, **agent):
    """A job without rewards."""
    (tmp_path / "broken.py").write_text("import no_such_module\ndef run(): ...\n")
    spec = {
        "model": {"source": "hf://org/m"},
        "data": {"train": {"source": "train.jsonl"}, "format": "chat"},
        "agent": agent,
        "evaluation": {"accuracy": "right"},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return load(tmp_path / "job.yaml").job


def try_runner(tmp_path, **agent):
    job = runner_job(tmp_path, **agent)
    (trial,) = trials = call_rewards(job, PROMPT, print)
    return trial, [f"{finding.path} {finding.message}" for finding in find_problems(job, trials)]


@pytest.mark.parametrize(
    ("agent", "serves"),
    [
        ({"type": "program", "runner": {"function": {"inline": "def run(question): ..."}, "slots": 9}}, "run"),
        ({"type": "program", "runner": {"command": ["python", "-c", "print(1.0)"]}}, "python -c print(1.0)"),
    ],
)
def test_runner_is_started_and_no_episode_is_played(tmp_path, agent, serves):
    trial, problems = try_runner(tmp_path, **agent)
    assert problems == [], "evaluation.accuracy may be in what an episode returns"
    assert trial.describe().startswith(f"runner: {serves}, ready after ")


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (
            {"type": "program", "runner": {"function": {"file": "broken.py"}}},
            "spec.agent.runner.function cannot be used: {}/broken.py:1: ModuleNotFoundError",
        ),
        (
            {"type": "program", "runner": {"command": ["no-such-program"]}},
            "spec.agent.runner.command cannot be used: agent.runner.command: no-such-program was not found",
        ),
        (
            {"type": "environment", "environment": {"framework": "gymnasium", "id": "no_such_module:Guess"}},
            "spec.agent.environment cannot be used: ",
        ),
    ],
)
def test_runner_that_cannot_start_is_reported_with_its_place(tmp_path, agent, problem):
    _, problems = try_runner(tmp_path, **agent)
    problem = problem.format(tmp_path)
    assert [found[: len(problem)] for found in problems] == [problem], problems


def test_user_and_tools_that_cannot_start_are_reported_with_their_places(tmp_path):
    job = agent_job(tmp_path, "import no_such_module\ndef respond(messages): ...\n", "1 / 0\n" + TOOLS)
    user, tool = find_problems(job, call_rewards(job, PROMPT, print))
    assert user.path == "spec.agent.user.function"
    assert user.message.startswith(f"cannot be used: {tmp_path}/user.py:1: ModuleNotFoundError")
    assert tool.path == "spec.agent.tools[0].function"
    assert tool.message.startswith(f"cannot be used: {tmp_path}/tools.py:1: ZeroDivisionError")
