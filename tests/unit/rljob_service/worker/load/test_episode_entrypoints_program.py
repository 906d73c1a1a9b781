"""The client of an episode: its own key, deadline and connections, and one set of certificates for all."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from rljob_service.worker.episodes.calls import read_episode
from rljob_service.worker.episodes.types import Episode
from rljob_service.worker.load import episode_entrypoints as program
from tests.support.agent_functions import build_episode_call


def make_episode(key: str) -> Episode:
    model = {"url": "http://127.0.0.1:1", "api_key": key, "name": "policy"}
    return read_episode(build_episode_call(model=model, deadline_seconds=90.0))


def test_client_has_the_episodes_key_and_deadline() -> None:
    import openai

    package = program.find_package()
    assert package is openai
    made = program.make(package, make_episode("key-0"), is_async=False)
    assert isinstance(made, openai.OpenAI)
    assert (made.api_key, str(made.base_url), made.timeout) == ("key-0", "http://127.0.0.1:1/v1/", 90.0)
    made.close()


def test_clients_share_certificates_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []

    def create() -> ssl.SSLContext:
        created.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return created[-1]

    monkeypatch.setattr(ssl, "create_default_context", create)
    program._trusted_certificates.cache_clear()
    package = program.find_package()
    first, second = (program.make(package, make_episode(key), is_async=False) for key in ("key-0", "key-1"))
    other = program.make(package, make_episode("key-2"), is_async=True)
    assert len(created) == 1, "each costs 20 ms"
    assert first._client is not second._client
    assert [made.auth_headers["Authorization"] for made in (first, second, other)] == [
        "Bearer key-0", "Bearer key-1", "Bearer key-2",
    ]  # fmt: skip
    first.close()
    assert first.is_closed()
    assert not second.is_closed()
    second.close()
    asyncio.run(other.close())
