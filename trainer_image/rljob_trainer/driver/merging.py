"""Whether rollouts sample from what LoRA trains, where its adapters are merged into the weights. Pure."""

from __future__ import annotations

from rljob_api.run.metrics import StepRecord
from rljob_inputs.models.adapters import MIN_MERGED_SHARE


def judge_merging(record: StepRecord) -> str:
    """Return a warning for the log, or an empty text while all is well or nothing is merged."""
    share = record.merged_share
    if share is None or share >= MIN_MERGED_SHARE:
        return ""
    return (
        f"after step {record.step} the weights that rollouts sample from have {share:.0%} of the adapters' update; "
        f"{describe_loss()}"
    )


def describe_loss() -> str:
    return (
        "the rest is rounded away where they are merged: set trainer.lora.publish: adapter if vLLM supports adapters "
        "of this model, or trainer.dtype: float32, or train without trainer.lora"
    )
