"""How a job becomes vLLM's command line and environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ExitCode
from rljob_trainer.rollout import server as rollout_server
from rljob_trainer.rollout.server import build_arguments, build_environment

ENVIRONMENT = {"RLJOB_POD_IP": "127.0.0.9"}


def _job(model: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, dtype: str = "bfloat16") -> RLJob:
    return RLJob.model_validate(
        {
            "metadata": {"name": "job"},
            "spec": {
                "model": model or {"source": "/models/m"},
                "data": {"train": {"source": "/data"}},
                "rewards": [{"name": "r", "function": {"inline": "def reward(): ..."}}],
                "schedule": {"seed": 7},
                "trainer": {"dtype": dtype},
                "rollout": rollout or {},
            },
        }
    )


def _value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_replica_listens_where_the_contract_says() -> None:
    arguments = build_arguments(_job(), ENVIRONMENT)
    assert _value(arguments, "--host") == "127.0.0.9"
    assert _value(arguments, "--port") == "8000"
    assert _value(arguments, "--served-model-name") == "policy"


def test_log_probs_are_of_the_distribution_that_is_sampled() -> None:
    arguments = build_arguments(_job(), ENVIRONMENT)
    assert _value(arguments, "--logprobs-mode") == "processed_logprobs"
    assert _value(arguments, "--generation-config") == "vllm"
    assert _value(arguments, "--seed") == "7"


def test_weights_come_by_our_own_engine() -> None:
    arguments = build_arguments(_job(), ENVIRONMENT)
    assert json.loads(_value(arguments, "--weight-transfer-config")) == {"backend": "rljob-http"}
    assert _value(arguments, "--worker-extension-cls") == "rljob_trainer.rollout.engine.WorkerExtension"


def test_rollouts_sample_in_the_dtype_that_the_trainer_computes_in() -> None:
    assert _value(build_arguments(_job(dtype="float32"), ENVIRONMENT), "--dtype") == "float32"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"source": "/models/m"}, ["--model", "/models/m"]),
        ({"source": "hf://org/name"}, ["--model", "org/name"]),
        (
            {"source": "hf://org/name", "revision": "v2"},
            ["--model", "org/name", "--revision", "v2", "--tokenizer-revision", "v2"],
        ),
    ],
)
def test_the_model_is_found_by_its_source(model: dict[str, Any], expected: list[str]) -> None:
    assert build_arguments(_job(model), ENVIRONMENT)[: len(expected)] == expected


def test_a_resolved_model_wins() -> None:
    arguments = build_arguments(_job({"source": "hf://org/name"}), ENVIRONMENT | {"RLJOB_MODEL": "/here"})
    assert _value(arguments, "--model") == "/here"


def test_a_source_that_is_nowhere_on_the_pod_names_the_remedy() -> None:
    with pytest.raises(UserError, match=r"spec\.model\.source pvc://claim/m .* set RLJOB_MODEL"):
        build_arguments(_job({"source": "pvc://claim/m"}), ENVIRONMENT)


def test_a_cpu_replica_compiles_nothing_and_binds_no_threads() -> None:
    job = _job(rollout={"kvCacheGiB": 0.5})
    arguments = build_arguments(job, ENVIRONMENT)
    assert "--enforce-eager" in arguments
    assert "--no-enable-chunked-prefill" in arguments
    assert _value(arguments, "--kv-cache-memory-bytes") == str(1 << 29)
    assert "--tensor-parallel-size" not in arguments
    assert build_environment(job)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert build_environment(job)["TORCH_COMPILE_DISABLE"] == "1"


def test_a_gpu_replica_is_tensor_parallel_and_compiled() -> None:
    job = _job(rollout={"gpusPerReplica": 4, "gpuMemoryUtilization": 0.8})
    arguments = build_arguments(job, ENVIRONMENT)
    assert _value(arguments, "--tensor-parallel-size") == "4"
    assert _value(arguments, "--gpu-memory-utilization") == "0.8"
    assert "--enforce-eager" not in arguments
    assert "TORCH_COMPILE_DISABLE" not in build_environment(job)


def test_extra_arguments_come_last() -> None:
    arguments = build_arguments(_job(rollout={"extraArgs": ["--seed", "1"], "maxModelLen": 2048}), ENVIRONMENT)
    assert arguments[-2:] == ["--seed", "1"]
    assert _value(arguments, "--max-model-len") == "2048"


def test_a_job_that_cannot_be_read_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RLJOB_JOB_FILE": str(tmp_path / "no.yaml"), "RLJOB_TOKEN": "t", "RLJOB_POD_IP": "i", "RLJOB_HEAD": "h"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert rollout_server.main() == ExitCode.USER


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("RLJOB_TOKEN", raising=False)
    assert rollout_server.main() == ExitCode.USER
    assert "RLJOB_TOKEN" in caplog.text


def test_a_signal_while_it_loads_ends_it() -> None:
    code = """
import os, signal, sys
from rljob_trainer import rollout_server
def load_job(_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was lost")
rollout_server._load_job = load_job
sys.exit(rollout_server.main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ExitCode.SUCCEEDED, ended.stderr
    assert "stopped by a signal" in ended.stderr
