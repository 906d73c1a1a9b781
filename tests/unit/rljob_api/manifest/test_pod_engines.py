"""Which engines a trainer Pod has, and where they listen."""

from rljob_api.manifest.pod_engines import find_engines, find_ports
from tests.unit.rljob_api.manifest.test_job import SHARED, build, in_trainer

JUDGE = {"name": "judge", "judge": {"template": "x", "parser": {"regex": "(x)"}, "model": in_trainer()["model"]}}


def test_engines_of_each_kind_use_all_gpus_of_the_pod() -> None:
    reward = in_trainer(gpusPerReplica=1, startupTimeoutSeconds=60)
    spec = build(
        trainer={"gpusPerReplica": 2},
        rollout=SHARED | {"gpusPerReplica": 2},
        rewards=[{"name": "f", "function": {"file": "x"}}, reward],
    )
    assert [(each.number, each.model, [*each.gpus], each.startup_seconds) for each in find_engines(spec)] == [
        (0, "", [0, 1], 600),
        (1, "spec.rewards[1].model", [0], 60),
        (2, "spec.rewards[1].model", [1], 60),
    ]
    assert find_ports(spec, "spec.rewards[1].model") == [8001, 8002]


def test_without_gpus_there_is_one_of_each() -> None:
    spec = build(rollout=SHARED, rewards=[in_trainer(), JUDGE])
    found = [(each.number, each.model) for each in find_engines(spec)]
    assert found == [(0, ""), (1, "spec.rewards[0].model"), (2, "spec.rewards[1].judge.model")]
    assert not any(each.gpus for each in find_engines(spec))


def test_pods_without_rollouts_have_no_engines() -> None:
    assert find_engines(build()) == []
