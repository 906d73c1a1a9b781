"""The card of a model, from the records of a run."""

import yaml

from rljob_api.run.folder import FILE_JOB, FILE_METRICS
from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord, read_metrics
from rljob_api.run.summaries import RunSummary, read_run_summary
from rljob_cli.export.command import build_card
from tests.paths import DATA

SUMMARY = RunSummary(name="j", phase="Failed", total_steps=9)


def test_card_of_a_run_is_the_golden_one(golden):
    folder = DATA / "report"
    job = yaml.safe_load((folder / FILE_JOB).read_text())
    card = build_card("letters", 8, job, read_metrics(folder / FILE_METRICS), read_run_summary(folder))
    golden(DATA / "export" / "card.md", card)


def test_metadata_names_what_the_hub_can_resolve():
    data = {"train": {"source": "hf://openai/gsm8k"}, "mix": [{"source": "/home/me/rows.jsonl"}]}
    job = {"spec": {"model": {"source": "hf://Qwen/Qwen3-0.6B", "revision": "abc"}, "data": data}}
    card = build_card("j", 3, job, Metrics(), SUMMARY)
    header = yaml.safe_load(card.split("---")[1])
    assert (header["base_model"], header["datasets"]) == ("Qwen/Qwen3-0.6B", ["openai/gsm8k"])
    assert "Trained from Qwen/Qwen3-0.6B at abc by" in card
    assert "| data | openai/gsm8k, rows.jsonl (local) |" in card


def test_rows_of_an_environment_are_no_local_file():
    job = {"spec": {"model": {"source": "hf://a/b"}, "data": {"train": {"source": "env://train"}}}}
    card = build_card("j", 3, job, Metrics(), SUMMARY)
    assert "| data | rows of the agent's environment or program, train |" in card


def test_what_only_this_machine_may_know_stays_out():
    job = {
        "metadata": {"name": "j"},
        "spec": {
            "model": {"source": "/home/me/secret-folder/model"},
            "head": {"env": {"WANDB_API_KEY": "hunter2"}},
            "rewards": [{"name": "a|b", "function": {"inline": "hunter2", "env": {"KEY": "hunter2"}}}],
        },
    }
    card = build_card("j", 3, job, Metrics(), SUMMARY)
    assert "hunter2" not in card
    assert "secret-folder" not in card
    assert "| a\\|b | function |" in card, "a name does not end its cell"


def test_results_are_those_of_the_step():
    steps = tuple(StepRecord(step=step, reward=step / 1000) for step in range(1, 501))
    evaluations = tuple(EvaluationRecord(step=step, accuracy=step / 1000) for step in (0, 250, 500))
    card = build_card("j", 400, {}, Metrics(steps, evaluations), SUMMARY)
    assert "| mean reward | 0.400 |" in card
    assert "| accuracy, eval, after step 250 | 0.250 |" in card
    assert "step 500" not in card
