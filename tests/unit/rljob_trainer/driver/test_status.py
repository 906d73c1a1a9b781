"""What the driver reports about itself."""

import math

import pytest

from rljob_trainer.driver.status import StatusBoard


@pytest.mark.parametrize("mean", [math.nan, math.inf])
def test_measurement_that_is_not_finite_is_reported_as_unknown(mean):
    board = StatusBoard()
    board.update(step=3, reward=mean)
    assert (board.status.step, board.status.reward) == (3, None)
