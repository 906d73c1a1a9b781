"""Episodes that share a process have environment variables of their own."""

from __future__ import annotations

import asyncio
import os

import pytest

from rljob_service.worker.episodes.types import Access
from rljob_service.worker.episodes.variables import SharedEnvironment, share_environment, use_variables


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ)  # restored afterwards
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    share_environment()


@pytest.mark.usefixtures("shared")
def test_each_task_and_its_threads_see_their_own_key() -> None:
    async def play(key: str) -> list[str | None]:
        with use_variables(Access("http://gateway", key, "policy")):
            await asyncio.sleep(0)
            seen = [os.environ["OPENAI_API_KEY"], os.getenv("OPENAI_API_KEY"), os.environ.copy()["OPENAI_API_KEY"]]
            return [*seen, await asyncio.to_thread(os.getenv, "OPENAI_API_KEY")]

    async def play_all() -> list[list[str | None]]:
        return await asyncio.gather(*(play(f"key{i}") for i in range(3)))

    assert asyncio.run(play_all()) == [[f"key{i}"] * 4 for i in range(3)]
    assert "OPENAI_API_KEY" not in os.environ, "a key outlived its episode"


@pytest.mark.usefixtures("shared")
def test_what_an_episode_changes_of_its_variables_is_its_own() -> None:
    with use_variables(Access("http://gateway", "key", "policy")):
        os.environ["OPENAI_API_KEY"] = "another"
        del os.environ["OPENAI_BASE_URL"]
        assert os.environ["OPENAI_API_KEY"] == "another"
        assert "OPENAI_BASE_URL" not in os.environ
    assert "OPENAI_API_KEY" not in os.environ


@pytest.mark.usefixtures("shared")
def test_environment_is_still_that_of_each_episode_after_an_update_in_place() -> None:
    with use_variables(Access("http://gateway", "first", "policy")):
        os.environ |= {"MODE": "fast"}
        assert (os.environ["OPENAI_API_KEY"], {"A": "1"} | os.environ) == ("first", {"A": "1", **os.environ})
    with use_variables(Access("http://gateway", "second", "policy")):
        assert (os.environ["MODE"], os.environ["OPENAI_API_KEY"]) == ("fast", "second")
    del os.environ["MODE"]


def test_other_variables_are_of_the_process() -> None:
    process = {"PATH": "/bin"}
    environment = SharedEnvironment(process)
    with use_variables(Access("http://gateway", "key", "policy")):
        environment["MINE"] = "1"
        assert len(environment) == len(list(environment)) == 10
    assert process == {"PATH": "/bin", "MINE": "1"}
