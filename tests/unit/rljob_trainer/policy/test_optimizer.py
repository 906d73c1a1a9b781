"""Which parameters decay. tests/process compares the steps with plain AdamW, on FSDP2 ranks."""

import pytest
import torch
from torch import nn

from rljob_api.manifest.algorithm import Optimizer
from rljob_trainer.policy.optimizer import build_optimizer, decays, keeping_settings


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.q_proj.weight", (2, 2), True),
        ("embed_tokens.weight", (5, 2), True),
        ("layers.0.q_proj.lora_A.default.weight", (1, 2), True),
        ("experts.gate_up_proj", (4, 2, 2), True),
        ("experts.gate_up_proj_bias", (4, 2), False),
        ("layers.0.q_proj.bias", (2,), False),
        ("norm.weight", (2,), False),
    ],
)
def test_matrices_decay_and_norms_and_biases_do_not(name, shape, expected):
    assert decays(name, nn.Parameter(torch.zeros(shape))) is expected


def test_without_a_gradient_a_step_shrinks_the_matrices_alone():
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, Optimizer(learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if name == "linear.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_optimizer_that_loads_a_state_keeps_the_settings_of_its_job():
    model = nn.Linear(2, 2)
    saved = build_optimizer(model, Optimizer(weight_decay=0.5, beta2=0.9)).state_dict()
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.1, beta2=0.99))
    with keeping_settings(optimizer):
        optimizer.load_state_dict(saved)
    assert [(group["weight_decay"], group["betas"][1]) for group in optimizer.param_groups] == [
        (0.1, 0.99),
        (0.0, 0.99),
    ]
