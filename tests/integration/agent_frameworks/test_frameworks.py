"""Agents of LangGraph, the OpenAI Agents SDK, pydantic-ai and smolagents, unmodified, with their own packages."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rljob_service.pool import requirements
from tests.support.agent_services import call_text
from tests.support.gateways import SpelledPolicy, build_environment, check_exact, make_task, running_gateway
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.packages]

PROGRAMS = Path(__file__).parent / "programs"
REQUIREMENTS = [
    "langchain-anthropic==1.7.7",
    "langchain-openai==1.7.3",
    "langgraph==1.2.22",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.68.0",
    "smolagents[openai]==1.26.0",
]
TEXTS = [
    "I add.\n" + call_text("add", '{"a": 2, "b": 2}'),
    "It is 4.",
    call_text("add", '{"a": 3, "b": 3}'),
    " It is 6: Ünï 漢字 🙂\n",
]
LANGGRAPH = ["chat", "stream", "responses", "responses-stream", "messages", "messages-stream"]
AGENTS = ["chat", "chat-stream", "responses", "responses-stream"]


async def run_program(name: str, api: str, environment: dict[str, str]) -> str:
    """Return what the program prints. Its processes and theirs see nothing of this one's environment but the path."""
    python = await asyncio.to_thread(requirements.ensure_environment, REQUIREMENTS)
    process = await asyncio.create_subprocess_exec(
        python,
        str(PROGRAMS / f"{name}.py"),
        api,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    return output.decode()


@pytest.mark.parametrize(
    ("name", "api"),
    [*(("langgraph_react", api) for api in LANGGRAPH), *(("openai_agents", api) for api in AGENTS)],
    ids=str,
)
async def test_an_agent_with_a_tool_is_one_segment_of_the_sampled_tokens(name, api):
    policy = SpelledPolicy(*TEXTS)
    async with running_gateway(maxAssistantTurns=8) as gateway:
        episode = gateway.open(make_task(policy))
        answers = await run_program(name, api, build_environment(episode.start_attempt()[1]))
        recording = episode.read()

    assert answers.splitlines() == ["It is 4.", "It is 6: Ünï 漢字 🙂"]
    check_exact(recording, policy)
    assert (len(recording.turns), len(recording.segments)) == (4, 1), recording.breaks


JSON = '{"value": 4}'


@pytest.mark.parametrize(
    ("framework", "answer"),
    [
        ("smolagents", call_text("final_answer", '{"answer": 4}')),
        ("pydantic_ai", call_text("final_result", JSON)),
        ("openai_agents", JSON),
        ("langchain", JSON),
    ],
)
async def test_an_agent_that_forces_a_form_reads_the_free_answer_of_the_policy(framework, answer):
    policy = SpelledPolicy(answer)
    async with running_gateway(constraints="ignore") as gateway:
        episode = gateway.open(make_task(policy))
        printed = await run_program("forced_forms", framework, build_environment(episode.start_attempt()[1]))
        recording = episode.read()

    assert printed.split() == ["4"]
    check_exact(recording, policy)
