"""Which step is the best one by spec.evaluation.best. Pure.

Invariant: only evaluations of the set that decides count, and of equal steps the first one stays.
"""

from collections.abc import Iterable

from rljob_api.manifest import evaluation as manifest
from rljob_api.run.metrics import EvaluationRecord
from rljob_api.run.summaries import BestStep


def choose_best(
    before: BestStep | None, wanted: manifest.BestStep | None, records: Iterable[EvaluationRecord]
) -> BestStep | None:
    """Return the best step after the evaluations `records`. `before`: the one until then, which does not count if
    something else decides now."""
    if wanted is None:
        return None
    best = before if before is not None and (before.set, before.metric) == (wanted.set, wanted.metric) else None
    for record in records:
        found = _read(record, wanted) if record.set == wanted.set else None
        if found is not None and (best is None or found.value > best.value):
            best = found
    return best


def describe_unknown(wanted: manifest.BestStep | None, records: Iterable[EvaluationRecord]) -> str:
    """Return why a step that the set has evaluated cannot be the best one; empty if it can."""
    unknown = [r for r in records if wanted is not None and r.set == wanted.set and _read(r, wanted) is None]
    if wanted is None or not unknown:
        return ""
    remedy = "; let a reward of the set return pred, the answer that it reads" * (wanted.metric == "majority")
    return f"spec.evaluation.best: step {unknown[-1].step} has no {wanted.metric} of {wanted.set}{remedy}"


def _read(record: EvaluationRecord, wanted: manifest.BestStep) -> BestStep | None:
    """Return the number of a record's step; None if it is unknown."""
    if wanted.metric.startswith("pass@"):
        k = int(wanted.metric.removeprefix("pass@"))
        value, low, high = record.pass_at.get(k), record.pass_at_low.get(k), record.pass_at_high.get(k)
    elif wanted.metric == "majority":
        value, low, high = record.majority, record.majority_low, record.majority_high
    else:
        value, low, high = record.accuracy, record.accuracy_low, record.accuracy_high
    if value is None:
        return None
    return BestStep(set=record.set, metric=wanted.metric, value=value, low=low, high=high, step=record.step)
