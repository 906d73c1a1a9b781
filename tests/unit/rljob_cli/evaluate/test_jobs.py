"""The jobs that evaluate, as changes of a job that trains."""

import pytest
import yaml

from rljob_cli.check.jobfile import load_partial
from rljob_cli.evaluate.jobs import list_overrides
from rljob_cli.evaluate.models import Candidate

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
        overrides = list_overrides(load_partial(path, []).job, candidate, "sums-eval-a", candidate.source)
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
