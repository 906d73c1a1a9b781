"""The warning when merged weights lose what LoRA trains."""

import pytest

from rljob_trainer.driver.merging import judge_merging
from tests.support.records import step_record


def test_a_small_share_is_warned_of_with_the_step_and_the_fix():
    text = judge_merging(step_record(12, merged_share=0.055))
    assert "after step 12 the weights that rollouts sample from have 6% of the adapters' update" in text
    assert "trainer.lora.publish: adapter" in text


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
def test_most_of_the_update_or_nothing_merged_is_fine(share):
    assert not judge_merging(step_record(merged_share=share))
