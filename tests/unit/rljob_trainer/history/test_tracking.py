"""Which trackers a job has, and what they get."""

import dataclasses
import sys
import threading
import time

import pytest

from rljob_api.errors import UserError
from rljob_api.run.metrics import append_records
from rljob_api.run.summaries import DeliveryCounts
from rljob_api.wire.redaction import HIDDEN
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group
from rljob_trainer.history import tracking
from rljob_trainer.history.delivery import Delivery, UnsentError
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import (
    SAMPLE_COLUMNS,
    Trackers,
    build_trackers,
    describe_samples,
    send_missed,
)
from tests.support.driver_harness import make_job
from tests.support.episodes import episode
from tests.support.records import step_record
from tests.support.waiting import DEADLINE_SECONDS, wait_for

CUSTOM = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Run:
    calls: list

    def log(self, values, step):
        self.calls.append((values["step/reward"], step))

    def finish(self):
        self.calls.append("end")

def start(name, run_id, config):
    calls.append((name, run_id, config["head"]["env"], config["schedule"]["steps"]))
    return Run(calls)

calls = []
"""


class Recording:
    def __init__(self):
        self.records, self.may_answer = [], threading.Event()
        self.may_answer.set()

    def log(self, record):
        assert self.may_answer.wait(DEADLINE_SECONDS)
        self.records.append(record)

    def restart_at(self, step):
        self.records.append(step)

    def close(self): ...


def make_group(number, num_samples=2, text="answer"):
    episodes = [
        dataclasses.replace(episode(text=f"{text} {number}.{i}", index=(number, number, i)), score=float(i))
        for i in range(num_samples)
    ]
    return Group(number, Prompt(number, f"prompt {number}", [1], ground_truth=str(number)), episodes)


async def test_a_tracker_that_hangs_delays_neither_the_loop_nor_another_tracker():
    slow, quick = Recording(), Recording()
    slow.may_answer.clear()
    trackers = Trackers([Delivery("slow", lambda: slow), Delivery("quick", lambda: quick)])
    trackers.restart_at(0)
    for step in (1, 2):
        trackers.log(step_record(step, reward=0.5))
    wait_for(
        lambda: trackers.counts() == {"slow": DeliveryCounts(sent=1, waiting=2), "quick": DeliveryCounts(sent=3)},
        "what the quick one gets",
    )
    slow.may_answer.set()
    await trackers.close()
    assert [record.step for record in slow.records[1:]] == [1, 2]
    assert slow.records[0] == 0
    assert slow.records[1].named["step/reward"] == 0.5


async def test_a_record_has_the_time_of_its_step():
    slow = Recording()
    slow.may_answer.clear()
    trackers, before = Trackers([Delivery("slow", lambda: slow)]), time.time()
    trackers.log(step_record(1))
    after = time.time()
    slow.may_answer.set()
    await trackers.close()
    assert before <= slow.records[0].time <= after


def test_samples_come_from_many_groups():
    groups = [make_group(number) for number in range(6)]
    rows = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in describe_samples(7, groups, 4)]
    assert [row["completion"] for row in rows] == ["answer 0.0", "answer 1.0", "answer 3.0", "answer 4.0"]
    assert rows[1] | {"end": ""} == {
        "step": 7,
        "group": 1,
        "prompt": "prompt 1",
        "answer": "1",
        "completion": "answer 1.0",
        "score": 0.0,
        "advantage": None,
        "end": "",
    }
    assert len(describe_samples(7, groups, 100)) == 12
    assert describe_samples(7, groups, 0) == describe_samples(7, [], 4) == []


def test_long_texts_of_samples_are_cut():
    (row,) = describe_samples(1, [make_group(0, 1, "x" * 20_000)], 1)
    assert row[4].endswith("... (20004 characters)")
    assert len(row[4]) < 11_000


def test_mlflow_without_an_address_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=r"spec.tracking.mlflowExperiment is set, but MLFLOW_TRACKING_URI is not"):
        build_trackers(make_job(tracking={"mlflowExperiment": "e"}), tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "package"),
    [
        ("tensorboard", True, "tensorboard"),
        ("wandbProject", "p", "wandb"),
        ("mlflowExperiment", "e", "mlflow"),
        ("trackioProject", "p", "trackio"),
    ],
)
def test_a_tracker_whose_client_is_not_installed_is_a_user_error(field, value, package, tmp_path, monkeypatch):
    monkeypatch.setattr("rljob_trainer.history.tracking.has_module", lambda name: name != package)
    message = rf"^spec.tracking.{field} needs {package}, which is not installed; run `make DEVICE=\w+ install`"
    with pytest.raises(UserError, match=message):
        build_trackers(make_job(tracking={field: value}), tmp_path)


def test_the_job_decides_on_the_trackers(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    tracking = {"tensorboard": True, "wandbProject": "p", "mlflowExperiment": "e", "wandbSamples": 3}
    tracking |= {"trackioProject": "p", "custom": "json:loads"}
    trackers = build_trackers(make_job(tracking=tracking), tmp_path)
    assert set(trackers.counts()) == {"tensorboard", "wandb", "mlflow", "trackio", "custom"}
    assert trackers._num_samples == 3
    assert not build_trackers(make_job(), tmp_path).counts()


async def test_metrics_count_what_each_tracker_lost():
    trackers = Trackers([Delivery("mlflow", Recording)])
    prometheus = PrometheusMetrics()
    prometheus.register_trackers(trackers.counts)
    trackers.log(step_record(1))
    await trackers.close()
    trackers.log(step_record(2))
    text = prometheus.render().decode()
    assert 'rljob_tracker_records_total{outcome="sent",tracker="mlflow"} 1.0' in text
    assert 'rljob_tracker_records_total{outcome="lost",tracker="mlflow"} 1.0' in text
    assert 'rljob_tracker_waiting_records{tracker="mlflow"} 0.0' in text


async def test_what_a_tracker_missed_is_kept_and_sent_later(tmp_path, monkeypatch):
    """W&B out of reach for the whole run: its records were nowhere but in metrics.jsonl, and no command sent them."""

    def refuse():
        raise ConnectionError("closed port")

    job, records = make_job(tracking={"wandbProject": "p"}), [step_record(number, reward=0.5) for number in (1, 2)]
    trackers = Trackers([Delivery("wandb", refuse)], run_dir=tmp_path)
    trackers.restart_at(0)
    for record in records:
        trackers.log(record)
    await trackers.close(seconds=0)
    (tmp_path / "job.yaml").write_text(job.model_dump_json(by_alias=True, exclude={"status"}))
    append_records(tmp_path / "metrics.jsonl", [*records, step_record(3, reward=0.5)])

    recording = Recording()
    monkeypatch.setattr(tracking, "find_trackers", lambda job, run_dir: {"wandb": refuse})
    assert list(send_missed(tmp_path)) == ["wandb: 2 records wait on: ConnectionError: closed port"]
    monkeypatch.setattr(tracking, "find_trackers", lambda job, run_dir: {"wandb": lambda: recording})
    assert list(send_missed(tmp_path)) == ["wandb: 2 records were sent"]
    assert [(record.step, record.numbers["reward"]) for record in recording.records] == [(1, 0.5), (2, 0.5)]
    assert list(send_missed(tmp_path)) == ["trackers missed nothing"], "nothing is sent twice"
    (file := tmp_path / "missed-records.json").unlink()
    assert list(send_missed(tmp_path)) == ["trackers missed nothing"]
    for damaged in ("{", "[]", '{"wandb": 1}'):
        file.write_text(damaged)
        assert list(send_missed(tmp_path)) == [f"{file} is damaged; nothing is sent"], damaged


async def test_the_address_of_a_run_is_known():
    recording = Recording()
    recording.url = "https://tracker.example/run/1"
    trackers = Trackers([Delivery("wandb", lambda: recording)])
    trackers.log(step_record(1))
    counts = await trackers.close()
    assert counts["wandb"] == DeliveryCounts(sent=1, url="https://tracker.example/run/1")
    assert await trackers.close() == counts, "the head closes them again"


async def test_a_tracker_of_the_user_gets_each_record(tmp_path):
    (tmp_path / "json.py").write_text(CUSTOM)
    reference = f"{tmp_path}/json.py:start"
    job = make_job(tracking={"custom": reference}, head={"env": {"MY_KEY": "hunter2"}})
    trackers = build_trackers(job, tmp_path)
    for step in (1, 2):
        trackers.log(step_record(step, reward=step / 10))
    assert (await trackers.close())["custom"] == DeliveryCounts(sent=2)
    calls = sys.modules["rljob_custom_tracker"].calls
    start = ("t", (tmp_path / ".run-id").read_text(), {"MY_KEY": HIDDEN}, job.spec.schedule.steps)
    assert calls == [start, (0.1, 1), (0.2, 2), "end"]
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("nowhere_to_be_found.tracking:start", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("json:start", "AttributeError: module 'json' has no attribute 'start'"),
        ("/nowhere/tracker.py:start", "FileNotFoundError: "),
    ],
)
def test_a_tracker_that_cannot_be_imported_is_a_user_error(reference, why, tmp_path):
    message = rf"^spec.tracking.custom {reference} cannot be imported: {why}"
    with pytest.raises(UserError, match=message):
        build_trackers(make_job(tracking={"custom": reference}), tmp_path)


def test_w_and_b_says_when_it_did_not_upload_all():
    class Slow:
        def finish(self):
            raise TimeoutError("Timed out before finishing uploading")

    client = tracking.WeightsAndBiases.__new__(tracking.WeightsAndBiases)
    tracking.ClientRun.__init__(client, Slow())
    with pytest.raises(UnsentError, match="Timed out"):
        client.close()
