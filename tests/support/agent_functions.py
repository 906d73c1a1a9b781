"""Simulated users, tools and programs, loaded and called as in a worker, without a process."""

from __future__ import annotations

import json
from typing import Any

from rljob_service.worker.forms.outcome import CallOutcome
from rljob_service.worker.load.entrypoints import BoundFunction
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import EPISODES, TOOLS, USER, FunctionSettings
from tests.support.plugins import REFERENCES

ANSWERS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def build_settings(source: str, serves: str, **fields: Any) -> FunctionSettings:
    settings = FunctionSettings(source, "function.py", None, "auto", {}, 2048, serves=serves, signatures=REFERENCES)
    return settings._replace(**fields)


def build_user_call(**fields: Any) -> dict[str, Any]:
    """Return the fields of a UserCall."""
    return {"messages": ANSWERS, "prompt": ANSWERS[:1], "ground_truth": "4", **fields}


def call_user(source: str, settings: dict[str, Any] | None = None, **fields: Any) -> CallOutcome:
    """Call a simulated user. `fields` are those of a UserCall, `settings` of FunctionSettings."""
    built = build_settings(source, USER, **(settings or {}))
    request = {"id": "c", "arguments": build_user_call(**fields)}
    [outcome] = Executor(load(built), built).execute(json.dumps(request).encode())
    assert isinstance(outcome, CallOutcome)
    return outcome


def load_tools(source: str, **settings: Any) -> BoundFunction:
    return load(build_settings(source, TOOLS, **settings))


def call_tool(source: str, function: str, arguments: dict[str, Any], **settings: Any) -> CallOutcome:
    built = build_settings(source, TOOLS, **settings)
    request = {"id": "c", "function": function, "arguments": arguments}
    [outcome] = Executor(load(built), built).execute(json.dumps(request).encode())
    assert isinstance(outcome, CallOutcome)
    return outcome


def build_episode_call(**fields: Any) -> dict[str, Any]:
    """Return the fields of an EpisodeCall."""
    model = {"url": "http://127.0.0.1:1", "api_key": "key-0", "name": "policy"}
    call = {"episode": "3/1", "attempt": 0, "model": model, "prompt": ANSWERS[:1], "ground_truth": "4"}
    return {**call, "data_source": "sums", "seed": 7, "max_turns": 5, "deadline_seconds": 60.0, **fields}


def play(source: str, settings: dict[str, Any] | None = None, **fields: Any) -> CallOutcome:
    """Play an episode. `fields` are those of an EpisodeCall, `settings` of FunctionSettings."""
    built = build_settings(source, EPISODES, **(settings or {}))
    request = {"id": "c", "arguments": build_episode_call(**fields)}
    [outcome] = Executor(load(built), built).execute(json.dumps(request).encode())
    assert isinstance(outcome, CallOutcome)
    return outcome
