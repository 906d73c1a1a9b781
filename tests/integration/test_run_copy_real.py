"""`rljob run` on real vLLM, Ray and FSDP2 whose disk is lost: a new one resumes from the copy in object storage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rljob_api.run.folder import FILE_METRICS
from tests.paths import ROOT
from tests.support.local_run import SLOW_REWARD, Run
from tests.support.objects import BUCKET, ObjectServer, run_objects

PREFIX = "runs"
SETTINGS = (
    "spec.schedule.steps=6",
    "spec.checkpoint.everySteps=2",
    "spec.evaluation.everySteps=6",
    f"spec.checkpoint.storage=s3://{BUCKET}/{PREFIX}",
    f"spec.model.source=s3://{BUCKET}/model",
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    with run_objects() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        running.put_folder("model", ROOT / ".models/tiny-qwen3")
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str | None], Run]]:
    runs: list[Run] = []

    def start(reward: str | None) -> Run:
        runs.append(Run(tmp_path, reward, *SETTINGS))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def read_prompts(text: str) -> dict[int, list[int]]:
    records = [json.loads(line) for line in text.splitlines()]
    return {record["step"]: record["prompts"] for record in records if "prompts" in record}


@pytest.mark.real
@pytest.mark.slow
def test_run_without_its_disk_goes_on_from_the_copy(
    server: ObjectServer, start: Callable[[str | None], Run], tmp_path: Path
) -> None:
    first = start(SLOW_REWARD)
    complete = f"{PREFIX}/tiny/checkpoints/step-000002/COMPLETE"
    first.wait_for("a checkpoint in the storage", lambda: complete in server.keys(PREFIX))
    first.wait_for_step(3)
    processes = psutil.Process(first.process.pid).children(recursive=True)
    first.close()
    psutil.wait_procs(processes, timeout=60)
    before = read_prompts((first.folder / FILE_METRICS).read_text())
    copied = max(int(key.split("step-")[1][:6]) for key in server.keys(PREFIX) if key.endswith("/COMPLETE"))
    shutil.rmtree(first.folder)

    second = start(None)
    summary = second.finish()
    output = (tmp_path / "output.txt").read_text() + "".join(
        path.read_text(errors="replace") for path in (second.folder / "logs").glob("*head*.log")
    )
    assert f"brought back the checkpoint of step {copied}" in output
    assert summary.phase == "Succeeded"
    assert summary.steps == 6
    after = read_prompts((second.folder / FILE_METRICS).read_text())
    assert list(after) == [1, 2, 3, 4, 5, 6]
    assert {step: after[step] for step in before} == before, "steps after the checkpoint have the same prompts again"
    trained = [prompt for prompts in after.values() for prompt in prompts]
    print(f"resumed at {copied}; killed after step {max(before)}; prompts {after}")
    assert len(trained) == len(set(trained)), "each prompt was trained on once"
    keys = {key.removeprefix(f"{PREFIX}/tiny/") for key in server.keys(PREFIX)}
    assert {"export/config.json", "checkpoints/step-000006/COMPLETE", "metrics.jsonl"} <= keys
    assert json.loads(server.read(f"{PREFIX}/tiny/owner.json"))["released"]
    assert server.read(f"{PREFIX}/tiny/{FILE_METRICS}") == (second.folder / FILE_METRICS).read_bytes()
