"""From env:// sources to prompts, with a runner over HTTP; and what the status says meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import FILE_COMPLETE, checkpoint_folder
from rljob_api.run.rows import read_lines
from rljob_api.wire.contract import READ_ROWS
from rljob_inputs.models.files import open_model
from rljob_inputs.models.own_settings import load_model_settings
from rljob_inputs.models.tokenizer import load_tokenizer
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.head import inputs as head_inputs
from rljob_trainer.head import inputs as rows
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.inputs import place_rows
from rljob_trainer.history.disk import RunDisk
from tests.support.call_servers import CallHarness
from tests.support.model_folder import write_model
from tests.support.reward_harness import until
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture
async def call_harness(tmp_path, monkeypatch):
    harness = CallHarness(tmp_path, monkeypatch)
    yield harness
    await harness.close()


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A job whose program has its rows, with an evaluation set on rows that are not trained on."""
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(head_inputs, "load_tokenizer", lambda *_: load_tokenizer(open_model(str(folder), None)))
    monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({"runner": "runner"}))
    rows = {"source": "env://train", "prompt": "q", "answer": "a"}
    spec = {
        "model": {"source": "/m", "chatTemplate": {"inline": "{{ messages[0].content }}"}},
        "data": {"train": {**rows, "offset": 2}, "eval": {**rows, "limit": 2}},
        "agent": {"type": "program", "runner": {"function": {"inline": "x"}, "retries": 0}},
        "evaluation": {"sets": [{"name": "hard", "data": {"source": "env://hard", "prompt": "q", "answer": None}}]},
        "rollout": {"sampling": {"maxTokens": 16}},
    }
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": spec})
    held_out = {"eval": "env://train", "hard": "env://hard"}
    run = tmp_path / "run"
    run.mkdir()
    return Environment(job, tmp_path / "job.yaml", run, "127.0.0.1", str(folder), ("env://train",), held_out)


def answer(body):
    """Return rows with the number of the split's row as index: 5 of train, 1 of hard."""
    assert body["function"] == READ_ROWS
    call = body["arguments"]
    total = {"train": 5, "hard": 1}[call["split"]]
    numbers = range(call["start"], min(total, call["start"] + call["count"], call["start"] + 2))
    rows = [{"q": f"{n}?", "a": str(n), "info": {"n": [n]}, "index": n} for n in numbers]
    reply = {"rows": rows, "total": total, "is_last": numbers.stop >= total}
    return {"valid": True, "value": reply}


async def place(environment, board=None):
    board = board or StatusBoard()
    return await place_rows(environment, environment.job.spec, board, RunDisk(environment.run_dir, board.outages))


def load(environment):
    return head_inputs.load_inputs(environment, load_model_settings(environment.job, environment.model, {}))


async def test_rows_become_prompts_that_carry_what_the_environment_gave(call_harness, environment):
    server = await call_harness.serve("runner")
    server.answer = answer
    inputs = load(await place(environment))
    [train] = inputs.train
    assert [prompt.ground_truth for prompt in train.prompts.by_row.values()] == ["2", "3", "4"]
    first = train.prompts.by_row[0]
    assert first.extra_info == {"index": 2, "split": "train", "q": "2?", "info": {"n": [2]}}
    assert [prompt.extra_info["index"] for prompt in inputs.held_out["eval"]] == [0, 1]
    assert inputs.held_out["eval"][0].extra_info["split"] == "train", "its task is one of this split"
    assert inputs.held_out["hard"][0].extra_info["split"] == "hard"
    assert [body["arguments"]["split"] for body in server.bodies] == ["train"] * 3 + ["hard"], "each split once"


async def test_all_pages_come_from_one_replica_while_it_works(call_harness, environment):
    """Another one would make the rows of a generator again from the first one on, for each of its pages."""
    servers = [await call_harness.serve("runner") for _ in range(2)]
    for server in servers:
        server.answer = answer
    await place(environment)
    assert sorted(len(server.bodies) for server in servers) == [0, 4]


async def test_head_that_resumes_asks_no_runner_and_reads_equal_rows(call_harness, environment):
    server = await call_harness.serve("runner")
    server.answer = answer
    before = load(await place(environment))
    folder = checkpoint_folder(environment.run_dir, 1)
    folder.mkdir(parents=True)
    (folder / FILE_COMPLETE).touch()
    call_harness.list(without=[server])
    after = load(await asyncio.wait_for(place(environment), DEADLINE_SECONDS))
    assert after.train == before.train
    assert after.held_out == before.held_out


async def test_head_answers_while_it_reads_the_rows_of_its_run(call_harness, environment, monkeypatch):
    server = await call_harness.serve("runner")
    server.answer = answer
    await place(environment)
    folder = checkpoint_folder(environment.run_dir, 1)
    folder.mkdir(parents=True)
    (folder / FILE_COMPLETE).touch()
    readers = []

    def read(*given):
        readers.append(threading.current_thread())
        return read_lines(*given)

    monkeypatch.setattr(rows, "read_lines", read)
    await place(environment)
    assert len(readers) == 2
    assert threading.main_thread() not in readers, "the event loop, whose probes would end the head"


async def test_status_says_what_is_read_and_asks_the_autoscaler_for_a_slot(call_harness, environment):
    board = StatusBoard()
    reading = asyncio.create_task(place(environment, board))
    await until(lambda: board.snapshot().demand)
    status = board.snapshot()
    assert status.waits_for == (
        "reads the rows of the program of agent.runner.function, env://train: 0 so far, no replica exists"
    )
    demand = status.demand["runner"]
    assert (demand.samples, demand.is_open, demand.holds_slots) == (1, True, True)
    server = await call_harness.serve("runner")
    server.answer = answer
    await reading
    assert not board.snapshot().demand


async def test_environment_without_rows_ends_the_job_with_field_and_remedy(call_harness, environment):
    server = await call_harness.serve("runner")
    message = "Echo has no rows of its own: add a function rows(split)"
    server.answer = lambda body: {"valid": False, "reason": "bad_request", "message": message}
    with pytest.raises(UserError) as caught:
        await place(environment)
    assert str(caught.value) == (
        f"spec.data.train.source: env://train: the program of agent.runner.function gave no rows: {message}"
    )
    assert len(server.bodies) == 1, "a retry would fail, too"


async def test_job_that_only_evaluates_reads_no_rows_to_train_on(call_harness, environment):
    server = await call_harness.serve("runner")
    server.answer = answer
    spec = environment.job.spec
    sets = spec.evaluation.sets
    job = environment.job.model_copy(
        update={
            "spec": spec.model_copy(
                update={"task": "evaluate", "given_data": spec.data.model_copy(update={"eval": None})}
            )
        }
    )
    assert [each.name for each in sets] == ["hard"]
    placed = await place(replace(environment, job=job, held_out_data={"hard": "env://hard"}))
    assert [body["arguments"]["split"] for body in server.bodies] == ["hard"]
    assert placed.held_out_data["hard"].endswith("rows/hard.jsonl")
