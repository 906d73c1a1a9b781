"""The whole operator against a real API server, under random faults, edits, crashes and passing time.

A hypothesis state machine: see operator_machine, job_rules and model_rules. HYPOTHESIS_PROFILE=nightly runs more
examples.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.integration.apiserver.fault_proxy import WRITE_FAULTS
from tests.integration.apiserver.job_rules import JobRules
from tests.integration.apiserver.model_rules import MODEL_EDITS, MODEL_TAMPERINGS, ModelRules
from tests.integration.apiserver.operator_machine import INJECTED

_PROFILE_EXAMPLES_PER_EXAMPLE = 20
"""An example takes half a minute: one is run per this many of the profile's."""


class OperatorMachine(JobRules, ModelRules):
    """All rules."""


@pytest.fixture
def machine(api_client, crds, control_plane):
    """The class of the machine; each instance has its own operator and namespace."""
    OperatorMachine.api = api_client
    OperatorMachine.kubeconfig = str(control_plane.kubeconfig)
    OperatorMachine.address = control_plane.address
    INJECTED.clear()
    return OperatorMachine


@pytest.mark.slow
def test_each_rule_of_a_reward_model_converges_under_faults(machine):
    """In a fixed order: a few random examples may leave out a rule."""
    running = machine()
    try:
        running.create_the_model(({2: "409", 5: "death after"}, {1: "410"}), 3)
        running.settle()
        running.make_all_pods_ready(({1: "lost"}, {}))
        running.settle()
        for number, edit in enumerate(MODEL_EDITS):
            running.edit_the_model(edit, ({1: WRITE_FAULTS[number]}, {}), False)
            running.settle()
        running.scale_the_model(4, ({1: "cut"}, {}), False)
        for tampering in MODEL_TAMPERINGS:
            running.tamper_with_the_models_children(tampering, ({2: "503"}, {}), False)
        running.settle()
        running.delete_the_model(({1: "death before"}, {}), recreate=True)
        running.settle()
        running.delete_the_model(({}, {}), recreate=False)
    finally:
        running.teardown()


def test_job_and_model_converge_when_each_fault_strikes_once(machine):
    """A short fixed order with every fault of a write, a user error, its fix, and the deletion."""
    running = machine()
    try:
        running.create_the_job(({1: "409", 4: "429", 7: "lost", 11: "death after"}, {1: "410"}), None)
        running.create_the_model(({1: "503", 2: "cut"}, {}), 1)
        running.make_all_pods_ready(({1: "late"}, {}))
        running.create_a_foreign_object(("ConfigMap", "lifted-config", {"data": {"mine": "yes"}}), ({}, {}))
        running.settle()
        running.silence_watches()
        running.delete_the_foreign_object(({1: "death before"}, {}))
        running.end_the_job(0, False, ({1: "409"}, {}))
        running.edit_the_spec(("rollout.replicas", 3), ({2: "lost"}, {}), False)
        running.delete_the_job(({1: "cut"}, {}), "recreate")
    finally:
        running.teardown()
    assert set(WRITE_FAULTS) <= set(INJECTED)


@pytest.mark.slow
def test_operator_converges_after_random_faults(machine):
    profile = settings()
    options = settings(
        max_examples=max(3, profile.max_examples // _PROFILE_EXAMPLES_PER_EXAMPLE),
        stateful_step_count=14,
        deadline=None,
        derandomize=profile.max_examples < 1000,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(machine, settings=options)
    assert sum(INJECTED.values()) >= 10, f"too few faults were injected: {INJECTED}"
