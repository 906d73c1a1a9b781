"""A LitAgent of Agent Lightning, whose rollout returns nothing: a decorator tracks its reward."""

import os
import sys
from pathlib import Path

import calc_agent
from agentlightning import LLM

# Of its calculator, which `uvx` starts.
os.environ["PATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
rewards = []


def keep(evaluate):
    async def call(*arguments):
        rewards.append(await evaluate(*arguments))
        return rewards[-1]

    return call


calc_agent.eval = keep(calc_agent.eval)


async def run(question, answer, base_url, model, episode):
    task, resources = {"question": question, "result": answer}, {"main_llm": LLM(endpoint=base_url, model=model)}
    await calc_agent.CalcAgent().training_rollout_async(task, episode, resources)
    return rewards.pop()
