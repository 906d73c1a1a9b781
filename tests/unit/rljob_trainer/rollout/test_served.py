"""The program of a served model's engine: vLLM's command line."""

from __future__ import annotations

import json

import pytest

from rljob_trainer.rollout.served import build_arguments, name_engine

PATH = "spec.rewards[1].judge.model"


def arguments(*model: str) -> list[str]:
    models = {"spec.rewards[0].model": ["--model", "/other"], PATH: ["--model", "/m", *model]}
    return build_arguments(
        {
            "RLJOB_SERVED_MODELS": json.dumps(models),
            "RLJOB_ENGINE_MODEL": PATH,
            "RLJOB_ENGINE": "2",
            "RLJOB_POD_IP": "10.0.0.7",
        }
    )


def test_engine_listens_at_its_own_port_and_serves_its_own_model() -> None:
    found = arguments("--max-model-len", "64")
    assert found[found.index("--port") + 1] == "8002"
    assert found[found.index("--host") + 1] == "10.0.0.7"
    assert found[-4:] == ["--model", "/m", "--max-model-len", "64"], "extraArgs come last"


@pytest.mark.parametrize(
    ("model", "sleeps"),
    [((), "--worker-cls"), (("--tensor-parallel-size", "1"), "--enable-sleep-mode")],
)
def test_engine_can_sleep_on_both_devices(model: tuple[str, ...], sleeps: str) -> None:
    assert len({"--worker-cls", "--enable-sleep-mode"} & {*arguments(*model)}) == 1
    assert sleeps in arguments(*model)


def test_status_names_the_engine_by_its_field_and_its_port() -> None:
    environment = {"RLJOB_ENGINE_MODEL": PATH, "RLJOB_ENGINE": "2", "RLJOB_POD_IP": "10.0.0.7"}
    assert name_engine(environment) == f"engine of {PATH} at 10.0.0.7:8002"
