"""The rollout's program: vLLM's command line and environment for a job, and user errors."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Lora
from rljob_api.wire.contract import ExitCode
from rljob_trainer.rollout import server as rollout_server
from rljob_trainer.rollout.plugin import SLEEPING_CPU_WORKER
from rljob_trainer.rollout.server import build_arguments, find_update_mode
from rljob_trainer.rollout.startup import build_defaults
from rljob_trainer.rollout.vllm_app import choose_cpu_executor

ENVIRONMENT = {"RLJOB_POD_IP": "127.0.0.9", "RLJOB_MODEL": "/models/m"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
WITHOUT_ADAPTERS = {"architectures": ["Zamba2ForCausalLM"]}


def _job(
    model: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    arguments: dict[str, Any] | None = None,
    **trainer: Any,
) -> RLJob:
    return RLJob.model_validate(
        {
            "metadata": {"name": "job"},
            "spec": {
                "model": model or {"source": "/models/m"},
                "data": {"train": {"source": "/data"}, "chatTemplateArguments": arguments or {}},
                "rewards": [{"name": "r", "function": {"inline": "def reward(): ..."}}],
                "schedule": {"seed": 7},
                "trainer": {"dtype": dtype, **trainer},
                "rollout": rollout or {},
            },
        }
    )


def _value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_replica_listens_on_the_contracts_port() -> None:
    arguments = build_arguments(_job(), ENVIRONMENT, QWEN3)
    assert _value(arguments, "--host") == "127.0.0.9"
    assert _value(arguments, "--port") == "8000"
    assert _value(arguments, "--served-model-name") == "policy"


def test_log_probs_are_of_the_sampled_distribution() -> None:
    arguments = build_arguments(_job(), ENVIRONMENT, QWEN3)
    assert _value(arguments, "--logprobs-mode") == "processed_logprobs"
    assert _value(arguments, "--generation-config") == "vllm"
    assert _value(arguments, "--seed") == "7"


def test_weights_are_loaded_by_rljobs_transfer_engine() -> None:
    arguments = build_arguments(_job(), ENVIRONMENT, QWEN3)
    assert json.loads(_value(arguments, "--weight-transfer-config")) == {"backend": "rljob-http"}
    assert _value(arguments, "--worker-extension-cls") == "rljob_trainer.rollout.engine.WorkerExtension"


def test_rollout_uses_the_trainers_dtype() -> None:
    assert _value(build_arguments(_job(dtype="float32"), ENVIRONMENT, QWEN3), "--dtype") == "float32"


def test_rollout_computes_logits_as_the_trainer_does() -> None:
    assert "--hf-overrides" not in build_arguments(_job(), ENVIRONMENT, QWEN3)
    arguments = build_arguments(_job(headDtype="float32"), ENVIRONMENT, QWEN3)
    assert json.loads(_value(arguments, "--hf-overrides")) == {"head_dtype": "float32"}


@pytest.mark.parametrize(("resolved", "expected"), [("/models/m", "/models/m"), ("hf://org/name", "org/name")])
def test_model_is_the_resolved_source(resolved: str, expected: str) -> None:
    arguments = build_arguments(_job(), ENVIRONMENT | {"RLJOB_MODEL": resolved}, QWEN3)
    assert arguments[:2] == ["--model", expected]
    assert "--revision" not in arguments


def test_revision_is_of_model_and_tokenizer() -> None:
    arguments = build_arguments(_job({"source": "hf://org/name", "revision": "v2"}), ENVIRONMENT, QWEN3)
    assert _value(arguments, "--revision") == _value(arguments, "--tokenizer-revision") == "v2"


def test_the_servers_own_prompts_are_those_of_the_job() -> None:
    model = {"source": "/models/m", "chatTemplate": {"inline": "{{ messages }}\n"}}
    arguments = build_arguments(_job(model, arguments={"enable_thinking": False}), ENVIRONMENT, QWEN3)
    assert _value(arguments, "--chat-template") == "{{ messages }}\n"
    assert json.loads(_value(arguments, "--default-chat-template-kwargs")) == {"enable_thinking": False}
    plain = build_arguments(_job(), ENVIRONMENT, QWEN3)
    assert not {"--chat-template", "--default-chat-template-kwargs"} & {*plain}


def test_cpu_replica_compiles_nothing_and_binds_no_threads() -> None:
    job = _job(rollout={"kvCacheMemory": "512Mi"})
    arguments = build_arguments(job, ENVIRONMENT, QWEN3)
    assert "--enforce-eager" in arguments
    assert "--no-enable-chunked-prefill" in arguments
    assert _value(arguments, "--kv-cache-memory-bytes") == str(1 << 29)
    assert "--tensor-parallel-size" not in arguments
    assert build_defaults(on_gpu=False)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert build_defaults(on_gpu=False)["TORCH_COMPILE_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("size", "chosen", "executor"), [(1, None, "UniProcExecutor"), (2, None, None), (1, "mp", "mp"), (2, "ray", "ray")]
)
def test_cpu_replica_has_one_process_unless_it_is_tensor_parallel(
    size: int, chosen: str | None, executor: str | None
) -> None:
    args = Namespace(distributed_executor_backend=chosen, tensor_parallel_size=size, pipeline_parallel_size=1)
    found = choose_cpu_executor(args)
    assert (found and found.rpartition(".")[2]) == executor


def test_gpu_replica_is_tensor_parallel_and_compiled() -> None:
    job = _job(rollout={"gpusPerReplica": 4, "gpuMemoryUtilization": 0.8})
    arguments = build_arguments(job, ENVIRONMENT, QWEN3)
    assert _value(arguments, "--tensor-parallel-size") == "4"
    assert _value(arguments, "--gpu-memory-utilization") == "0.8"
    assert "--enforce-eager" not in arguments
    assert "TORCH_COMPILE_DISABLE" not in build_defaults(on_gpu=True)


def test_extra_arguments_come_last() -> None:
    arguments = build_arguments(_job(rollout={"extraArgs": ["--seed", "1"], "maxModelLen": 2048}), ENVIRONMENT, QWEN3)
    assert arguments[-2:] == ["--seed", "1"]
    assert _value(arguments, "--max-model-len") == "2048"


@pytest.mark.parametrize(
    ("schedule", "chosen", "used"),
    [("onPolicy", "keep", "keep"), ("bounded", "recompute", "recompute"), ("oneStepOff", "keep", "finish")],
)
def test_one_step_off_changes_weights_between_completions(schedule: Any, chosen: Any, used: str) -> None:
    assert find_update_mode(schedule, chosen) == used


def test_unreadable_job_file_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_JOB_FILE", str(tmp_path / "no.yaml"))
    assert rollout_server.main() == ExitCode.USER


def test_missing_model_is_a_user_error_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(_job().to_manifest()))
    monkeypatch.setenv("RLJOB_JOB_FILE", str(file))
    monkeypatch.setenv("RLJOB_MODEL", str(tmp_path / "no"))
    monkeypatch.setattr(rollout_server, "_run", lambda *arguments: pytest.fail("vLLM must not start"))
    assert rollout_server.main() == ExitCode.USER
    assert f"spec.model.source: folder {tmp_path}/no not found" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "limit"), [(1, "1"), (2, "8"), (32, "32"), (100, "128"), (512, "512")])
def test_published_adapters_get_one_slot_of_a_rank_that_vllm_knows(rank: int, limit: str) -> None:
    job = _job()
    assert "--enable-lora" not in build_arguments(job, ENVIRONMENT, QWEN3)
    job.spec.trainer.lora = Lora(rank=rank, publish="merged")
    assert "--enable-lora" not in build_arguments(job, ENVIRONMENT, QWEN3), "merged weights need no adapter"
    job.spec.trainer.lora = Lora(rank=rank)
    assert "--enable-lora" not in build_arguments(job, ENVIRONMENT, WITHOUT_ADAPTERS), "vLLM supports none of it"
    arguments = build_arguments(job, ENVIRONMENT, QWEN3)
    assert "--enable-lora" in arguments
    assert (_value(arguments, "--max-loras"), _value(arguments, "--max-lora-rank")) == ("1", limit)


@pytest.mark.parametrize(("max_adapters", "slots"), [(1, "1"), (16, "8")])
def test_rollouts_of_a_service_have_a_slot_for_each_adapter_up_to_a_limit(max_adapters: int, slots: str) -> None:
    spec = {"model": {"source": "hf://o/m"}, "service": {"maxAdapters": max_adapters}}
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": spec})
    assert _value(build_arguments(job, ENVIRONMENT, QWEN3), "--max-loras") == slots


def test_checkpoint_is_read_only_if_pulls_do_not_replace_it() -> None:
    job = _job()
    assert _value(build_arguments(job, ENVIRONMENT, QWEN3), "--load-format") == "dummy"
    job.spec.trainer.lora = Lora(publish="merged")
    assert _value(build_arguments(job, ENVIRONMENT, QWEN3), "--load-format") == "dummy", "merged weights are whole"
    job.spec.trainer.lora = Lora()
    assert "--load-format" not in build_arguments(job, ENVIRONMENT, QWEN3)


def test_a_model_that_also_reads_images_is_served_without_their_tower() -> None:
    qwen35 = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    assert "--language-model-only" in build_arguments(_job(), ENVIRONMENT, qwen35)
    assert "--language-model-only" not in build_arguments(_job(), ENVIRONMENT, QWEN3)


def test_layers_with_a_state_have_no_cache_of_prefixes_on_cpus() -> None:
    hybrid = {"architectures": ["NemotronHForCausalLM"]}
    assert "--no-enable-prefix-caching" in build_arguments(_job(), ENVIRONMENT, hybrid)
    assert "--no-enable-prefix-caching" not in build_arguments(_job(), ENVIRONMENT, QWEN3)
    on_gpu = _job(rollout={"gpusPerReplica": 1})
    assert "--no-enable-prefix-caching" not in build_arguments(on_gpu, ENVIRONMENT, hybrid)


def test_replica_in_a_trainer_pod_can_sleep_and_has_a_port_of_its_own() -> None:
    environment = {**ENVIRONMENT, "RLJOB_ENGINE": "3"}
    arguments = build_arguments(_job(), environment, QWEN3)
    assert _value(arguments, "--port") == "8003"
    assert _value(arguments, "--worker-cls") == SLEEPING_CPU_WORKER
    on_gpu = build_arguments(_job(rollout={"gpusPerReplica": 1}), environment, QWEN3)
    assert "--enable-sleep-mode" in on_gpu
    assert "--worker-cls" not in on_gpu
    alone = build_arguments(_job(), ENVIRONMENT, QWEN3)
    assert not {"--worker-cls", "--enable-sleep-mode"} & {*alone}


def test_job_that_evaluates_loads_the_model_and_no_adapters() -> None:
    job = _job()
    job.spec.task, job.spec.trainer.lora = "evaluate", Lora()
    arguments = build_arguments(job, ENVIRONMENT, QWEN3)
    assert "--load-format" not in arguments
    assert "--enable-lora" not in arguments
