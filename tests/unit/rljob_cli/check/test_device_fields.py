"""GPUs of each role, dtype and model of a new job, by what the machine has."""

from __future__ import annotations

import pytest
import yaml

from rljob_cli.check.device_fields import (
    DEFAULT_MODEL,
    LARGER_MODELS,
    Devices,
    Roles,
    build_device_fields,
    choose_dtype,
    choose_model,
    describe_job,
    divide,
)
from tests.support.job_simulation import make_job

GIB = 2**30
LARGE, SMALL = LARGER_MODELS


@pytest.mark.parametrize(
    ("num_gpus", "has_judge", "roles"),
    [
        (1, False, Roles(1, 0, 0)),
        (2, False, Roles(1, 1, 0)),
        (3, False, Roles(1, 2, 0)),
        (4, False, Roles(2, 2, 0)),
        (8, False, Roles(4, 4, 0)),
        (16, False, Roles(8, 8, 0)),
        (1, True, Roles(1, 0, 0)),
        (2, True, Roles(1, 0, 1)),
        (3, True, Roles(1, 1, 1)),
        (8, True, Roles(2, 5, 1)),
    ],
)
def test_gpus_are_divided_among_the_roles(num_gpus, has_judge, roles):
    assert divide(num_gpus, has_judge) == roles
    assert sum(vars(roles).values()) == num_gpus


@pytest.mark.parametrize(("capability", "dtype"), [(None, "bfloat16"), (8.0, "bfloat16"), (7.5, "float16")])
def test_dtype_is_one_that_the_gpu_computes(capability, dtype):
    devices = Devices(1, capability=capability)
    assert choose_dtype(devices) == dtype
    assert f"dtype: {dtype}" in build_device_fields(devices, False)["trainer"]


@pytest.mark.parametrize(
    ("devices", "model"),
    [
        (Devices(), DEFAULT_MODEL),
        (Devices(1, memory_bytes=6 * GIB), DEFAULT_MODEL),
        (Devices(1, memory_bytes=16 * GIB), SMALL),
        (Devices(1), SMALL),  # taken as 16 GiB
        (Devices(1, memory_bytes=24 * GIB), SMALL),
        (Devices(1, memory_bytes=80 * GIB), LARGE),
    ],
)
def test_model_is_the_largest_that_fits_by_the_memory_plan(devices, model):
    def build(source):
        job = make_job(
            model={"source": source},
            trainer={"gpusPerReplica": 1},
            rollout={"gpusPerReplica": 1, "placement": "trainer", "maxModelLen": 1024, "sampling": {"maxTokens": 256}},
        )
        return yaml.safe_dump(job.model_dump(mode="json", by_alias=True, exclude_unset=True))

    assert choose_model(devices, build) == model


@pytest.mark.parametrize(
    ("devices", "found", "has_judge", "text"),
    [
        (Devices(), Devices(), False, "found no GPU; the job: all on CPUs, hf://m"),
        (Devices(0), Devices(2), True, "found 2 GPUs (unknown memory), asked for CPUs; the job: all on CPUs, hf://m"),
        (
            Devices(1, "NVIDIA L4", 22 * GIB, 8.9),
            Devices(1, "NVIDIA L4", 22 * GIB, 8.9),
            False,
            "found 1 GPU (NVIDIA L4, 22.0 GiB); the job: trainer and rollouts share 1 GPU, bfloat16, hf://m",
        ),
        (
            Devices(8),
            Devices(),
            True,
            "found no GPU, asked for 8 GPUs (unknown memory); the job: a trainer with 2 GPUs, 5 x 1 for rollouts, "
            "1 for the judge, bfloat16, hf://m",
        ),
    ],
)
def test_what_was_found_and_written_is_one_line(devices, found, has_judge, text):
    assert describe_job(devices, found, has_judge, "hf://m") == text
