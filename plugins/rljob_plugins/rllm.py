"""rLLM: reward_fn(task_info, action), which returns a RewardOutput."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value


def _read_task_info(sample: Sample) -> dict[str, Any]:
    truth = {"ground_truth": sample.get("ground_truth"), "data_source": values.read_data_source(sample)}
    return values.read_row(sample) | truth


SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "rllm",
            "reward_fn(task_info, action)",
            ("task_info", "action"),
            {"task_info": Value("task_info", _read_task_info), "action": values.COMPLETION},
            score_keys=("reward", "score"),
        ),
    )
)
