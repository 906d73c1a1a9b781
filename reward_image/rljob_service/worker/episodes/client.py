"""The OpenAI client that a program gets as `client`, where the package openai is installed.

Each episode has its own client, with its own key and connections. They share what costs 20 ms of CPU time to make and
has nothing of an episode: the certificates that they trust.
"""

import functools
import importlib
import ssl
import types
from typing import Any

from rljob_service.worker.episodes.types import Episode


def find_package() -> types.ModuleType | None:
    """Return openai; None if it is not installed. The first import takes about a second."""
    try:
        return importlib.import_module("openai")
    except ModuleNotFoundError:
        return None


def make(package: types.ModuleType, episode: Episode, *, is_async: bool) -> Any:
    """Return an OpenAI, or an AsyncOpenAI. An answer may take until the episode's deadline: a weight update waits."""
    kind = package.AsyncOpenAI if is_async else package.OpenAI
    transport = package.DefaultAsyncHttpxClient if is_async else package.DefaultHttpxClient
    access = episode.access
    return kind(
        base_url=access.base_url,
        api_key=access.api_key,
        timeout=episode.deadline_seconds,
        http_client=transport(verify=_trusted_certificates()),
    )


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """Return what each client would load. The gateway itself speaks plain HTTP."""
    return ssl.create_default_context()
