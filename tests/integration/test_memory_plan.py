"""The memory plan against what it describes: the real policy on fake tensors, and the modules of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from memory_plan.cases import ACCELERATOR_CASES, CASES, MORE_CASES, Case

pytestmark = [pytest.mark.real, pytest.mark.slow]
MAX_ERROR = 0.1


EACH_PART = (
    "0.135B on 4, 2k tokens",
    "0.135B on 4, 2k tokens, LoRA",
    "0.135B on 4, 4k tokens, fp32 head",
    "0.135B on 4, 8k tokens, limited logits",
    "0.135B on 4, 2k tokens, KL, ppo, offload: all",
)
"""Cheap cases that together have every part. `make bench-plan` has all."""


def _mark(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[] if case.name in EACH_PART else [pytest.mark.nightly])


@pytest.mark.parametrize("case", [_mark(case) for case in CASES + MORE_CASES + ACCELERATOR_CASES])
def test_every_part_is_within_ten_percent_of_the_memory_tracker(case: Case) -> None:
    from plan import compare

    found = compare(case)
    assert found["error"] < MAX_ERROR, found


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:4], ids=lambda case: case.name)
def test_parameters_are_those_of_the_module(case: Case) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.config))
    assert case.build_work().shape.num_parameters == sum(p.numel() for p in network.parameters())
