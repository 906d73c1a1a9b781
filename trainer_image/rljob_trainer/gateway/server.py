"""The gateway's HTTP server: OpenAI's and Anthropic's routes, authentication, streams, and errors in each API's form.

Leaves what an episode may do and what is recorded to episodes.py, and the formats to dialects/.
"""

from __future__ import annotations

from rljob_api.manifest.agent import Agent
from rljob_api.wire.contract import PORT_GATEWAY
from rljob_trainer.agents.base import EpisodeTask, OpenEpisode
from rljob_trainer.conversation.template import ChatTemplate


class ModelGateway:
    """Implements agents.base.Gateway."""

    def __init__(self, agent: Agent, template: ChatTemplate, context_length: int | None) -> None:
        """`context_length`: the longest prompt with its answer, in tokens; None: not known."""
        raise NotImplementedError

    async def start(self, address: str, port: int = PORT_GATEWAY) -> None:
        """Listen. `port`: 0 chooses one. Raise UserError if the port is in use."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop listening, and cancel what is in flight."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Without a path, such as http://10.0.0.7:8300. Known once it listens."""
        raise NotImplementedError

    def open(self, task: EpisodeTask) -> OpenEpisode:
        """Let a program play the episode until the episode's `close`."""
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric `rljob_gateway_NAME`."""
        raise NotImplementedError

    def describe_wait(self) -> str:
        """Return `3 completions for programs, oldest 4.1 s`; empty if none is in flight."""
        raise NotImplementedError
