"""What the head reads before it starts Ray."""

import json

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_inputs.models.files import open_model
from rljob_inputs.models.tokenizer import load_tokenizer
from rljob_trainer.head import wiring
from rljob_trainer.head.environment import Environment
from tests.support.model_folder import write_model


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A job whose second training prompt has more tokens than the model's context leaves."""
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(wiring, "load_tokenizer", lambda *_: load_tokenizer(open_model(str(folder), None)))
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
    return Environment(job, tmp_path / "job.yaml", tmp_path / "run", "127.0.0.1", str(folder), train, held_out)


def test_prompts_beyond_the_models_context_are_left_out_and_reported(environment, caplog):
    with caplog.at_level("INFO", logger="rljob_trainer"):
        inputs = wiring.load_inputs(environment)
    assert (inputs.train.num_rows, list(inputs.train.by_row)) == (3, [0, 2])
    assert [prompt.prompt for prompt in inputs.held_out] == ["held out"]
    assert inputs.context_length == 64, "conversations end there"
    assert "at most 48 (the model's context 64 - rollout.sampling.maxTokens 16); 1 are left out" in caplog.text


def test_model_without_config_is_a_user_error(environment, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"spec.model.source: .*/model has no config.json; set a Hugging Face folder"):
        wiring.load_inputs(environment)
