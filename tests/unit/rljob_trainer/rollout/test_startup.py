"""Why vLLM cannot start: the cause in a child process, and the field of the job to change."""

import logging
import logging.config

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_trainer.failures.configuration import ErrorFacts
from rljob_trainer.failures.devices import GpuFaultError
from rljob_trainer.rollout.startup import StartupFields, explain, install_recorder, startup_errors


@pytest.fixture(autouse=True)
def _restore_factory():
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


def fields(*, on_gpu=False, shares_trainer=False):
    return StartupFields.of_rollout(on_gpu=on_gpu, shares_trainer=shares_trainer)


def fail_in_child(error, text="EngineCore failed to start."):
    """Do what vLLM does: log the cause in a child, and raise another error in the parent."""
    try:
        raise error
    except Exception:
        logging.getLogger("vllm.v1.engine.core").exception(text)


def start(*in_child, parent=None, between=lambda: None, text="EngineCore failed to start."):
    """Start an engine whose child fails with `in_child`, one after the other, and then the parent."""
    with startup_errors(fields()):
        between()
        for error in in_child:
            fail_in_child(error, text)
        raise parent or RuntimeError("Engine core initialization failed. See root cause above.")


def test_cause_in_a_child_process_is_reported_with_its_field():
    with pytest.raises(UserError, match=r"^spec\.rollout\.maxModelLen: vLLM does not start: the max seq len"):
        start(ValueError("the max seq len (1) is larger"), RuntimeError("a symptom"))


def test_recorder_survives_a_new_configuration_of_the_log():
    install_recorder()
    install_recorder()
    config = {"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"propagate": False}}}
    with pytest.raises(UserError, match="the cause"):
        start(ValueError("the cause"), between=lambda: logging.config.dictConfig(config))


def test_exceptions_that_a_child_survives_are_not_the_cause():
    with pytest.raises(UserError, match="the real one"):
        start(ValueError("harmless"), parent=ValueError("the real one"), text="could not load an optional kernel")


def test_engine_that_dies_at_its_first_request_has_the_cause_of_its_process():
    cause = RuntimeError("could not create a primitive descriptor for bf16")
    with pytest.raises(UserError, match=r"^spec\.trainer\.dtype: vLLM does not start: could not create a primitive"):
        start(cause, parent=RuntimeError("EngineDeadError"), text="EngineCore encountered a fatal error.")


def test_infrastructure_error_is_retried():
    with pytest.raises(TransientError, match="vLLM did not start: no answer"):
        start(parent=RuntimeError("no answer"))


def test_own_errors_pass():
    with pytest.raises(UserError, match=r"^mine$"):
        start(parent=UserError("mine"))


@pytest.mark.parametrize(
    ("message", "on_gpu", "field"),
    [
        ("needs 2 GiB KV cache, max seq len 9", False, "spec.rollout.kvCacheMemory"),
        ("No available memory for the cache blocks", True, "spec.rollout.gpuMemoryUtilization"),
        ("Bfloat16 is only supported on GPUs with ...", False, "spec.trainer.dtype"),
        ("Total number of attention heads (9) must be", True, "spec.rollout.gpusPerReplica"),
        ("no file named model.safetensors", False, "spec.model.source"),
        ("who knows", False, "spec.model.source"),
    ],
)
def test_message_names_the_field(message, on_gpu, field):
    assert str(explain(ErrorFacts.of(ValueError(message)), fields(on_gpu=on_gpu))).startswith(f"{field}: ")


def test_message_of_a_sidecar_names_the_field_of_its_model():
    error = ErrorFacts.of(ValueError("needs 2 GiB KV cache"))
    on_cpu, on_gpu = (explain(error, StartupFields.of_served_model(on_gpu=on_gpu)) for on_gpu in (False, True))
    assert str(on_cpu).startswith("model.kvCacheMemory: ")
    assert str(on_gpu).startswith("model.gpuMemoryUtilization: ")


ECC = "Worker failed with error 'CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...'"


def test_broken_gpu_is_a_fault_of_the_node_whatever_the_parent_raises():
    parents = RuntimeError("Engine core initialization failed"), TransientError("the rollout replica failed: dead")
    for parent in parents:
        with pytest.raises(
            GpuFaultError, match=r"^GPU fault: vLLM: Worker failed with error 'CUDA error: uncorrectable"
        ):
            start(RuntimeError(ECC), parent=parent)


def test_broken_gpu_of_an_engine_that_served_is_found_though_the_server_just_ends():
    with pytest.raises(GpuFaultError), startup_errors(fields()):
        fail_in_child(RuntimeError(ECC), "EngineCore encountered a fatal error.")


@pytest.mark.parametrize(("is_warm", "kind"), [(False, UserError), (True, TransientError)])
def test_error_of_an_engine_that_has_answered_is_not_one_of_the_configuration(is_warm, kind):
    with pytest.raises(kind, match="the max seq len"), startup_errors(fields(), "the replica", lambda: is_warm):
        raise ValueError("the max seq len (1) is larger")


def test_other_failure_of_an_engine_that_served_raises_nothing():
    with startup_errors(fields()):
        fail_in_child(
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            "EngineCore encountered a fatal error.",
        )
