"""Agent loops by `type`. To add one: its spec in rljob_api.manifest.agent, its module here, and one line below."""

from __future__ import annotations

from rljob_api.manifest.agent import Agent
from rljob_trainer.agents.base import AgentLoop, Services
from rljob_trainer.agents.loop import ConversationLoop
from rljob_trainer.agents.single_turn import SingleTurn
from rljob_trainer.conversation.template import ChatTemplate

__all__ = ["AgentLoop", "ConversationLoop", "build_agent"]


def build_agent(
    spec: Agent, services: Services, template: ChatTemplate | None, context_length: int | None
) -> AgentLoop:
    """`template`: None only for singleTurn. `context_length`: see ConversationLoop."""
    if spec.type == "loop":
        assert template is not None
        return ConversationLoop(spec, services, template, context_length)
    return SingleTurn()
