"""The memory plan against what it describes: the real policy on fake tensors, and the modules of transformers."""

from __future__ import annotations

import pytest
from memory_plan.cases import ALL_CASES, CASES, SHALLOW_CASES, Case

pytestmark = [pytest.mark.real, pytest.mark.slow]
MAX_ERROR = 0.1


# `make bench-plan` has all cases, also those of `make test-slow` with all layers.
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.nightly) for case in ALL_CASES] + list(SHALLOW_CASES),
    ids=lambda case: case.name,
)
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
