"""When too many answers are cut off for the punishment of long ones."""

import pytest

from rljob_trainer.driver.overlong import MAX_SHAPED_SHARE, judge_overlong
from tests.support.algorithms import algorithm_spec


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        ({"type": "dapo"}, MAX_SHAPED_SHARE),
        ({"type": "dapo"}, None),
        ({"type": "dapo", "truncated": {"answers": "mask"}}, 1.0),
        ({"type": "grpo"}, 1.0),
    ],
)
def test_few_cut_answers_or_no_punishment_give_no_warning(algorithm, share):
    assert judge_overlong({"step": 1, "truncated_share": share}, algorithm_spec(**algorithm)) == ""


def test_warning_names_the_numbers_and_the_fields():
    spec = algorithm_spec(type="dapo", max_tokens=12, truncated={"penalty": 0.5})
    found = judge_overlong({"step": 3, "truncated_share": 0.67}, spec)
    assert found.startswith("in step 3 67% of the answers reached rollout.sampling.maxTokens (12), and each lost 0.5 ")
    assert "algorithm.truncated.answers" in found
