"""Problems of schema-valid specs: each is reported, and none breaks a reconcile."""

from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ObservedState
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_reward_model
from rljob_core.plan.validate import find_problems
from tests.support.any_template import templates
from tests.support.job_simulation import FUNCTION, make_agent_job, make_job, make_program_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def reward(template):
    return {"rewards": [{"name": "correct", "function": FUNCTION, "template": template}]}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"head": {"template": {"spec": {"containers": None}}}}, "spec.head.template.spec.containers"),
        ({"trainer": {"template": {"spec": None}}}, "spec.trainer.template.spec"),
        ({"rollout": {"template": {"metadata": None}}}, "spec.rollout.template.metadata"),
        (reward({"spec": {"containers": None}}), "spec.rewards[0].template.spec.containers"),
    ],
)
def test_template_that_deletes_built_parts_is_rejected(spec, path):
    job = make_job(**spec)
    assert find_problems(job) == [f"{path} must not be null: it would delete what the operator builds; remove it"]
    failed = conditions.find(plan_job(job, ObservedState(), NOW).status, conditions.FAILED)
    assert failed.reason == conditions.REASON_INVALID_SPEC


def test_template_of_rollouts_without_pods_is_rejected():
    job = make_job(rollout={"placement": "trainer", "template": {"spec": {"hostNetwork": True}}})
    (found,) = find_problems(job)
    assert found.startswith("spec.rollout.template must be left out with rollout.placement trainer")
    assert "set spec.trainer.template" in found


@pytest.mark.parametrize(
    ("runner", "problem"),
    [
        ({"template": {"spec": {"dnsPolicy": 1}}}, "spec.agent.runner.template.spec.dnsPolicy"),
        (
            {"function": None, "command": ["agent"], "workingDir": "app"},
            "spec.agent.runner.workingDir must be an absolute",
        ),
    ],
)
def test_refused_pod_of_a_runner_names_its_field(runner, problem):
    (found,) = find_problems(make_program_job(runner))
    assert found.startswith(problem)
    assert find_problems(make_program_job({"function": None, "command": ["agent"], "workingDir": "/app"})) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"user": {"template": {"spec": {"containers": None}}}}, "spec.agent.user.template.spec.containers"),
        ({"tool": {"template": {"spec": 1}}}, "spec.agent.tools[0].template"),
        ({"tool": {"template": {"spec": {"dnsPolicy": 1}}}}, "spec.agent.tools[0].template.spec.dnsPolicy"),
    ],
)
def test_refused_pod_of_an_agent_names_its_field(changes, problem):
    (found,) = find_problems(make_agent_job(**changes))
    assert found.startswith(problem)


def test_reward_template_without_env_is_accepted():
    job = make_job(**reward({"spec": {"containers": [{"name": "reward", "env": None}]}}))
    assert any(child["kind"] == "Deployment" for child in plan_job(job, ObservedState(), NOW).children)


def test_pod_that_the_api_server_would_refuse_starts_nothing():
    job = make_job(trainer={"template": {"spec": {"priority": "high"}}})
    plan = plan_job(job, ObservedState(), NOW)
    assert plan.children == ()
    failed = conditions.find(plan.status, conditions.FAILED)
    assert failed.reason == conditions.REASON_INVALID_SPEC
    assert failed.message.startswith('spec.trainer.template.spec.priority must be a whole number, got "high"')


def test_reward_model_with_a_refused_pod_starts_nothing():
    spec = {"function": FUNCTION, "template": {"spec": {"priority": "high"}}}
    model = RewardModel.model_validate({"metadata": {"name": "theirs", "uid": "m1"}, "spec": spec})
    plan = plan_reward_model(model, ObservedState(), NOW)
    assert plan.children == ()
    assert plan.status.conditions[0].message.startswith("spec.template.spec.priority must be a whole number")


@pytest.mark.parametrize("url", ["http://scorer:abc/", "http://scorer:99999/", "http://[::1", "https://:8080/"])
def test_invalid_endpoint_url_is_rejected(url):
    job = make_job(rewards=[{"name": "correct", "http": {"url": url}}])
    text = f"spec.rewards[0].http.url must name a host, and a port from 1 to 65535 if any, got {url}"
    assert find_problems(job) == [text]
    failed = conditions.find(plan_job(job, ObservedState(), NOW).status, conditions.FAILED)
    assert failed.message == text
    model = RewardModel.model_validate({"metadata": {"name": "theirs", "uid": "m1"}, "spec": {"http": {"url": url}}})
    ready = plan_reward_model(model, ObservedState(), NOW).status.conditions[0]
    assert (ready.status, ready.reason) == ("False", conditions.REASON_INVALID_SPEC)


def test_invalid_url_of_a_model_that_a_program_calls_is_rejected():
    job = make_program_job(models=[{"name": "judge", "url": "http://judge:0/v1"}])
    text = "spec.agent.models[0].url must name a host, and a port from 1 to 65535 if any, got http://judge:0/v1"
    assert find_problems(job) == [text]


def test_variables_of_a_chat_template_that_others_set_are_rejected():
    """The API server does not see them."""
    served = {"source": "hf://org/judge", "chatTemplateArguments": {"messages": [], "enable_thinking": False}}
    judge = {"model": served, "template": "x", "parser": {"regex": "(.)"}}
    train = {"train": {"source": "/d"}, "chatTemplateArguments": {"tools": [], "a": 1, "tokenize": True}}
    assert find_problems(make_job(data=train, rewards=[{"name": "j", "judge": judge}])) == [
        "spec.data.chatTemplateArguments must not have tools, tokenize, which RLJob or the tokenizer sets; remove them",
        "spec.rewards[0].judge.model.chatTemplateArguments must not have messages, which RLJob or the tokenizer sets; "
        "remove them",
    ]
    model = RewardModel.model_validate({"metadata": {"name": "theirs", "uid": "m1"}, "spec": {"judge": judge}})
    ready = plan_reward_model(model, ObservedState(), NOW).status.conditions[0]
    assert ready.message.startswith("spec.judge.model.chatTemplateArguments must not have messages")


def test_variable_that_the_kubelet_expands_opens_no_port():
    job = make_job(head={"env": {"TRACKING": "http://$(TRACKING_HOST):$(TRACKING_PORT)/"}})
    assert find_problems(job) == []
    assert plan_job(job, ObservedState(), NOW).children


@settings(max_examples=max(150, settings.default.max_examples))
@given(role=st.sampled_from(["head", "trainer", "rollout", "reward", "user"]), template=templates())
@example(role="head", template={"spec": {"containers": [{"name": {"cpu": "1"}, "image": "a"}]}})
@example(role="head", template={"spec": {"containers": [{"name": "own", "image": "a", "securityContext": ["a"]}]}})
@example(role="trainer", template={"spec": {"resources": ["a"]}})
@example(role="trainer", template={"spec": {"containers": [{"name": "trainer", "resources": {"limits": ["a"]}}]}})
def test_any_template_has_problems_or_children_and_never_breaks_the_plan(role, template):
    changes = reward(template) if role == "reward" else {role: {"template": template}}
    try:
        job = make_agent_job(**changes) if role == "user" else make_job(**changes)
    except ValidationError:
        return  # kubectl apply reports it
    problems = find_problems(job)
    made = plan_job(job, ObservedState(), NOW)
    failed = conditions.find(made.status, conditions.FAILED)
    assert bool(problems) == (failed.status == "True")
    assert bool(problems) != any(child["kind"] == "StatefulSet" for child in made.children)
