import pytest
from chaos.plan import IN_CI, LONG, QUICK, choose_faults, draw_plan
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


def test_names_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert set(IN_CI) <= {fault.name for fault in QUICK}


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("cut trainer-reward 10 min", 600), ("power-off reward", 60), ("freeze-api-server", 60), ("slow engine", 20)],
)
def test_outages_of_the_issue_are_drawn(name, seconds):
    drawn = {injection.fault.name: injection.fault for injection in draw_plan(3, len(FAULTS))}
    assert drawn[name].seconds == seconds


def test_what_is_waited_out_ends_by_itself_and_replaces_nothing():
    waited_out = [fault for fault in FAULTS if fault.is_waited_out]
    assert {fault.action for fault in waited_out} == {"slow", "cut", "fill-disk"}
    assert all(fault.seconds > 0 and not fault.is_replaced for fault in waited_out)


def test_faults_are_chosen_by_name() -> None:
    names = ["power-off reward", "cut trainer-reward 10 min"]
    assert [fault.name for fault in choose_faults(names)] == names
    assert {fault.name for fault in choose_faults([])} == {fault.name for fault in (*QUICK, *LONG)}
    with pytest.raises(ValueError, match=r"no fault is named power-off head; known: kill reward worker, "):
        choose_faults(["power-off head"])
