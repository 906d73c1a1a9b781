"""Warnings about a job and its chat template."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.manifest.job import RLJob
from rljob_inputs.models.chat_problems import find_chat_problems, find_unread
from rljob_inputs.models.chat_template import TemplateSource
from rljob_inputs.models.defaults import OwnSettings
from tests.support.model_templates import HYBRID_QWEN3

OWN = OwnSettings({}, template=TemplateSource(HYBRID_QWEN3), template_place="chat_template.jinja")
ARGUMENTS, LIMIT = "spec.data.chatTemplateArguments", "spec.rollout.sampling.maxTokens"
NOT_READ = "which the chat template (chat_template.jinja) does not read"


def find(
    arguments: dict[str, Any], max_tokens: int | None = None, own: OwnSettings = OWN, **data: Any
) -> dict[str, str]:
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}, "chatTemplateArguments": arguments, **data},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "rollout": {"sampling": {"maxTokens": max_tokens}},
    }
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": spec})
    found = list(find_chat_problems(job.spec, own))
    assert all(finding.is_warning for finding in found)
    return {finding.path: finding.message for finding in found}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinking": False}, None),
        ({"enable_thinkin": False}, f"has enable_thinkin, {NOT_READ}; did you mean enable_thinking?"),
        ({"effort": 1, "budget": 2}, f"has effort, budget, {NOT_READ}; it reads enable_thinking"),
        ({"messages": []}, None),
    ],
)
def test_an_unread_variable_is_shown_with_those_that_are_read(arguments, message):
    assert find(arguments).get(ARGUMENTS) == message


def test_a_template_without_variables_reads_none():
    own = OwnSettings({}, template=TemplateSource("{{ messages }}{{ eos_token }}"), template_place="x")
    (finding,) = find_unread("p", {"a": 1}, own)
    assert finding.message.endswith("does not read; it reads none")


def test_variables_have_no_effect_without_a_template():
    assert find({"a": 1}, format="text") == {ARGUMENTS: "has no effect with data.format: text"}
    assert find({"a": 1}, own=OwnSettings({})) == {}, "that the template is missing is an error of the prompts"


@pytest.mark.parametrize(
    ("max_tokens", "arguments", "warns"),
    [(512, {}, True), (512, {"enable_thinking": False}, False), (1024, {}, False), (None, {}, False)],
)
def test_a_model_that_thinks_needs_more_than_a_short_answer(max_tokens, arguments, warns):
    assert (LIMIT in find(arguments, max_tokens)) == warns
    assert LIMIT not in find({}, max_tokens, format="text")
