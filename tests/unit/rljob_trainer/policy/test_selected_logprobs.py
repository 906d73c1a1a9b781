"""The fused head, compared with torch's log_softmax."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_inputs.models.config import LogitTransform
from rljob_trainer.policy import selected_logprobs as module


@pytest.fixture(params=["one block", "kept blocks", "recomputed blocks"])
def kept_bytes(request, monkeypatch):
    """The variants of the backward pass; the blocks have 16 of 50 columns, and their arithmetic 3 of 10 targets."""
    if request.param != "one block":
        monkeypatch.setattr(module, "count_block_columns", lambda *_: 16)
        monkeypatch.setattr(module, "count_block_rows", lambda *_, **__: 3)
    return 0 if request.param == "recomputed blocks" else 1 << 20


@pytest.mark.parametrize("shape", [(10,), (10, 4)])
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 1.5, 10)])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25), LogitTransform(3.0, limit=1.5)])
def test_values_and_gradients_equal_log_softmax(entropy_gradient, transform, kept_bytes, temperature, shape):
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, shape)
    if targets.dim() == 2:
        targets[:, 1] = targets[:, 0]  # what was sampled is often what a teacher finds likeliest
    factors = torch.randn(shape), torch.randn(10)

    logprobs, entropy = module.selected_logprobs(
        hidden, weight, targets, temperature, entropy_gradient, transform, module.Head(kept_bytes=kept_bytes)
    )
    loss = (factors[0] * logprobs).sum()
    if entropy_gradient:
        loss = loss + (factors[1] * entropy).sum()
    loss.backward()
    ours = hidden.grad, weight.grad

    hidden.grad = weight.grad = None
    logits = transform.factor * (hidden @ weight.T)
    if transform.limit is not None:
        logits = transform.limit * torch.tanh(logits / transform.limit)
    all_logprobs = torch.log_softmax(logits / torch.as_tensor(temperature).reshape(-1, 1), dim=-1)
    plain_entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    plain = all_logprobs.gather(1, targets.reshape(10, -1)).view(shape)
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(entropy, plain_entropy)
    loss = (factors[0] * plain).sum()
    if entropy_gradient:
        loss = loss + (factors[1] * plain_entropy).sum()
    loss.backward()
    torch.testing.assert_close(ours[0], hidden.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours[1], weight.grad, atol=1e-5, rtol=1e-4)


def test_entropy_has_no_gradient_by_default():
    hidden = torch.randn(2, 4, requires_grad=True)
    _, entropy = module.selected_logprobs(hidden, torch.randn(5, 4), torch.tensor([0, 1]), 1.0)
    assert not entropy.requires_grad


def test_head_without_gradient_gives_the_same_gradient_of_the_hidden_states(kept_bytes):
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    gradients = []
    for head in (weight, weight.detach()):
        how = module.Head(kept_bytes=kept_bytes)
        logprobs, _ = module.selected_logprobs(hidden, head, torch.arange(10), 1.0, head=how)
        gradients.append(torch.autograd.grad(logprobs.sum(), hidden)[0])
    assert torch.equal(*gradients)


def bf16_inputs():
    """Logits of up to 100, where neighbours in bf16 are 0.5 apart."""
    torch.manual_seed(0)
    hidden = torch.randn(10, 64).mul(4).bfloat16().requires_grad_()
    weight = torch.randn(50, 64).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(50, (10,))


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, limit=30.0)])
def test_logits_in_fp32_are_not_rounded_to_the_dtype_of_the_weights(transform, kept_bytes, monkeypatch):
    monkeypatch.setattr(module, "HEAD_BLOCK_ROWS", 7)
    hidden, weight, targets = bf16_inputs()
    logits = transform.factor * (hidden.double() @ weight.double().T)
    if transform.limit is not None:
        logits = transform.limit * torch.tanh(logits / transform.limit)
    exact = torch.log_softmax(logits / 0.7, dim=-1)
    exact_entropy = -(exact.exp() * exact).sum(dim=-1)
    chosen = exact.gather(1, targets[:, None]).squeeze(1)
    rounded, _ = module.selected_logprobs(hidden, weight, targets, 0.7, False, transform)
    assert (rounded - chosen).abs().max() > 0.02
    head = module.Head(torch.float32, kept_bytes=kept_bytes)
    logprobs, entropy = module.selected_logprobs(hidden, weight, targets, 0.7, False, transform, head)
    assert (logprobs - chosen).abs().max() < 1e-4
    assert (entropy - exact_entropy).abs().max() < 1e-3
    for ours, expected in zip(
        torch.autograd.grad(logprobs.sum(), [hidden, weight]),
        torch.autograd.grad(chosen.sum(), [hidden, weight]),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours - expected).norm() < 0.01 * expected.norm(), "they are rounded, but no worse"


class LargestCopy(TorchDispatchMode):
    """Records how many numbers are converted at once."""

    num_values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.num_values = max(self.num_values, result.numel())
        return result


def test_weights_are_converted_in_blocks(monkeypatch):
    monkeypatch.setattr(module, "HEAD_BLOCK_ROWS", 5)
    hidden, weight, targets = bf16_inputs()
    with LargestCopy() as copies:
        module.selected_logprobs(hidden.detach(), weight.detach(), targets, 1.0, head=module.Head(torch.float32))
    assert copies.num_values == hidden.numel(), "5 rows of the head are fewer than the hidden states"


def test_a_micro_batch_without_targets_has_gradients_of_zero():
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    logprobs, entropy = module.selected_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0)
    logprobs.sum().backward()
    assert (len(logprobs), len(entropy), hidden.grad.shape) == (0, 0, (0, 8))
    assert not weight.grad.any()


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write. Views do neither."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket is not torch.ops.aten.empty:
            tensors = [*args, *(kwargs or {}).values(), *(result if isinstance(result, tuple) else [result])]
            self.num_bytes += sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        return result


@pytest.mark.parametrize(("keeps", "limit"), [(False, 2.9e6), (True, 2.5e6)])
def test_little_is_read_and_written_for_a_target(keeps, limit):
    """Bytes, of Qwen2.5-0.5B, where the arithmetic is compiled: it then reads and writes each logit once, as another
    test shows (tests/process/rljob_trainer/policy/test_compilation.py)."""

    def reduce(logits, *_):
        traffic.num_bytes += logits.nbytes
        chosen, *others = logits.new_empty(3, len(logits), dtype=torch.float32)
        return chosen[:, None], *others

    def differentiate(logits, *_):
        traffic.num_bytes += 2 * logits.nbytes

    num_targets = 14336
    hidden = torch.empty(num_targets, 896, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(151936, 896, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(num_targets, dtype=torch.int64, device="meta")
    head = module.Head(compiled=module.Arithmetic(reduce, differentiate), kept_bytes=keeps * (1 << 40))
    with Traffic() as traffic:
        logprobs, _ = module.selected_logprobs(hidden, weight, targets, 0.7, head=head)
        logprobs.backward(torch.empty_like(logprobs))
    assert traffic.num_bytes / num_targets < limit


def test_further_tokens_change_nothing_for_the_target(kept_bytes):
    torch.manual_seed(0)
    hidden, weight, factors = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8), torch.randn(10)
    targets, found = torch.randint(50, (10, 4)), []
    for each in (targets[:, 0], targets[:, :1], targets):
        logprobs, entropy = module.selected_logprobs(hidden, weight, each, 0.7, head=module.Head(kept_bytes=kept_bytes))
        own = logprobs.view(10, -1)[:, 0]
        found.append((own, entropy, *torch.autograd.grad((factors * own).sum(), hidden)))
    for values in zip(*found, strict=True):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])
