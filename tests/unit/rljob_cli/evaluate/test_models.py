"""What --model names."""

import os
import subprocess

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_BEST, FILE_COMPLETE, checkpoint_folder, export_folder
from rljob_api.run.summaries import BestStep, format_summary
from rljob_cli.check.jobfile import load_partial
from rljob_cli.evaluate.models import Candidate, export, find_candidates, list_overrides, name_jobs


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of runs, with one of two checkpoints, and a model next to it."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        folder = checkpoint_folder(tmp_path / "runs" / "sums", step)
        folder.mkdir(parents=True)
        (folder / FILE_COMPLETE).write_text("{}")
    (tmp_path / "runs" / "sums" / "job.yaml").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "runs"


def find(given, runs):
    [found] = find_candidates([given], "/own", runs)
    return found


def test_without_models_the_jobs_own_is_evaluated(runs):
    assert find_candidates([], "/own", runs) == [Candidate("/own", "/own", is_own=True)]


def test_sources_are_folders_repositories_and_claims(runs, tmp_path):
    assert find("model", runs).source == str(tmp_path / "model")
    assert find("hf://org/name", runs) == Candidate("hf://org/name", "hf://org/name")
    assert find("hf://org/name@v2", runs) == Candidate("hf://org/name@v2", "hf://org/name", "v2")
    assert find("pvc://models/a", runs).source == "pvc://models/a"


def test_step_of_a_run_is_exported_once(runs):
    for given in ("sums@20", "runs/sums@20", "sums@last"):
        found = find(given, runs)
        assert (found.run, found.step) == (runs / "sums", 20)
        assert found.source == str(export_folder(runs / "sums", 20))
    best = BestStep(set="eval", metric="accuracy", value=0.5, step=10)
    (runs / "sums" / FILE_BEST).write_text(format_summary(best))
    assert find("sums@best", runs).step == 10
    exported = export_folder(runs / "sums", 10)
    exported.mkdir(parents=True)
    assert find("sums@10", runs).step is None
    complete = checkpoint_folder(runs / "sums", 10) / FILE_COMPLETE
    later = exported.stat().st_mtime + 1
    os.utime(complete, (later, later))
    assert find("sums@10", runs).step == 10, "the step was trained again"


def test_export_of_a_run_is_that_of_its_end(runs):
    with pytest.raises(UserError, match="has no export: it is written at the end"):
        find("sums@export", runs)
    (runs / "sums" / "export").mkdir()
    assert find("sums@export", runs).source == str(runs / "sums" / "export")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", "--model nothing: not found"),
        ("other@3", "run not found"),
        ("sums@final", "after @ must be the step of a checkpoint, last, best or export, got final"),
        ("sums@best", "has no best.json: set evaluation.best in the job"),
        ("runs/sums", "has no config.json; pass a Hugging Face folder, hf://org/name, or RUN@STEP"),
        ("/models/in/pods", "--model /models/in/pods: not found"),
    ],
)
def test_what_is_no_model_is_refused_with_the_remedy(given, message, runs):
    with pytest.raises(UserError, match=message):
        find(given, runs)


def test_model_that_is_given_twice_is_refused(runs):
    with pytest.raises(UserError, match="--model model is given twice"):
        find_candidates(["model", "model"], "/own", runs)


def test_failed_export_is_reported_with_its_last_line(runs, monkeypatch):
    done = subprocess.CompletedProcess([], 78, "", "a warning\nerror: the checkpoint is damaged\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match="--model sums@20: the checkpoint is damaged"):
        export(find("sums@20", runs), lambda line: None)


def test_names_of_jobs_are_different_and_short(runs):
    given = ["hf://Qwen/Qwen3-0.6B", "sums@10", "sums@20", "hf://other/Qwen3-0.6B"]
    names = name_jobs("gsm8k", find_candidates(given, "/own", runs))
    assert names == ["gsm8k-eval-qwen3-0-6b", "gsm8k-eval-sums-10", "gsm8k-eval-sums-20", "gsm8k-eval-qwen3-0-6b-4"]
    long = name_jobs("a" * 40, find_candidates(given, "/own", runs))
    assert len(set(long)) == 4
    assert all(len(name) <= 40 for name in long)


SPEC = {
    "model": {"source": "hf://org/base", "revision": "v1"},
    "data": {"train": {"source": "hf://org/data"}, "eval": {"source": "hf://org/data"}},
    "rewards": [{"name": "correct", "function": {"inline": "def compute_score(a, b, c, d=None):\n    return 1.0\n"}}],
}


@pytest.fixture
def change(tmp_path):
    """Return the job that evaluates a candidate."""

    def load(candidate, **spec):
        path = tmp_path / "job.yaml"
        manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}}
        path.write_text(yaml.safe_dump(manifest | {"spec": SPEC | spec}))
        overrides = list_overrides(load_partial(path, []).job, candidate, "sums-eval-a")
        file = load_partial(path, overrides)
        assert file.problems == ()
        return file.job

    return load


def test_only_the_model_and_the_task_change(change):
    job = change(Candidate("hf://org/other", "hf://org/other"))
    assert (job.metadata.name, job.spec.task, job.spec.trains) == ("sums-eval-a", "evaluate", False)
    assert (job.spec.model.source, job.spec.model.revision) == ("hf://org/other", None)
    assert list(job.spec.own_roles) == ["head", "rollout"]
    assert (job.spec.num_steps, job.spec.num_trainer_pods) == (0, 0)


def test_own_model_keeps_its_revision(change):
    assert change(Candidate("hf://org/base", "hf://org/base", is_own=True)).spec.model.revision == "v1"


def test_engines_in_the_trainers_pods_get_pods_of_their_own_with_its_settings(change):
    trainer = {
        "replicas": 2, "gpusPerReplica": 4, "image": "i:1", "nodePool": {"nodeSelector": {"pool": "h100"}},
        "resources": {"limits": {"memory": "64Gi"}}, "env": {"A": "b"},
    }  # fmt: skip
    model = {"source": "hf://org/scorer", "gpusPerReplica": 1, "placement": "trainer"}
    rewards = [*SPEC["rewards"], {"name": "scorer", "model": model}]
    rollout = {"placement": "trainer", "gpusPerReplica": 2, "weightTransfer": "device"}
    shared = {"rollout": rollout, "trainer": trainer, "rewards": rewards}
    spec = change(Candidate("m", "hf://org/m"), **shared).spec
    assert (spec.rollout.placement, spec.rollout.replicas, spec.rollout.gpus_per_replica) == ("separate", 4, 2)
    assert (spec.rollout.image, spec.rollout.env) == ("i:1", {"A": "b"})
    assert spec.rollout.node_pool.node_selector == {"pool": "h100"}
    assert spec.rollout.resources == spec.trainer.resources
    assert spec.models_in_trainer == {}
