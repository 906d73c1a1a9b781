"""MLflow's own server, installed in a separate environment: a run outlives the server and the driver."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rljob_api.run.summaries import DeliveryCounts
from rljob_service.pool.requirements import find_uv
from rljob_trainer.history.tracking import build_trackers
from tests.support.driver_harness import make_job
from tests.support.loopback import next_address
from tests.support.records import evaluation_record, step_record
from tests.support.waiting import DEADLINE_SECONDS, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.packages]

PORT = 5000


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Return `mlflow` of the whole package, which has the server that mlflow-skinny lacks."""
    uv, folder = find_uv(), tmp_path_factory.mktemp("mlflow") / "env"
    if uv is None:
        pytest.skip("needs uv on the PATH")
    version = importlib.metadata.version("mlflow-skinny")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", folder / "bin/python", f"mlflow=={version}"], check=True
    )
    return folder / "bin/mlflow"


class Server:
    def __init__(self, program: Path, folder: Path) -> None:
        self._program, self._folder, self._address = program, folder, next_address()
        self.url = f"http://{self._address}:{PORT}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self._folder}/mlflow.db"
        options = [
            "--host",
            self._address,
            "--port",
            str(PORT),
            "--backend-store-uri",
            store,
            "--workers",
            "1",
            "--allowed-hosts",
            "*",
        ]
        log = (self._folder / "server.log").open("ab")
        environment = os.environ | {"PATH": f"{self._program.parent}:{os.environ['PATH']}"}
        command = [self._program, "server", *options]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, env=environment)
        wait_for(self._answers, f"MLflow's server: {log.name}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(DEADLINE_SECONDS)
            wait_for(lambda: not self._answers(), "the end of MLflow's server")
            self._process = None

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except (OSError, urllib.error.URLError):
            return False


@pytest.fixture
def server(program, tmp_path, monkeypatch):
    server = Server(program, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    server.start()
    yield server
    server.stop()


async def test_a_run_continues_after_an_outage_and_a_restart_of_the_driver(server, tmp_path):
    from mlflow import MlflowClient

    job = make_job(tracking={"mlflowExperiment": "math"})
    trackers = build_trackers(job, tmp_path)
    trackers.restart_at(0)
    trackers.log(step_record(1, reward=0.1, components={"acc@1": 1.0}))
    trackers.log(evaluation_record(1, 0.5))
    wait_for(lambda: trackers.counts()["mlflow"] == DeliveryCounts(sent=3), "what MLflow has")

    server.stop()
    for step in (2, 3):
        trackers.log(step_record(step, reward=step / 10))
    assert trackers.counts()["mlflow"] == DeliveryCounts(sent=3, waiting=2)
    server.start()
    await trackers.close(DEADLINE_SECONDS)
    assert trackers.counts()["mlflow"] == DeliveryCounts(sent=5)

    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name("math").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("t", "FINISHED")
    assert run.data.params["schedule.steps"] == "6"

    restarted = build_trackers(job, tmp_path)
    restarted.restart_at(3)
    restarted.log(step_record(4, reward=0.4))
    await restarted.close(DEADLINE_SECONDS)
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "step/reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert run.data.metrics["step/components/acc_1"] == 1.0
