"""Agents of four frameworks that force a tool call or a schema. The argument says which; each prints the sum."""

import os
import sys

from pydantic import BaseModel

QUESTION = 'What is 2 + 2? Answer with JSON: {"value": 4}'


class Sum(BaseModel):
    value: int


def smolagents() -> object:
    from smolagents import OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return ToolCallingAgent(tools=[], model=model, max_steps=3, verbosity_level=0).run(QUESTION)


def pydantic_ai() -> object:
    from pydantic_ai import Agent

    return Agent("openai-chat:policy", output_type=Sum).run_sync(QUESTION).output.value


def openai_agents() -> object:
    from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    return Runner.run_sync(Agent(name="adder", model="policy", output_type=Sum), QUESTION).final_output.value


def langchain() -> object:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy").with_structured_output(Sum).invoke(QUESTION).value


print(globals()[sys.argv[1]]())
