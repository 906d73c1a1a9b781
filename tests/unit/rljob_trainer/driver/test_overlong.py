"""When too many answers are cut off for the punishment of long ones."""

import pytest

from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.overlong import MAX_SHAPED_SHARE, judge_overlong
from tests.support.algorithms import algorithm_spec
from tests.support.records import step_record


def settings(**algorithm):
    return build_algorithm(algorithm_spec(**algorithm)).settings


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
    assert judge_overlong(step_record(truncated_share=share), settings(**algorithm)) == ""


def test_warning_names_the_numbers_and_the_fields():
    shaped = settings(type="dapo", max_tokens=12, truncated={"penalty": 0.5})
    found = judge_overlong(step_record(3, truncated_share=0.67), shaped)
    assert found.startswith("in step 3 67% of the answers reached rollout.sampling.maxTokens (12), and each lost 0.5 ")
    assert "algorithm.truncated.answers" in found
