"""The agent of a job with what it needs in the head: the chat template, and the gateway for environments and programs.

Training and rehearsals use it, so both play the same episodes.
"""

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rljob_api.manifest.job import RLJobSpec
from rljob_trainer.agents import AgentLoop, build_agent
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.gateway.forwarding import read_api_keys
from rljob_trainer.gateway.server import ModelGateway
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.outages import Dependency, Outages


@dataclass(frozen=True)
class AgentParts:
    loop: AgentLoop
    template: ChatTemplate | None
    """None without turns."""
    gateway: ModelGateway | None
    """None unless a runner plays the episodes."""


async def start_agent(
    stack: AsyncExitStack,
    spec: RLJobSpec,
    tokenizer: Any,
    context_length: int | None,
    services: AgentServices,
    address: str,
    prometheus: PrometheusMetrics,
    outages: Outages | None = None,
    models: Mapping[str, Dependency] | None = None,
) -> AgentParts:
    """Start what the agent needs, until `stack` is closed. Raise UserError for a model without a chat template, if the
    gateway's port is in use, and for a missing key of agent.models. `context_length`: see ConversationLoop. `address`:
    of the gateway, whose metrics `prometheus` exports. `models`: see gateway.forwarding.watch_models."""
    agent, gateway = spec.agent, None
    arguments = spec.data.chat_template_arguments
    template = None if agent.type == "singleTurn" else ChatTemplate(tokenizer, agent.tool_format, arguments)
    if template is not None and agent.is_hosted:
        gateway = ModelGateway(
            agent,
            template,
            context_length,
            api_keys=read_api_keys(agent.models, os.environ),
            health=models,
            on_response=prometheus.record_response,
            on_turn=lambda times: prometheus.record_overhead(times.to_engine, times.to_client),
        )
        prometheus.register_gateway(gateway.statistics)
        await gateway.start(address)
        stack.push_async_callback(gateway.close)
    loop = build_agent(agent, services, template, context_length, gateway, (outages or Outages()).seconds)
    return AgentParts(loop, template, gateway)
