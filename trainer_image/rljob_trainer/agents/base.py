"""The interface of an agent loop: one conversation from a prompt to a finished episode.

It calls `generate` for completions and keeps token ids throughout; a multi-turn loop appends its own tokens (loss_mask
0) in between. It knows neither replicas nor rewards: scoring starts when `run` returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Completion, Episode

Generate = Callable[[list[int]], Awaitable[Completion]]
"""Tokens so far to a completion. Sampling parameters and seed are already bound."""


class AgentLoop(Protocol):
    """Stateless: one instance runs all conversations at once."""

    async def run(self, prompt: Prompt, group: int, sample: int, generate: Generate) -> Episode: ...
