"""What the backward pass computes again changes neither log-probs nor gradients, compiled or not."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.micro_batches import plan_micro_batches
from tests.support.policy_scenarios import FIRST, PLAIN, Scenarios, build_rows, capture_gradients
from tests.support.tiny_models import MODELS, write_model

KINDS = {
    "dense": "Qwen3ForCausalLM",
    "mixture": "Qwen3MoeForCausalLM",
    "hybrid": "Qwen3NextForCausalLM",
    "products that are changed in place": "GptOssForCausalLM",
}
LORA = {"rank": 4, "alpha": 6}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for kind, name in KINDS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        write_model(name, found[kind] / "model")
    return found


class Products(TorchDispatchMode):
    """Counts matrix products that are computed, and not those that a checkpoint kept."""

    def __init__(self):
        super().__init__()
        self.number = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True  # else nothing is compiled within it

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator.name() in PRODUCTS
        return operator(*args, **(kwargs or {}))


def train(folder, **trainer):
    """Return log-probs, gradients and the matrix products of the backward passes of an update."""
    policy, logprobs = Scenarios(0, 1, folder).policy(PLAIN, **trainer), []
    options = {"num_ranks": 1, "micro_batch_tokens": 4096, "layout": policy.layout, "versions": FIRST}
    (batches,) = plan_micro_batches(build_rows(), **options)
    policy.model.register_forward_hook(lambda model, inputs, outputs: logprobs.append(outputs[0].detach()))
    gradients, products, backward = capture_gradients(policy), Products(), torch.Tensor.backward

    def count(tensor):
        with products:
            backward(tensor)

    with mock.patch.object(torch.Tensor, "backward", count):
        policy.accumulate(batches)
    policy.apply(100.0)
    return torch.cat(logprobs), gradients[0], products.number


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in KINDS), ("dense", {"lora": LORA}), ("dense", {"attention": "packed"})],
    ids=[*KINDS, "adapters", "packed"],
)
def test_an_update_is_the_same_whatever_is_computed_again(folders, kind, settings):
    folder = folders[kind]
    none, selective, full = (
        train(folder, gradient_checkpointing=choice, **settings) for choice in ("none", "selective", "full")
    )
    assert_same(selective, none)
    assert_same(full, none)
    if kind in ("dense", "mixture", "hybrid") and "lora" not in settings:  # an adapter's products are cheap
        assert selective[2] == none[2], "selective computes no matrix product again"
    assert full[2] > selective[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_computes_the_same_with_selective(name, tmp_path):
    write_model(name, tmp_path / "model")
    none, selective = (train(tmp_path, gradient_checkpointing=choice) for choice in ("none", "selective"))
    assert_same(selective, none)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), [("dense", "selective"), ("mixture", "none"), ("mixture", "full")])
def test_compiled_layers_compute_the_same(folders, kind, choice):
    expected = train(folders[kind])
    torch._dynamo.reset()
    backend = "aot_eager_decomp_partition"  # the compiler's choice of what to keep, and no code of its own
    with (
        mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)),
        torch._dynamo.config.patch(disable=False),
    ):
        found = train(folders[kind], gradient_checkpointing=choice, compile="always")
    assert_same(found, expected)
