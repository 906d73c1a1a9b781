"""Agent loops by `type`. To add one: its spec in rljob_api.manifest.job, its module here, and one line below."""

from __future__ import annotations

from rljob_api.manifest.agent import Agent
from rljob_trainer.agents.base import AgentLoop
from rljob_trainer.agents.single_turn import SingleTurn

__all__ = ["AgentLoop", "build_agent"]


def build_agent(spec: Agent) -> AgentLoop:
    return {"singleTurn": SingleTurn}[spec.type]()
