"""The curves of a run."""

import math

import pytest

from rljob_cli.run.curves import build_panels, invalid_share, lay_over
from tests.support.records import evaluation_record, metrics_of, step_record

METRICS = metrics_of(
    evaluation_record(0, 0.25, means={"score": 0.1, "exact": 0.25}),
    *(
        step_record(
            number,
            reward=0.1 * number,
            components={"score": 0.1 * number, "exact": 0.05 * number, "length": 40.0 + number},
            rewards={"correct": 0.1, "style": 0.2},
            num_samples=8,
            num_invalid=4,
            response_tokens_mean=10.0,
            response_tokens_max=16,
            truncated_share=0.5,
            zero_signal_share=0.0,
            kl=None,
            entropy=1.5,
            logprob_difference=0.02,
            mismatch_kl=0.001 * number,
            corrected_share=0.01,
            effective_sample_share=0.9,
            staleness_mean=0.5,
            staleness_max=number - 1,
            busy_shares={"rollouts": 0.9, "rewards": 0.5, "trainer": 0.3} if number > 1 else {},
            grad_norm=1.0,
            tokens_per_second=300.0,
            reward_latency_p50_seconds=0.1,
            reward_latency_p95_seconds=0.2,
            phase_seconds={"generate": 2.0, "update": 1.0} | ({"evaluate": 0.5} if number == 1 else {}),
        )
        for number in (1, 2, 3)
    ),
)


@pytest.fixture
def panels():
    return {panel.title: panel for panel in build_panels(METRICS)}


def test_panels_cover_what_a_run_is_judged_by(panels):
    assert list(panels) == [
        "Reward",
        "Held-out accuracy",
        "Component: exact",
        "Component: length",
        "Completion length",
        "Shares",
        "Entropy",
        "Rollout-trainer mismatch",
        "Mismatch KL",
        "Importance weights",
        "Staleness",
        "Gradient norm",
        "Throughput",
        "Reward latency",
        "Seconds per step, by phase",
        "Roles at work",
    ]


def test_component_is_drawn_in_training_and_held_out(panels):
    training, held_out = panels["Component: exact"].curves
    assert training.points == ((1, 0.05), (2, 0.1), (3, pytest.approx(0.15)))
    assert (held_out.points, held_out.is_held_out) == (((0, 0.25),), True)


def test_shares_of_turns_by_prefix_are_drawn_where_turns_are_known():
    metrics = metrics_of(step_record(1), step_record(2, turns_by_prefix={"hit": 3, "new": 1}))
    [panel] = [each for each in build_panels(metrics) if each.title == "Prompts in prefix caches"]
    assert {curve.name: curve.points for curve in panel.curves} == {"hit": ((2, 0.75),), "spilled": ((2, 0.0),)}


def test_unknown_values_have_no_point(panels):
    assert "KL to the reference" not in panels, "null at every step: no reference was loaded"
    [panel] = build_panels(metrics_of(*(step_record(i, reward=x) for i, x in enumerate((None, math.nan, 0.5), 1))))
    assert panel.curves[0].points == ((3, 0.5),)


def test_invalid_share_counts_results_of_all_rewards(panels):
    shares = {curve.name: curve.points for curve in panels["Shares"].curves}
    assert shares["invalid"][0] == (1, 0.25), "4 of 8 samples x 2 rewards"
    assert invalid_share(step_record(1)) is None


def test_stacked_phases_have_a_value_at_every_step(panels):
    panel = panels["Seconds per step, by phase"]
    assert panel.is_stacked
    assert {curve.name: [y for _, y in curve.points] for curve in panel.curves}["evaluate"] == [0.5, 0.0, 0.0]


def test_roles_at_work_are_unknown_in_steps_of_an_older_driver(panels):
    panel = panels["Roles at work"]
    assert panel.is_share
    assert not panel.is_stacked, "roles work at the same time: their shares do not add up"
    assert [curve.name for curve in panel.curves] == ["rollouts", "rewards", "trainer"]
    assert panel.curves[2].points == ((2, 0.3), (3, 0.3)), "step 1 has no shares"


def test_memory_of_shared_devices_has_a_curve_for_each_state():
    steps = [step_record(number, device_bytes={"trainer_freed": number * 2**30}) for number in (1, 2)]
    [panel] = [panel for panel in build_panels(metrics_of(*steps)) if panel.title == "Memory of shared devices"]
    assert [(curve.name, curve.points) for curve in panel.curves] == [("trainer freed", ((1.0, 1.0), (2.0, 2.0)))]


def test_each_curve_is_thinned_on_its_own_and_keeps_its_extremes():
    steps = [step_record(number, reward=0.01, kl=50.0 if number == 5003 else 0.01) for number in range(1, 10_001)]
    evaluations = [evaluation_record(n, means={"score": 0.9 if n == 500 else 0.5}) for n in range(0, 10_001, 100)]
    panels = {panel.title: panel for panel in build_panels(metrics_of(*steps, *evaluations))}
    training, held_out = panels["Reward"].curves
    assert panels["Reward"].note == "training: mean of 32 values, with their range"
    assert (500, 0.9) in held_out.points
    assert (len(held_out.points), held_out.ranges) == (101, ())
    assert len(training.points) == 313
    assert {step for step, _ in training.points} <= set(range(1, 10_001)), "a click opens a step that there is"
    [kl] = panels["KL to the reference"].curves
    assert panels["KL to the reference"].note == "each point: mean of 32 values, with their range"
    assert max(high for _, high in kl.ranges) == 50.0
    assert max(value for _, value in kl.points) < 2


def test_runs_are_laid_over_each_other_except_for_what_is_stacked():
    first = build_panels(metrics_of(step_record(1, reward=0.1, kl=0.5, phase_seconds={"score": 2.0})))
    second = build_panels(metrics_of(step_record(1, reward=0.3, phase_seconds={"score": 9.0})))
    panels = {panel.title: panel for panel in lay_over({"a": first, "b": second})}
    assert [(curve.name, curve.run, curve.points) for curve in panels["Reward"].curves] == [
        ("a: training", "a", ((1.0, 0.1),)),
        ("b: training", "b", ((1.0, 0.3),)),
    ]
    assert [curve.run for curve in panels["KL to the reference"].curves] == ["a"]
    phases = panels["Seconds per step, by phase"]
    assert (phases.note, [curve.points for curve in phases.curves]) == ("of a alone", [((1.0, 2.0),)])
