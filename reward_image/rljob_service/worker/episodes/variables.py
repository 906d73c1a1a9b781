"""What an episode's process finds in its environment: the model API's addresses and keys, as official clients and
Agent Lightning's agents read them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rljob_service.worker.episodes.types import Access


def build_variables(access: Access) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.url,
        "ANTHROPIC_API_KEY": access.api_key,
        "AGL_OPENAI_BASE_URL": access.base_url,
        "AGL_KEY": access.api_key,
        "AGL_EVENT_URL": f"{access.base_url}/rewards",
    }


@contextlib.contextmanager
def set_variables(access: Access) -> Iterator[None]:
    """Set the variables of an episode, and restore the earlier ones: no episode finds the key of another."""
    added = build_variables(access)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
