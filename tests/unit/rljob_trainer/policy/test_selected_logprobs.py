"""The fused head, compared with torch's log_softmax."""

import pytest
import torch

from rljob_trainer.policy import selected_logprobs as module


@pytest.fixture(params=["kept", "recomputed"])
def memory(request, monkeypatch):
    """Both variants of the backward pass; the second with chunks of 3 targets and blocks of 2."""
    if request.param == "recomputed":
        monkeypatch.setattr(module, "KEPT_LOGITS_BYTES", 3 * 50 * 8)
        monkeypatch.setattr(module, "BLOCK_ROWS", 2)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.usefixtures("memory")
def test_values_and_gradients_equal_log_softmax(entropy_gradient):
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (10,))
    factors = torch.randn(2, 10)

    logprobs, entropy = module.selected_logprobs(hidden, weight, targets, 0.7, entropy_gradient)
    loss = (factors[0] * logprobs).sum()
    if entropy_gradient:
        loss = loss + (factors[1] * entropy).sum()
    loss.backward()
    ours = hidden.grad, weight.grad

    hidden.grad = weight.grad = None
    all_logprobs = torch.log_softmax(hidden @ weight.T / 0.7, dim=-1)
    plain_entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    plain = all_logprobs.gather(1, targets[:, None]).squeeze(1)
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


@pytest.mark.usefixtures("memory")
def test_head_without_gradient_gives_the_same_gradient_of_the_hidden_states():
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    gradients = []
    for head in (weight, weight.detach()):
        logprobs, _ = module.selected_logprobs(hidden, head, torch.arange(10), 1.0)
        gradients.append(torch.autograd.grad(logprobs.sum(), hidden)[0])
    assert torch.equal(*gradients)
