"""Errors of libraries as they were raised: who can fix them, and the line that says what is wrong."""

import pytest

from rljob_trainer.failures.configuration import ErrorFacts, is_configuration_error, summarize


class SafetensorError(Exception):
    """As the one of safetensors, which is a bare Exception."""


class LocalEntryNotFoundError(FileNotFoundError, ValueError):
    """As the one of huggingface_hub: the network failed and the cache has no file."""


VALIDATION = """1 validation error for ModelConfig
  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len [type=value_error, \
input_value=ArgsKwargs((), {'model': 'x'}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error"""
FIELD_VALIDATION = """2 validation errors for ParallelConfig
tensor_parallel_size
  Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]
other
  Field required [type=missing, input_value={}, input_type=dict]"""

CASES = [
    (ValueError(VALIDATION), True, "User-specified max_model_len (99999) is greater than the derived max_model_len"),
    (ValueError(FIELD_VALIDATION), True, "Input should be greater than 0"),
    (SafetensorError("Error while deserializing header"), True, "SafetensorError: Error while deserializing header"),
    (ValueError("No available memory for the cache blocks.\nmore"), True, "No available memory for the cache blocks."),
    (KeyError("Qwen9"), True, "KeyError: 'Qwen9'"),
    (OSError("x does not appear to have a file named config.json"), True, "x does not appear to have a file named"),
    (RuntimeError("The size of tensor a (256) must match the size of tensor b (128)"), True, "The size of tensor a"),
    (AssertionError(), True, "AssertionError"),
    (ValueError("Free memory on device (1/80 GiB) on startup is less than desired GPU memory"), False, "Free memory"),
    (LocalEntryNotFoundError("offline"), False, "LocalEntryNotFoundError: offline"),
    (OSError("We couldn't connect to 'https://huggingface.co'"), False, "We couldn't connect"),
    (ConnectionResetError("reset"), False, "ConnectionResetError: reset"),
    (OSError(28, "No space left on device"), False, "[Errno 28] No space left on device"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False, "CUDA error"),
    (RuntimeError("something new"), False, "something new"),
    (ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("the first")]), True, "the first"),
    (RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"), True, '"addmm_impl_cpu_" not implemented'),
]


@pytest.mark.parametrize(("error", "expected", "line"), CASES, ids=[line for *_, line in CASES])
def test_error_is_classified_and_has_one_line(error, expected, line):
    facts = ErrorFacts.from_json(ErrorFacts.of(error).to_json())  # as from another process
    assert is_configuration_error(facts) is expected
    assert summarize(facts).startswith(line)
    assert "\n" not in summarize(facts)
    assert "[type=" not in summarize(facts)
