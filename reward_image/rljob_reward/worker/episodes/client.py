"""The OpenAI client that a program gets as `client`, where the package openai is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from rljob_reward.worker.episodes.types import Episode


def is_installed() -> bool:
    return importlib.util.find_spec("openai") is not None


def make(episode: Episode, *, is_async: bool) -> Any:
    """Return an OpenAI, or an AsyncOpenAI. An answer may take until the episode's deadline: a weight update waits."""
    import openai

    kind = openai.AsyncOpenAI if is_async else openai.OpenAI
    access = episode.access
    return kind(base_url=access.base_url, api_key=access.api_key, timeout=episode.deadline_seconds)
