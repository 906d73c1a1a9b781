"""What a trainer Pod's engines are given, and how long they may start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.pod_engines import PodEngine
from rljob_trainer.worker.main import parse_order
from rljob_trainer.worker.supervisor import engine_environment
from rljob_trainer.worker.turns import Order

LOG = Path("/tmp/engine-1")


def environment(
    devices: str | None, num_gpus: int = 2, num_pod_gpus: int = 4, number: int = 1, model: str = ""
) -> dict[str, str]:
    values = {"RLJOB_TOKEN": "t", "RLJOB_TERMINATION_LOG": "/dev/termination-log"}
    if devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = devices
    gpus = range(number * num_gpus, (number + 1) * num_gpus)
    return engine_environment(values, PodEngine(number, model, gpus, 600), num_pod_gpus, LOG)


def test_engine_of_a_served_model_knows_which() -> None:
    assert environment(None, model="spec.rewards[0].model")["RLJOB_ENGINE_MODEL"] == "spec.rewards[0].model"
    assert "RLJOB_ENGINE_MODEL" not in environment(None)


def test_engine_knows_its_number_and_has_a_termination_log_of_its_own() -> None:
    assert environment(None, 0, 0) == {"RLJOB_TOKEN": "t", "RLJOB_ENGINE": "1", "RLJOB_TERMINATION_LOG": str(LOG)}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(None, "2,3"), ("", "2,3"), ("4,5,6,7", "6,7"), ("GPU-a, GPU-b, GPU-c, GPU-d", "GPU-c,GPU-d")],
)
def test_engine_has_its_part_of_the_pods_gpus(devices: str | None, expected: str) -> None:
    assert environment(devices)["CUDA_VISIBLE_DEVICES"] == expected


def test_pod_with_fewer_gpus_than_the_job_says_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"spec.trainer.gpusPerReplica is 4, but CUDA_VISIBLE_DEVICES has 2"):
        environment("0,1")


@pytest.mark.parametrize(
    ("query", "order"),
    [
        ({"turn": "trainer"}, Order("trainer")),
        ({"turn": "rollouts", "want": "g:a:3"}, Order("rollouts", "g:a:3")),
    ],
)
def test_query_names_the_turn(query: dict[str, str], order: Order) -> None:
    assert parse_order(query) == order


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({}, "turn must be trainer or rollouts, got None"),
        ({"turn": "start"}, "got 'start'"),
        ({"turn": "rollouts"}, "want must be GENERATION:VERSION, got ''"),
        ({"turn": "rollouts", "want": "g:x"}, "got 'g:x'"),
    ],
)
def test_bad_query_has_a_reason(query: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_order(query)
