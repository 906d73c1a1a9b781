"""A ReAct agent of LangGraph with one tool. The argument says which API it uses."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


MODELS = {
    "chat": lambda: ChatOpenAI(model="policy"),
    "stream": lambda: ChatOpenAI(model="policy", streaming=True, stream_usage=True),
    "responses": lambda: ChatOpenAI(model="policy", use_responses_api=True),
    "responses-stream": lambda: ChatOpenAI(model="policy", use_responses_api=True, streaming=True),
    "messages": lambda: ChatAnthropic(model="policy", max_tokens=256),
    "messages-stream": lambda: ChatAnthropic(model="policy", max_tokens=256, streaming=True),
}

agent = create_react_agent(MODELS[sys.argv[1]](), [add], prompt="Be brief.", checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
for question in ("What is 2 + 2?", "And 3 + 3?"):
    state = agent.invoke({"messages": [{"role": "user", "content": question}]}, thread)
    print(state["messages"][-1].text.strip())
