"""EasyR1: compute_score of an input, or of predictions in its versions before."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value


def _read_input(sample: Sample) -> dict[str, Any]:
    extra = values.read_extra_info(sample)
    length = extra["num_tokens"] if "num_tokens" in extra else len(values.read_completion_ids(sample))
    own = {"response": sample["completion"], "response_length": length, "ground_truth": sample.get("ground_truth")}
    return extra | own


_INPUT: Final = Value("reward_input", _read_input)
"""response, response_length, ground_truth, and the other columns."""


def _entry(form: str, marker: str, arguments: dict[str, Value], *, lists: bool) -> Convention:
    keys = ("overall", "score")
    return Convention("easyr1", form, (marker,), arguments, lists=lists, score_keys=keys, whole=True)


SIGNATURE: Final = SignaturePlugin(
    conventions=(
        _entry("compute_score(reward_inputs)", "reward_inputs", {"reward_inputs": _INPUT}, lists=True),
        _entry("compute_score(reward_input)", "reward_input", {"reward_input": _INPUT}, lists=False),
        _entry(
            "compute_score(predicts, ground_truths)",
            "predicts",
            {"predicts": values.COMPLETION, "ground_truths": values.GROUND_TRUTH},
            lists=True,
        ),
        _entry(
            "compute_score(predict_str, ground_truth)",
            "predict_str",
            {"predict_str": values.COMPLETION, "ground_truth": values.GROUND_TRUTH},
            lists=False,
        ),
    )
)
