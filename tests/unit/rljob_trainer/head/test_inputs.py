"""What the head reads before it starts Ray."""

import asyncio
import json
import socket
import threading
from dataclasses import replace

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_inputs.hub import HubAccess, find_repository
from rljob_inputs.models.files import open_model
from rljob_inputs.models.own_settings import load_model_settings
from rljob_inputs.models.tokenizer import load_tokenizer
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.failures.configuration import SourceAwayError
from rljob_trainer.head import inputs as head_inputs
from rljob_trainer.head.environment import Environment
from rljob_trainer.outages import OutageError, Outages
from tests.support.hub import LocalHub
from tests.support.model_folder import write_model
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A job whose second training prompt has more tokens than the model's context leaves."""
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(head_inputs, "load_tokenizer", lambda *_: load_tokenizer(open_model(str(folder), None)))
    rows = {"train": ["short", "x" * 80, "other"], "eval": ["held out"]}
    for name, prompts in rows.items():
        lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/train"}, "eval": {"source": "/eval"}, "format": "text"},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "rollout": {"sampling": {"maxTokens": 16}},
    }
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": spec})
    train, held_out = (str(tmp_path / f"{name}.jsonl") for name in rows)
    return Environment(
        job, tmp_path / "job.yaml", tmp_path / "run", "127.0.0.1", str(folder), (train,), {"eval": held_out}
    )


def test_prompts_beyond_the_models_context_are_left_out_and_reported(environment, caplog):
    with caplog.at_level("INFO", logger="rljob_trainer"):
        inputs = head_inputs.load_inputs(environment, load_model_settings(environment.job, environment.model, {}))
    (train,) = inputs.train
    assert (train.name, train.prompts.num_rows, list(train.prompts.by_row)) == ("train", 3, [0, 2])
    assert {prompt.source for prompt in train.prompts.by_row.values()} == {""}, "one source has no metrics of its own"
    assert [prompt.prompt for prompt in inputs.held_out["eval"]] == ["held out"]
    assert "at most 48 (the model's context 64 - rollout.sampling.maxTokens 16); 1 are left out" in caplog.text


def with_mix(environment, **source):
    file = environment.job_file.with_name("other.jsonl")
    file.write_text('{"q": "two", "answer": "2"}')
    spec = environment.job.spec.to_manifest()
    spec["data"]["mix"] = [{"name": "other", "weight": 2, "source": "/other", **source}]
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": spec})
    return replace(environment, job=job, train_data=(*environment.train_data, str(file)))


def load(environment):
    return head_inputs.load_inputs(environment, load_model_settings(environment.job, environment.model, {}))


def test_prompts_of_several_sources_have_their_own_columns_and_name_their_source(environment, caplog):
    with caplog.at_level("INFO", logger="rljob_trainer"):
        first, other = load(with_mix(environment, prompt="q")).train
    assert [(first.name, first.weight), (other.name, other.weight)] == [("train", 1.0), ("other", 2.0)]
    assert [(prompt.prompt, prompt.source) for prompt in other.prompts.by_row.values()] == [("two", "other")]
    assert {prompt.source for prompt in first.prompts.by_row.values()} == {"train"}
    assert "spec.data.mix[0]: 1 prompts" in caplog.text


def test_an_error_of_a_further_source_names_its_field(environment):
    with pytest.raises(UserError, match=r"spec\.data\.mix\[0\]\.prompt: .* has no column prompt; it has q, answer"):
        load(with_mix(environment))


def find_model(hub, name="org/small"):
    return find_repository(f"hf://{name}", "model", None, HubAccess(hub, "hf_x"))


async def test_hub_that_is_away_is_waited_for_with_its_error_in_the_status(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outages = Outages()
    board = StatusBoard(outages)
    url = f"http://127.0.0.1:{port}"
    reading = asyncio.create_task(head_inputs.HubWait(outages, board, ["hf://org/name"]).read(lambda: find_model(url)))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while "cannot reach the Hub" not in board.snapshot().waits_for:
            assert not reading.done()
            await asyncio.sleep(0.01)
    hub = LocalHub(tmp_path, port=port)
    hub.add("models/org/small").joinpath("config.json").write_text("{}")
    threading.Thread(target=hub.serve, daemon=True).start()
    try:
        assert (await reading).name == "org/small"
        assert board.snapshot().waits_for == "reads the data and starts Ray"
        with pytest.raises(UserError, match="does not exist"):
            await head_inputs.HubWait(outages, board, ["hf://org/name"]).read(lambda: find_model(url, "org/other"))
    finally:
        hub.close()


async def test_hub_that_stays_away_ends_the_job():
    outages = Outages(0.5)
    with pytest.raises(
        OutageError, match=r"^spec.hub \(.*\): away since .*cannot reach the Hub .* set spec.hub.endpoint"
    ):
        await head_inputs.HubWait(outages, StatusBoard(outages), ["hf://org/name"]).read(
            lambda: find_model("http://127.0.0.1:1")
        )


async def test_trainer_group_whose_ranks_cannot_read_the_model_is_started_again():
    outages, errors = Outages(), [SourceAwayError("cannot load the model from hf://org/small: ConnectError")]

    async def start(*, generation):
        if errors:
            raise errors.pop()
        return generation

    hub = head_inputs.HubWait(outages, StatusBoard(outages), ["hf://org/name"])
    assert await hub.start_trainer(start, generation="g") == "g"
    errors.append(TransientError("a trainer rank failed in start: EOFError"))
    with pytest.raises(TransientError, match="EOFError"):
        await hub.start_trainer(start, generation="g")
