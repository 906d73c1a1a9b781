"""Runs that cannot learn, and rollouts that cannot start, on real vLLM: the reason is shown once, with its field.

One job has both kinds of reward: the same score for all samples of its first steps, and an exception for all others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_api.wire.contract import ExitCode
from tests.paths import ROOT
from tests.support.local_run import run_to_end
from tests.support.loopback import next_address

pytestmark = pytest.mark.real

RLJOB = Path(sys.executable).with_name("rljob")
TINY = ROOT / ".models" / "tiny-qwen3"
RUN_SECONDS = 300
PROMPTS_PER_STEP = 4
REWARD = f"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "train" and extra_info["index"] >= {3 * PROMPTS_PER_STEP}:
        raise KeyError("the unit")
    return 0.0
"""
LINE_OF_RAISE = 4


def write_job(folder: Path) -> Path:
    job = yaml.safe_load((ROOT / "examples/tiny/rljob.yaml").read_text())
    spec = job["spec"]
    spec["model"]["source"] = str(TINY)
    spec["data"] = {
        "train": {"source": str(ROOT / "examples/quickstart/data/train.jsonl"), "prompt": "question"},
        "format": "text",
        "shuffle": False,
    }
    spec["schedule"] = {"steps": 12, "promptsPerStep": PROMPTS_PER_STEP}
    (folder / "reward.py").write_text(REWARD)
    path = folder / "rljob.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.slow
def test_job_that_learns_nothing_warns_and_fails_with_the_line_of_the_exception(tmp_path: Path) -> None:
    done = run_to_end(write_job(tmp_path), tmp_path, RUN_SECONDS)
    output = done.stdout
    assert done.returncode == 1, output
    cause = f"{tmp_path}/reward.py:{LINE_OF_RAISE}: KeyError: 'the unit'"
    events = [line.partition("] ")[2] for line in output.splitlines() if line.startswith("[")]
    warning = next(line for line in events if line.startswith("NoAdvantages: since step 1 "))
    problem = f"reward letters: no valid score (exception): {cause}"
    failed = next(line for line in events if line.startswith("Failed: "))
    assert failed.startswith("Failed: head: spec.rewards[0].function: no sample of the last 3 steps has a valid score")
    assert f"16 x exception of reward letters: {cause}" in failed
    # One poll may find the warning and the first exception together; both precede the end.
    assert max(events.index(warning), events.index(problem)) < events.index(failed), "each is shown when it is known"
    assert output.count(cause) == 2, "once as it comes, and once as the reason of the failure"
    assert "\x1b[" not in output
    log = output.splitlines()[
        output.splitlines().index(next(line for line in output.splitlines() if failed in line)) + 1
    ]
    assert Path(log.strip().removeprefix("log: ")).is_file()
    steps = read_metrics(tmp_path / "tiny" / FILE_METRICS).steps
    assert [step.num_invalid for step in steps] == [0, 0, 0, 16, 16, 16]


def truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def widen(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 256}))


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
"""Lines of vLLM, which change only with its version."""
READS_CHECKPOINT = {"extraArgs": ["--load-format", "auto"]}
"""Otherwise the trainer finds a damaged checkpoint."""


@pytest.mark.parametrize(
    ("damage", "rollout", "message"),
    [
        pytest.param(
            truncate_weights,
            READS_CHECKPOINT,
            "error: spec.model.source: vLLM does not start: SafetensorError: Error while deserializing",
            marks=NIGHTLY,
        ),
        pytest.param(
            widen,
            READS_CHECKPOINT,
            "error: spec.model.source: vLLM does not start: The size of tensor",
            marks=NIGHTLY,
        ),
        pytest.param(
            None,
            {"maxModelLen": 99999},
            "error: spec.rollout.maxModelLen: vLLM does not start: User-specified max_model_len (99999)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None,
            {"kvCacheMemory": "100Ki"},
            "error: spec.rollout.kvCacheMemory: vLLM does not start: No available memory for the cache",
            marks=NIGHTLY,
        ),
        # make test has the one that ends before vLLM's engine starts, and make test-slow one that ends after.
        (
            None,
            {"extraArgs": ["--no-such-option"]},
            "error: spec.rollout.extraArgs: vLLM does not accept them: unrecognized arguments: --no-such-option",
        ),
    ],
    ids=["truncated weights", "wrong shape", "context", "KV cache", "unknown argument"],
)
def test_rollout_that_cannot_start_ends_as_a_user_error_with_vllms_line(
    damage: Callable[[Path], None] | None, rollout: dict[str, object], message: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    if damage:
        damage(model)
    job = yaml.safe_load(write_job(tmp_path).read_text())
    job["spec"]["rollout"] |= rollout
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    variables = {
        "RLJOB_JOB_FILE": str(tmp_path / "job.yaml"),
        "RLJOB_MODEL": str(model),
        "RLJOB_POD_IP": next_address(),
        "RLJOB_HEAD": "head",
        "RLJOB_TOKEN": "token",
        "RLJOB_TERMINATION_LOG": str(tmp_path / "termination-log"),
    }
    command = [sys.executable, "-m", "rljob_trainer.rollout"]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, env=os.environ | variables, stdout=log, stderr=log, timeout=RUN_SECONDS)
    assert done.returncode == ExitCode.USER, (tmp_path / "log").read_text()[-4000:]
    found = (tmp_path / "termination-log").read_text()
    assert found.startswith(message)
    assert len(found.splitlines()) == 1
    assert (tmp_path / "log").read_text().rstrip().endswith(found), "also the last line of the log"
