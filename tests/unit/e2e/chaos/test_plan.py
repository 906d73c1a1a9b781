from chaos.plan import IN_CI, LONG, QUICK, draw_plan
from hypothesis import given
from hypothesis import strategies as st

FAULTS = (*QUICK, *LONG)


@given(seed=st.integers(0, 10_000), number=st.integers(0, 80))
def test_each_fault_comes_before_any_comes_again(seed, number):
    plan = draw_plan(seed, number)
    assert len(plan) == number
    assert plan == draw_plan(seed, number)
    for start in range(0, number, len(FAULTS)):
        part = [injection.fault for injection in plan[start : start + len(FAULTS)]]
        assert len(set(part)) == len(part)


def test_names_are_unique_but_for_the_time_of_a_cut():
    assert len({(fault.name, fault.seconds) for fault in FAULTS}) == len(FAULTS)
    assert set(IN_CI) <= {fault.name for fault in QUICK}
