"""Trackers of a driver: W&B offline, trackio without and with a server, and an MLflow server that answers 503 alone."""

from __future__ import annotations

import http.server
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.wire.redaction import HIDDEN
from rljob_trainer.history.tracking import build_trackers
from tests.support.driver_harness import make_job
from tests.support.loopback import next_address
from tests.support.records import step_record
from tests.support.waiting import DEADLINE_SECONDS, wait_for

W_AND_B_PROGRAM = """
import asyncio, sys
from pathlib import Path
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.tracking import build_trackers
from tests.support.driver_harness import make_job
from tests.support.episodes import episode
from tests.support.records import step_record

async def main():
    tracking = {"wandbProject": "p", "wandbGroup": "g", "wandbTags": ["a", "b"], "wandbEntity": "e"}
    env = {"JUDGE_TOKEN": "correct-horse", "MLFLOW_TRACKING_URI": "http://bob:hunter2@mlflow:5000"}
    trackers = build_trackers(make_job(tracking=tracking, head={"env": env}), Path(sys.argv[1]))
    answer = [episode(text="two correct-horse", score=0.5)]
    groups = [Group(0, Prompt(0, "1 + 1?", [1], ground_truth="2"), answer)]
    for step in map(int, sys.argv[2:]):
        trackers.log(step_record(step, reward=step / 10), groups)
    await trackers.close()
    assert trackers.counts()["wandb"].lost == 0

asyncio.run(main())
"""


def run_offline(run_dir: Path, *steps: int) -> None:
    environment = {"WANDB_MODE": "offline", "HOME": str(run_dir), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", W_AND_B_PROGRAM, str(run_dir), *map(str, steps)]
    subprocess.run(command, env=environment, timeout=DEADLINE_SECONDS, check=True)


def read_records(run_dir: Path) -> list[list]:
    """Return the records of each start, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    paths = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    return [[Record.FromString(data) for data in split_log(path.read_bytes())] for path in paths]


def split_log(content: bytes) -> Iterator[bytes]:
    """Yield the entries of a log in LevelDB's format, which follow a header of the file.

    In blocks of 32 KiB, each part of an entry has a checksum (4 bytes), its length (2 bytes) and its kind (1: whole, 2:
    first, 3: middle, 4: last)."""
    block_bytes, at, entry = 32768, 7, b""
    while at + 7 <= len(content):
        if block_bytes - at % block_bytes < 7:
            at += block_bytes - at % block_bytes
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        entry += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def read_history(records: list) -> list[dict]:
    rows = [record.history.item for record in records if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def test_w_and_b_continues_the_run_of_the_folder_with_the_step_as_axis(tmp_path):
    run_offline(tmp_path, 1, 2)
    (first,) = read_records(tmp_path)
    (run,) = [record.run for record in first if record.HasField("run")][:1]
    assert run.run_id == (tmp_path / ".run-id").read_text()
    assert (run.project, run.run_group, list(run.tags), run.entity) == ("p", "g", ["a", "b"], "e")
    assert run.display_name == "t"
    metrics = [record.metric for record in first if record.HasField("metric")]
    assert {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name} == {"*": "step"}
    rows = read_history(first)
    assert [(row["step"], row["step/reward"]) for row in rows] == [(1, 0.1), (2, 0.2)]
    (table, _) = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/step/*.json"))
    (sample,) = json.loads(table.read_text())["data"]
    assert sample[2:6] == ["1 + 1?", "2", f"two {HIDDEN}", 0.5]
    (config,) = [json.loads(each.value_json) for each in run.config.update if each.key == "head"]
    assert config["env"] == {"JUDGE_TOKEN": HIDDEN, "MLFLOW_TRACKING_URI": f"http://{HIDDEN}@mlflow:5000"}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"correct-horse" not in written
    assert b"hunter2" not in written

    run_offline(tmp_path, 3)
    second = read_records(tmp_path)[-1]
    assert {record.run.run_id for record in second if record.HasField("run")} == {run.run_id}
    assert [row["step"] for row in read_history(second)] == [3]


TRACKIO_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.tracking import build_trackers
from tests.support.driver_harness import make_job
from tests.support.episodes import episode
from tests.support.records import step_record

async def main():
    job = make_job(tracking={"trackioProject": "math rl"}, head={"env": {"JUDGE_TOKEN": "correct-horse"}})
    trackers = build_trackers(job, Path(sys.argv[1]))
    groups = [Group(0, Prompt(0, "1 + 1?", [1], ground_truth="2"), [episode(text="two correct-horse", score=0.5)])]
    for step in map(int, sys.argv[2:]):
        trackers.log(step_record(step, reward=step / 10), groups)
    counts = (await trackers.close())["trackio"]
    import trackio
    runs = trackio.Api().runs("math rl")
    from trackio.sqlite_storage import SQLiteStorage
    logs = SQLiteStorage.get_logs("math rl", runs[0].name)
    print(json.dumps([counts.model_dump(), [run.name for run in runs], logs]))

asyncio.run(main())
"""


def run_trackio(run_dir: Path, *steps: int, **environment: str) -> list:
    environment |= {"HOME": str(run_dir), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", TRACKIO_PROGRAM, str(run_dir), *map(str, steps)]
    done = subprocess.run(
        command, env=environment, timeout=DEADLINE_SECONDS, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))


def test_trackio_continues_the_run_in_the_run_s_folder(tmp_path):
    run_trackio(tmp_path, 1, 2)
    counts, names, logs = run_trackio(tmp_path, 3)
    assert (counts["sent"], counts["lost"]) == (1, 0)
    assert names == ["t-" + (tmp_path / ".run-id").read_text()[:8]]
    assert [(each["step"], each["step/reward"]) for each in logs] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    (sample,) = logs[0]["step/samples"]["_value"]
    assert (sample["prompt"], sample["completion"], sample["score"]) == ("1 + 1?", f"two {HIDDEN}", 0.5)
    written = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file())
    assert b"JUDGE_TOKEN" in written
    assert b"correct-horse" not in written


def test_what_the_server_of_trackio_did_not_take_is_not_counted_as_sent(tmp_path):
    address = f"http://{next_address()}:9/?write_token=t"
    counts, *_ = run_trackio(tmp_path, 1, 2, TRACKIO_SERVER_URL=address)
    assert (counts["sent"], counts["lost"]) == (0, 2)
    assert json.loads((tmp_path / "missed-records.json").read_text()) == {"trackio": ["step 1", "step 2"]}


@pytest.fixture
def unavailable_server():
    """Yield the address of a server that answers 503, and its requests."""
    requests: list[str] = []

    class Unavailable(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(503)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer((next_address(), 0), Unavailable)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{server.server_address[0]}:{server.server_port}", requests
    server.shutdown()
    server.server_close()


async def test_mlflow_that_answers_503_never_delays_the_driver(tmp_path, monkeypatch, unavailable_server, caplog):
    address, requests = unavailable_server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    trackers = build_trackers(make_job(tracking={"mlflowExperiment": "e"}), tmp_path)
    trackers.log(step_record(1, reward=0.5))
    wait_for(
        lambda: len(requests) >= 2, "an attempt after a failed one, which the client itself would delay by minutes"
    )
    trackers.log(step_record(2, reward=0.5))
    assert trackers.counts()["mlflow"].waiting == 2
    await trackers.close(seconds=0.1)
    assert trackers.counts()["mlflow"].lost == 2
    assert "mlflow: 0 records were sent, 2 are lost" in caplog.text
