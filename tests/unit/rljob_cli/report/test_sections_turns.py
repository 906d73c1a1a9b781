"""The turns of trainer and rollouts on shared devices."""

from rljob_cli.report.sections import SideOfTurns, build_sides
from tests.support.records import step_record

GIB = 2**30


def test_sides_have_the_most_memory_and_the_mean_time():
    steps = [
        step_record(
            device_bytes={"rollouts_awake": 40 * GIB, "rollouts_asleep": GIB, "trainer_update": number * GIB},
            turn_seconds={"sleep": 0.5, "wake": 2.0 * number, "free": 1.0},
        )
        for number in (1, 2)
    ]
    assert build_sides([*steps, step_record()]) == [
        SideOfTurns("rollouts", "40.0 GiB", "1.0 GiB", 0.5, 3.0),
        SideOfTurns("trainer", "2.0 GiB", "-", 1.0, None),
    ]


def test_separate_devices_have_no_turns():
    assert build_sides([step_record()]) == []


def test_models_that_share_are_a_side_of_their_own():
    step = step_record(device_bytes={"rollouts_awake": GIB, "models_awake": 2 * GIB, "models_asleep": GIB})
    assert [(side.role, side.working, side.waiting) for side in build_sides([step])] == [
        ("rollouts", "1.0 GiB", "-"),
        ("models", "2.0 GiB", "1.0 GiB"),
        ("trainer", "-", "-"),
    ]
