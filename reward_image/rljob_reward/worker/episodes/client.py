"""The OpenAI client that a program gets as `client`, where the package openai is installed."""

from __future__ import annotations

import importlib
import types
from typing import Any

from rljob_reward.worker.episodes.types import Episode


def find_package() -> types.ModuleType | None:
    """Return openai; None if it is not installed. The first import takes about a second."""
    try:
        return importlib.import_module("openai")
    except ModuleNotFoundError:
        return None


def make(package: types.ModuleType, episode: Episode, *, is_async: bool) -> Any:
    """Return an OpenAI, or an AsyncOpenAI. An answer may take until the episode's deadline: a weight update waits."""
    kind = package.AsyncOpenAI if is_async else package.OpenAI
    access = episode.access
    return kind(base_url=access.base_url, api_key=access.api_key, timeout=episode.deadline_seconds)
