"""Compiled decoder layers: updates equal those without, and micro-batches of other shapes compile nothing new."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from policy_load.measure import build_job
from policy_load.rows import Load, build_rows
from policy_load.shapes import MODELS, write_model
from torch._dynamo.utils import counters

from rljob_trainer.episodes.types import UpdateVersions
from rljob_trainer.policy.policy import Policy
from tests.support.micro_batches import plan_micro_batches

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(MODELS["tiny"], folder)
    return str(folder)


def update(model, **trainer):
    """Return the weights after two updates, and the frames compiled after the first."""
    policy = Policy(build_job({"dtype": "float32", **trainer}), model, torch.device("cpu"))
    rows = build_rows(Load("mixed", 12, prompt_tokens=9, answer_tokens=60, group_size=1, vocabulary=512))
    compiled = 0
    for limit in (128, 100):  # micro-batches of different shapes
        options = {"num_ranks": 1, "micro_batch_tokens": limit, "layout": policy.layout}
        (batches,) = plan_micro_batches(rows, versions=UpdateVersions(0, 0, 1), **options)
        assert len({batch.token_ids.shape for batch in batches}) > 1
        policy.accumulate(batches)
        policy.apply(float(sum(row.loss_mask.sum() for row in rows)))
        compiled = compiled or counters["stats"]["unique_graphs"]
    return policy.gather_weights(), counters["stats"]["unique_graphs"] - compiled, compiled


@pytest.fixture(autouse=True)
def compilation():
    """Compile, also where a test of rollouts imported vLLM in this process, which switches compilation off on CPUs."""
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("attention", "checkpointing"), [("sdpa", "none"), ("packed", "selective"), ("packed", "full")]
)
def test_updates_with_compiled_layers_equal_those_without(model, attention, checkpointing):
    fields = {"attention": attention, "gradientCheckpointing": checkpointing}
    expected, *_ = update(model, **fields)
    torch._dynamo.reset()
    counters.clear()
    found, recompiled, compiled = update(model, compile="always", **fields)
    assert compiled > 0
    assert recompiled == 0, "the second update compiles nothing new"
    for name, weights in expected.items():
        np.testing.assert_allclose(found[name], weights, rtol=1e-4, atol=1e-6, err_msg=name)
