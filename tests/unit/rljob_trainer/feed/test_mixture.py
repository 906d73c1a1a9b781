"""Which source comes next: shares that are met by counting."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.feed.mixture import choose_source


@given(
    weights=st.lists(st.floats(0.01, 100) | st.integers(1, 20), min_size=1, max_size=8),
    count=st.integers(1, 300),
)
def test_no_source_is_a_prompt_ahead_of_its_share_or_far_behind(weights, count):
    drawn = [0] * len(weights)
    for number in range(1, count + 1):
        drawn[choose_source(weights, drawn)] += 1
        shares = [number * weight / sum(weights) for weight in weights]
        assert all(a - share < 1 + 1e-9 for a, share in zip(drawn, shares, strict=True)), (drawn, shares)
        assert all(share - a < max(1, len(weights) - 1) for a, share in zip(drawn, shares, strict=True))


def test_whole_weights_give_whole_rounds():
    drawn, order = [0, 0, 0], []
    for _ in range(12):
        order.append(choose_source([3, 2, 1], drawn))
        drawn[order[-1]] += 1
    assert order[:6] == order[6:]
    assert drawn == [6, 4, 2]
