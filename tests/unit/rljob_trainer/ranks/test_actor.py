"""The number of threads of a CPU rank."""

import pytest

from rljob_trainer.ranks.actor import choose_num_threads


@pytest.mark.parametrize(
    ("num_cores", "num_local_ranks", "requested", "expected"), [(8, 2, None, 4), (2, 4, None, 1), (2, 4, "3", 3)]
)
def test_ranks_share_the_cores_unless_the_user_sets_a_number(num_cores, num_local_ranks, requested, expected):
    assert choose_num_threads(num_cores, num_local_ranks, requested) == expected
