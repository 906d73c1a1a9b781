"""Ray's object stores hold the rows of a step."""

from collections.abc import Sequence
from typing import Any

import pytest

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.object_store import head_store_bytes, trainer_store_bytes

MB = 1_000_000


TAUGHT = [{"name": name, "teacher": {"hint": "x", "topK": 5}, "use": "training"} for name in ("t", "u")]


def job_of(prompts: int, answer: int, replicas: int = 1, teachers: Sequence[Any] = ()) -> RLJob:
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}, "maxPromptTokens": 512},
        "rewards": [{"name": "r", "http": {"url": "http://r"}}, *teachers],
        "schedule": {"promptsPerStep": prompts},
        "algorithm": {"groupSize": 8},
        "trainer": {"replicas": replicas},
        "rollout": {"sampling": {"maxTokens": answer}},
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    return RLJob.model_validate(manifest)


@pytest.mark.parametrize(
    ("job", "context", "head", "trainer"),
    [
        (job_of(8, 64), None, 100 * MB, 100 * MB),
        # 512 rows of 4,608 tokens, 29 bytes each, in half of the store.
        (job_of(64, 4096), None, 2 * 512 * 4608 * 29, 2 * 512 * 4608 * 29),
        (job_of(64, 4096), 8192, 2 * 512 * 4608 * 29, 2 * 512 * 4608 * 29),
        (job_of(64, 4096), 4200, 2 * 512 * 4200 * 29, 2 * 512 * 4200 * 29),
        # With 8 bytes for each of 2 x 5 tokens that teachers find likeliest.
        (job_of(64, 4096, teachers=TAUGHT), None, 2 * 512 * 4608 * (29 + 80), 2 * 512 * 4608 * (29 + 80)),
        (job_of(1024, 8192, replicas=4), None, 2 * 8192 * 8704 * 29, 2 * 2048 * 8704 * 29),
    ],
)
def test_stores_hold_the_rows_of_a_step_twice(job, context, head, trainer):
    assert (head_store_bytes(job, context), trainer_store_bytes(job, context)) == (head, trainer)
