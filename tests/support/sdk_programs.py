"""Programs with the clients of OpenAI and Anthropic: two questions, and a tool that adds.

None of them knows about RLJob: address and key are in the environment. Each returns its two answers. They differ in how
they call the model, and in what they send back to it.
"""

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

QUESTION, FOLLOW_UP = "What is 2 + 2?", "And 3 + 3?"
DESCRIPTION = "Adds two numbers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}}
]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}]
MESSAGE_TOOLS: Any = [{"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}]


def add(arguments: dict[str, int]) -> str:
    return str(arguments["a"] + arguments["b"])


def chat() -> list[str]:
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        messages.append({"role": "user", "content": question})
        while True:
            message = (
                client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS).choices[0].message
            )
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = add(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content or "")
    return answers


async def chat_async_stream() -> list[str]:
    client = AsyncOpenAI()
    messages: list[Any] = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        while True:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=CHAT_TOOLS) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = add(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content or "")
    return answers


def chat_chunks() -> list[str]:
    """As scripts read chunks: texts and calls are put together by hand."""
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        messages.append({"role": "user", "content": question})
        while True:
            text, calls = "", {}
            for chunk in client.chat.completions.create(
                model="policy", messages=messages, tools=CHAT_TOOLS, stream=True
            ):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                for part in delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                    call["arguments"] += part.function.arguments or ""
            if not calls:
                messages.append({"role": "assistant", "content": text})
                break
            written = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls.values()
            ]
            messages.append({"role": "assistant", "content": text, "tool_calls": written})
            for call in calls.values():
                result = add(json.loads(call["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        answers.append(text)
    return answers


def responses() -> list[str]:
    client = OpenAI()
    items: list[Any] = []
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        items.append({"role": "user", "content": question})
        while True:
            response = client.responses.create(
                model="policy", instructions="Be brief.", input=items, tools=RESPONSE_TOOLS, store=False
            )
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = add(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        answers.append(response.output_text)
    return answers


async def responses_async_stream() -> list[str]:
    client = AsyncOpenAI()
    items: list[Any] = []
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        items.append({"role": "user", "content": question})
        while True:
            async with client.responses.stream(
                model="policy", instructions="Be brief.", input=items, tools=RESPONSE_TOOLS
            ) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                response = await stream.get_final_response()
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                items.append({"role": "assistant", "content": "".join(deltas)})
                break
            if response.output_text:
                items.append({"role": "assistant", "content": response.output_text})
            for call in calls:
                written = {"name": call.name, "arguments": call.arguments}
                items.append({"type": "function_call", "call_id": call.call_id, **written})
                result = add(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        answers.append(response.output_text)
    return answers


def messages() -> list[str]:
    client = Anthropic()
    history: list[Any] = []
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        history.append({"role": "user", "content": question})
        while True:
            message = client.messages.create(
                model="policy", max_tokens=256, system="Be brief.", messages=history, tools=MESSAGE_TOOLS
            )
            history.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": add(block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            history.append({"role": "user", "content": results})
        answers.append(message.content[0].text)
    return answers


async def messages_async_stream() -> list[str]:
    client = AsyncAnthropic()
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    history: list[Any] = []
    answers = []
    for question in (QUESTION, FOLLOW_UP):
        history.append({"role": "user", "content": [{"type": "text", "text": question}]})
        while True:
            async with client.messages.stream(
                model="policy", max_tokens=256, system=system, messages=history, tools=MESSAGE_TOOLS
            ) as stream:
                text = "".join([text async for text in stream.text_stream])
                message = await stream.get_final_message()
            history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            if message.stop_reason != "tool_use":
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": add(block.input)}],
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            history.append({"role": "user", "content": results})
        answers.append(text)
    return answers


PROGRAMS = [chat, chat_async_stream, chat_chunks, responses, responses_async_stream, messages, messages_async_stream]
