"""Compiled decoder layers: updates equal those without, and micro-batches of other shapes compile nothing new."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from policy_load.measure import build_job
from policy_load.rows import Load, build_rows
from policy_load.shapes import MODELS, write_model
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from rljob_inputs.models.config import LogitTransform
from rljob_trainer.episodes.types import UpdateVersions
from rljob_trainer.policy import selected_logprobs
from rljob_trainer.policy.compilation import CompiledLayers
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


@pytest.mark.parametrize(
    ("limit", "entropy_gradient", "shape"),
    [(None, False, (70,)), (None, True, (70,)), (30.0, False, (70,)), (30.0, True, (70,)), (None, False, (70, 5))],
)
def test_a_compiled_head_equals_the_loop_and_allocates_no_copy_of_a_block(limit, entropy_gradient, shape, monkeypatch):
    monkeypatch.setattr(selected_logprobs, "count_block_columns", lambda *_: 384)  # the last block has 232
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 32, requires_grad=True), torch.randn(1000, 32).mul_(0.2).requires_grad_()
    targets, transform = torch.randint(1000, shape), LogitTransform(0.5, limit=limit)
    factors = torch.randn(shape), torch.randn(70)

    def run(head):
        inputs = (hidden, weight, targets, 0.7, entropy_gradient, transform, head)
        logprobs, entropy = selected_logprobs.selected_logprobs(*inputs)
        loss = (factors[0] * logprobs).sum() + (factors[1] * entropy).sum()
        return logprobs, entropy, *torch.autograd.grad(loss, [hidden, weight])

    compiled = selected_logprobs.compile_arithmetic(CompiledLayers(is_required=True, name="head"))
    found, programs = run_and_get_code(run, selected_logprobs.Head(compiled=compiled))
    for ours, expected in zip(found, run(selected_logprobs.Head()), strict=True):
        torch.testing.assert_close(ours, expected, atol=3e-6, rtol=1e-6)
    shapes = re.findall(r"= empty_strided_cpu\(\(([^)]*)\)", "\n".join(programs))
    lengths = [[each for each in shape.split(", ") if each.strip(",") not in ("1", "")] for shape in shapes]
    assert lengths, "the programs allocate what they return"
    copies = [each for each in lengths if len(each) > 1]
    num_returned = len(shape) - 1  # of several tokens for each target, the log-probs
    assert (len(copies) > num_returned) is (limit is not None), "a value for each logit where tanh is kept"
