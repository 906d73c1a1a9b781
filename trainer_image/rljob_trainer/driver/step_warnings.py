"""What begins to go wrong in the steps, as warnings for the log. Pure.

mismatch   trainer and rollouts disagree on the probabilities of tokens. Each computes them with its own kernels and
           number formats, and under a bounded schedule with weights of another age. Importance weights correct that, as
           long as the difference is small. Invariant: one step alone is never a drift.
overlong   the punishment of long answers outweighs the rewards
merging    LoRA's adapters are merged into the weights, which lose what it trains

Each text has the numbers of its step: log it when the text before it was empty.
"""

from collections.abc import Sequence

from rljob_api.run.metrics import StepRecord
from rljob_inputs.models.config import MIN_MERGED_SHARE
from rljob_trainer.algorithms.base import Settings

NUM_STEPS = 3
"""Consecutive steps that must agree: the numbers of a single step are noisy."""
MAX_MISMATCH_KL = 0.01
"""Limit of the mean k3 estimate per token. At 0.01 the log-probs of a token differ by 0.14 (root mean square); in bf16,
with the same weights, their mean difference is 0.016 to 0.046 (make demo)."""
MIN_EFFECTIVE_SAMPLE_SHARE = 0.5
"""Below it, half of the tokens contribute nothing. verl's guide warns at 0.3, when a run already suffers."""
MAX_SHAPED_SHARE = 0.5
"""The quickstart with dapo begins at 0.67, and learned within 6 steps to answer with nothing: an answer that is too
long costs 1 there, and a wrong one 0."""


def judge_mismatch(history: Sequence[StepRecord]) -> str:
    """Return a warning for the log, or an empty text while all is well or unknown.

    `history`: the records of the last steps, newest last.
    """
    recent = history[-NUM_STEPS:]
    if len(recent) < NUM_STEPS:
        return ""
    problems = []
    kl = _all_known([record.mismatch_kl for record in recent])
    share = _all_known([record.effective_sample_share for record in recent])
    if min(kl, default=0.0) > MAX_MISMATCH_KL:
        problems.append(f"the mismatch KL is {kl[-1]:.3g} (expected: at most {MAX_MISMATCH_KL:g})")
    if max(share, default=1.0) < MIN_EFFECTIVE_SAMPLE_SHARE:
        problems.append(
            f"the effective sample share is {share[-1]:.2f} (expected: at least {MIN_EFFECTIVE_SAMPLE_SHARE:g})"
        )
    if not problems:
        return ""
    is_stale = any(record.staleness_max for record in recent)
    return (
        f"in steps {recent[0].step} to {recent[-1].step} the trainer and the rollouts disagreed about the "
        f"probabilities of tokens: {' and '.join(problems)}; {_STALE_REMEDY if is_stale else _EXACT_REMEDY}"
    )


_STALE_REMEDY = (
    "lower schedule.maxStaleness or algorithm.optimizer.learningRate, and keep algorithm.correction; see "
    "docs/monitoring.md#mismatch"
)
_EXACT_REMEDY = (
    "both had the same weights, and agreed on the fixed texts before the first step, so they differ where those do not "
    "reach: answers of more than 512 tokens (types of rope, windows), or tokens of low probability: set "
    "trainer.headDtype or trainer.dtype to float32, which apply to both; see docs/monitoring.md#mismatch"
)


def _all_known(values: Sequence[float | None]) -> list[float]:
    """Return the values; nothing if one of them is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def judge_overlong(record: StepRecord, settings: Settings) -> str:
    """Return a warning, or an empty text while all is well."""
    share = record.truncated_share
    if settings.truncated != "shape" or share is None or share <= MAX_SHAPED_SHARE:
        return ""
    return (
        f"in step {record.step} {share:.0%} of the answers reached rollout.sampling.maxTokens "
        f"({settings.max_tokens}), and each lost {settings.algorithm.truncated.penalty:g} of its score "
        "(algorithm.truncated): the model may learn to answer with nothing; raise rollout.sampling.maxTokens, lower "
        "algorithm.truncated.penalty, or set algorithm.truncated.answers to train or mask"
    )


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
