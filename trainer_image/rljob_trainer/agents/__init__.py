"""Agent loops by the `type` that a job names. A new kind: its spec in rljob_api.manifest.job, its module here, one line
below.
"""

from __future__ import annotations

from rljob_api.manifest.job import SingleTurnAgent
from rljob_trainer.agents.base import AgentLoop, Generate
from rljob_trainer.agents.single_turn import SingleTurn

__all__ = ["AgentLoop", "Generate", "build_agent"]


def build_agent(spec: SingleTurnAgent) -> AgentLoop:
    """The agent loop that `spec` asks for."""
    loops = {"singleTurn": SingleTurn}
    return loops[spec.type]()
