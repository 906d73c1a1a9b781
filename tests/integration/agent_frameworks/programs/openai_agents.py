"""An agent of the OpenAI Agents SDK with one tool. The argument says which API it uses."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


api, _, stream = sys.argv[1].partition("-")
set_tracing_disabled(True)
set_default_openai_api("responses" if api == "responses" else "chat_completions")
agent = Agent(name="adder", instructions="Be brief.", model="policy", tools=[add])


async def main() -> None:
    items = []
    for question in ("What is 2 + 2?", "And 3 + 3?"):
        items.append({"role": "user", "content": question})
        if stream:
            result = Runner.run_streamed(agent, items)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items)
        items = result.to_input_list()
        print(str(result.final_output).strip())


asyncio.run(main())
