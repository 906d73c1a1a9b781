"""A user's Secrets on this machine."""

from __future__ import annotations

import base64

from rljob_api.manifest.job import RLJob
from rljob_cli.local.secrets import build_secrets
from tests.support.job_simulation import make_agent_job, make_program_job


def test_environment_variable_replaces_the_referenced_key_of_a_secret():
    endpoint = {"url": "https://x", "model": "m", "apiKeySecretRef": {"name": "keys", "key": "MY_KEY"}}
    judge = {"template": "x", "parser": {"regex": "(x)"}, "endpoint": endpoint}
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}, "rewards": [{"name": "r", "judge": judge}]}
    job = RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})
    secrets = build_secrets(job, {"MY_KEY": "sk", "OTHER": "no"})
    assert secrets["keys"]["data"] == {"MY_KEY": base64.b64encode(b"sk").decode()}
    assert build_secrets(job, {}) == {}


def test_key_of_a_model_user_comes_from_the_variable_that_its_key_names():
    endpoint = {"url": "https://x", "model": "m", "apiKeySecretRef": {"name": "keys", "key": "MY_KEY"}}
    job = make_agent_job(user={"function": None, "model": {"persona": "x", "endpoint": endpoint}})
    assert list(build_secrets(job, {"MY_KEY": "sk"})["keys"]["data"]) == ["MY_KEY"]


def test_token_of_the_hub_comes_from_the_variable_that_its_key_names():
    hub = {"tokenSecretRef": {"name": "hub", "key": "HF_TOKEN"}}
    rewards = [{"name": "r", "function": {"inline": "x"}}]
    spec = {"model": {"source": "hf://o/m"}, "data": {"train": {"source": "/d"}}, "rewards": rewards, "hub": hub}
    job = RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})
    assert list(build_secrets(job, {"HF_TOKEN": "hf_x"})["hub"]["data"]) == ["HF_TOKEN"]


def test_headers_for_a_collector_come_from_the_variable_that_their_key_names():
    tracing = {"endpoint": "http://x:4318", "headersSecretRef": {"name": "otlp", "key": "OTLP_HEADERS"}}
    secrets = build_secrets(make_agent_job(tracing=tracing), {"OTLP_HEADERS": "a=b"})
    assert list(secrets["otlp"]["data"]) == ["OTLP_HEADERS"]


def test_variable_replaces_a_secret_that_a_template_passes_to_a_function():
    env = [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "OPENAI_API_KEY"}}}]
    template = {"spec": {"containers": [{"name": "reward", "env": [*env, {"name": "PLAIN", "value": "x"}]}]}}
    rewards = [{"name": "r", "function": {"inline": "x"}, "template": template}]
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}, "rewards": rewards}
    job = RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})
    assert list(build_secrets(job, {"OPENAI_API_KEY": "sk"})["keys"]["data"]) == ["OPENAI_API_KEY"]


def test_variable_replaces_a_secret_that_a_template_passes_to_a_tool():
    env = [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "search", "key": "SEARCH_KEY"}}}]
    job = make_agent_job(tool={"template": {"spec": {"containers": [{"name": "agent", "env": env}]}}})
    assert list(build_secrets(job, {"SEARCH_KEY": "sk"})["search"]["data"]) == ["SEARCH_KEY"]


def test_variable_replaces_the_key_of_a_model_that_a_program_calls():
    model = {"name": "judge", "url": "https://x", "apiKeySecretRef": {"name": "keys", "key": "MY_KEY"}}
    assert list(build_secrets(make_program_job(models=[model]), {"MY_KEY": "sk"})["keys"]["data"]) == ["MY_KEY"]
