"""Agent loops by `type`. To add one: its spec in rljob_api.manifest.agent, its module here, and one line below."""

from collections.abc import Callable
from typing import Protocol

from rljob_api.manifest.agent import Agent
from rljob_trainer.agents.base import AgentLoop, EpisodeRunner, EpisodeTask, Gateway, Services, describe_length
from rljob_trainer.agents.hosted import HostedLoop
from rljob_trainer.agents.loop import ConversationLoop
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.episodes.types import Episode, EpisodeEnd, PromptTooLongError, prompt_segment, single_turn

__all__ = ["AgentLoop", "ConversationLoop", "HostedLoop", "build_agent"]


class AgentServices(Services, EpisodeRunner, Protocol):
    """All that agents call besides the policy."""


def build_agent(
    spec: Agent,
    services: AgentServices,
    template: ChatTemplate | None,
    context_length: int | None,
    gateway: Gateway | None = None,
    away: Callable[[], float] = lambda: 0.0,
) -> AgentLoop:
    """`template`: None only for singleTurn. `context_length`, `away`: see ConversationLoop. `gateway`: for the types
    environment and program."""
    if spec.is_hosted:
        assert gateway is not None
        return HostedLoop(spec, gateway, services, away)
    if spec.type == "loop":
        assert template is not None
        return ConversationLoop(spec, services, template, context_length, away)
    return SingleTurn()


class SingleTurn:
    async def run(self, task: EpisodeTask) -> list[Episode]:
        prompt = task.prompt
        try:
            completion = await task.generate(prompt.token_ids)
        except PromptTooLongError as error:
            episode = Episode(prompt.index, task.group, task.sample, [prompt_segment(prompt)], end=EpisodeEnd.FAILED)
            episode.failure = describe_length(error)
            return [episode]
        return [single_turn(prompt, task.group, task.sample, completion)]
