"""Programs: what they get by name, setup and close, async ones, and what is refused when they are loaded."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.functions.named_forms import CLIENT, PROGRAM_VALUES
from rljob_service.worker.episodes.calls import read_episode, write_call
from rljob_service.worker.load.episode_entrypoints import list_values
from rljob_service.worker.load.loading import load
from rljob_service.worker.settings import EPISODES
from tests.support.agent_functions import ANSWERS, build_episode_call, build_settings, play


def show(source: str, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return what a program put into its info."""
    outcome = play(source, settings, **fields)
    assert outcome.reason is None, outcome.message
    return outcome.value["info"]


def test_values_of_the_table_are_passed_by_name() -> None:
    values = list_values(read_episode(build_episode_call(extra_info={"level": 2})))
    assert set(PROGRAM_VALUES) - {CLIENT} < set(values)
    assert (values["question"], values["answer"], values["level"]) == ("2+2?", "4", 2)
    assert values["task"] == {
        "prompt": ANSWERS[:1], "messages": ANSWERS[:1], "question": "2+2?", "answer": "4", "ground_truth": "4",
        "data_source": "sums", "level": 2,
    }  # fmt: skip
    assert (values["base_url"], values["api_key"], values["model"]) == ("http://127.0.0.1:1/v1", "key-0", "policy")


def test_column_of_the_row_replaces_a_value_of_that_name() -> None:
    values = list_values(read_episode(build_episode_call(extra_info={"answer": "four", "prompt": "x", "seed": 1})))
    assert (values["answer"], values["ground_truth"], values["seed"]) == ("four", "4", 7)
    assert values["prompt"] == ANSWERS[:1]


def test_episode_is_read_and_written_without_loss() -> None:
    call = build_episode_call(extra_info={"a": [1]})
    assert write_call(read_episode(call)) == {**call, "seats": None}


def test_function_gets_what_it_names_and_its_kwargs() -> None:
    source = "def run(question, level, seed, attempt, episode, max_turns, n=1):\n    return None, locals()"
    info = show(source, {"kwargs": {"n": 3}}, extra_info={"level": 2})
    assert info == {
        "question": "2+2?", "level": 2, "seed": 7, "attempt": 0, "episode": "3/1", "max_turns": 5, "n": 3
    }  # fmt: skip


def test_parameter_that_the_row_lacks_is_an_invalid_episode() -> None:
    outcome = play("def run(prompt, level): ...", extra_info={"other": 1})
    assert outcome.reason == "exception"
    assert (
        "run(prompt, level) requires level, which the row does not have (its other columns: other)" in outcome.message
    )


def test_environment_variables_are_those_of_the_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    names = "('OPENAI', 'ANTH', 'AGL')"
    source = f"import os\ndef run(): return None, {{k: os.environ[k] for k in os.environ if k.startswith({names})}}"
    assert show(source) == {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_BASE": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "key-0",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
        "ANTHROPIC_API_KEY": "key-0",
        "AGL_OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "AGL_KEY": "key-0",
        "AGL_EVENT_URL": "http://127.0.0.1:1/v1/rewards",
    }
    assert (os.environ["OPENAI_API_KEY"], "ANTHROPIC_API_KEY" in os.environ) == ("the user's own", False)


def test_async_program_has_a_separate_event_loop() -> None:
    source = """
import asyncio
loops = []
async def run(seed):
    loops.append(asyncio.get_running_loop())
    asyncio.create_task(asyncio.sleep(1000))
    return seed, {"open": [not loop.is_closed() for loop in loops]}
"""
    built = build_settings(source, EPISODES)
    bound = load(built).calls
    assert bound is not None
    request = {"id": "c", "arguments": build_episode_call()}
    shown = [bound.read(bound.call(request), request).value["info"]["open"] for _ in range(2)]
    assert shown == [[True], [False, True]]


AREAL = """
class MathAgent:
    def __init__(self, temperature=1.0, **kwargs):
        self.temperature = temperature

    async def run(self, data, **extra_kwargs):
        http_client = extra_kwargs.get("http_client", None)
        assert data["messages"][0]["content"] == "2+2?" and http_client is None
        assert extra_kwargs["base_url"].endswith("/v1") and extra_kwargs["api_key"] == "key-0"
        return {"chatcmpl-1": self.temperature, "chatcmpl-2": float(data["answer"])}
"""


def test_agent_of_areal_runs_unchanged() -> None:
    outcome = play(AREAL, {"kwargs": {"temperature": 0.5}})
    assert outcome.reason is None, outcome.message
    assert outcome.value["rewards"] == {"chatcmpl-1": 0.5, "chatcmpl-2": 4.0}


STEPS = """
made = []
class Agent:
    def __init__(self):
        made.append("init")
    {setup}def setup(self, episode):
        made.append(f"setup {{episode}}")
    {run}def run(self, prompt):
        made.append("run")
        {body}
    {close}def close(self):
        made.append("close")
"""


@pytest.mark.parametrize("kinds", ["  ", "async async async", "async  ", "  async"])
@pytest.mark.parametrize("body", ["return 1", "raise LookupError('no')", "raise SystemExit(3)"])
def test_setup_and_close_surround_each_episode_however_it_ends(kinds: str, body: str) -> None:
    setup, run, close = (f"{kind} " if kind else "" for kind in kinds.split(" "))
    built = build_settings(STEPS.format(setup=setup, run=run, close=close, body=body), EPISODES)
    bound = load(built).calls
    assert bound is not None
    for _ in range(2):
        try:
            bound.call({"id": "c", "arguments": build_episode_call()})
        except (LookupError, SystemExit):
            assert body != "return 1"
    made = sys.modules["rljob_reward_function"].made
    assert made == ["init", *["setup 3/1", "run", "close"] * 2]


@pytest.mark.parametrize(
    ("setup", "close", "expected"),
    [
        ("pass", "raise LookupError('in close')", "LookupError: in close"),
        ("raise LookupError('in setup')", "raise OSError('in close')", "LookupError: in setup"),
    ],
)
def test_first_failure_of_an_episode_is_its_reason(setup: str, close: str, expected: str) -> None:
    source = f"class A:\n    def setup(self): {setup}\n    def run(self): return 1\n    def close(self): {close}"
    outcome = play(source)
    assert (outcome.value, outcome.reason) == (None, "exception")
    assert expected in outcome.message


FAKE_OPENAI = """
class OpenAI:
    def __init__(self, http_client, **given):
        self.given, self.closed = given, False
    def close(self): self.closed = True
class AsyncOpenAI(OpenAI):
    async def close(self): self.closed = True
DefaultHttpxClient = DefaultAsyncHttpxClient = dict
"""


@pytest.fixture
def _openai(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("openai")
    exec(FAKE_OPENAI, module.__dict__)
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "openai", module)


@pytest.mark.usefixtures("_openai")
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_program_gets_an_openai_client_of_its_kind(kind: str) -> None:
    source = f"clients = []\n{kind} run(client):\n    clients.append(client)\n    return None, dict(client.given)"
    info = show(source)
    assert info == {"base_url": "http://127.0.0.1:1/v1", "api_key": "key-0", "timeout": 60.0}
    [client] = sys.modules["rljob_reward_function"].clients
    assert (type(client).__name__, client.closed) == ("AsyncOpenAI" if "async" in kind else "OpenAI", True)


def test_program_that_needs_a_client_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"takes client, which needs the package openai; add it to runner.function"):
        load(build_settings("def run(client): ...", EPISODES))
    assert play("def run(client=None): return client is None").value["reward"] == 1.0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def go(prompt): ...", "neither run nor a class with run was found (it defines go)"),
        ("def run(promt): ...", "rename promt to prompt"),
        ("class Agent:\n    def __init__(self, n): ...\n    def run(self): ...", "Agent(n) requires n"),
        ("run = 3", "run is a int"),
        ("def run(", "SyntaxError"),
    ],
)
def test_source_without_a_program_is_refused(source: str, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        load(build_settings(source, EPISODES))
    assert expected in str(raised.value)


def test_client_that_is_made_while_the_file_is_imported_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("openai")
    exec("class OpenAIError(Exception): pass\ndef OpenAI(): raise OpenAIError('api_key')", module.__dict__)
    module.OpenAIError.__module__ = "openai"
    monkeypatch.setitem(sys.modules, "openai", module)
    with pytest.raises(UserError, match=r"create clients in run\(\)"):
        load(build_settings("import openai\nclient = openai.OpenAI()\ndef run(): ...", EPISODES))


ADAPTER = """
def adopt(value, args): return value(**args)
def load(id, args): return (id, args)
def is_environment(name, value): return name == "Sums"
async def play(environment, episode, model):
    return {"info": {"environment": environment, "episode": episode.id, "url": model.access.url}}
"""


OWN = {"framework": "sums", "adapter": "rljob_sums.adapter"}


@pytest.fixture
def _adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(OWN["adapter"])
    exec(ADAPTER, module.__dict__)
    monkeypatch.setitem(sys.modules, "rljob_sums", types.ModuleType("rljob_sums"))
    monkeypatch.setitem(sys.modules, OWN["adapter"], module)


@pytest.mark.usefixtures("_adapter")
def test_environment_of_a_source_or_an_id_is_played_by_its_adapter() -> None:
    source = "class Other: ...\nclass Sums(dict): ..."
    shown = show(source, {**OWN, "factory_args": {"n": 1}})
    assert shown == {"environment": {"n": 1}, "episode": "3/1", "url": "http://127.0.0.1:1"}
    arguments = {"id": "Sums-v0", "args": {"n": 2}}
    own = {"module": "rljob_service.worker.environments", "entrypoint": "make", **OWN}
    assert show("", {**own, "factory_args": arguments})["environment"] == ["Sums-v0", {"n": 2}]
    named = {**arguments, "id": "collections:Counter", "args": {"a": 3}}
    assert show("", {**own, "factory_args": named})["environment"] == {"a": 3}
    with pytest.raises(UserError, match="no environment of sums was found"):
        load(build_settings("def run(): ...", EPISODES, **OWN))
    missing = {**arguments, "id": "no_such_package:Env"}
    with pytest.raises(UserError, match=r"agent.environment.packages"):
        load(build_settings("", EPISODES, **own, factory_args=missing))


FAILING = """
import json
def load(id, args):
    if id == "missing":
        import no_such_package
    return json.loads(id)
def play(environment, episode, model): return environment["reward"]
"""


def test_failures_of_a_named_environment_have_the_field_and_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(OWN["adapter"])
    exec(compile(FAILING, "/site-packages/adapter.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "rljob_sums", types.ModuleType("rljob_sums"))
    monkeypatch.setitem(sys.modules, OWN["adapter"], module)

    def settings(id: str) -> dict[str, Any]:
        own = {"module": "rljob_service.worker.environments", "entrypoint": "make", **OWN}
        return {**own, "factory_args": {"id": id, "args": {}}}

    outcome = play("", settings("{}"))
    assert outcome.message == "agent.environment.id: /site-packages/adapter.py:7: KeyError: 'reward'"
    with pytest.raises(UserError, match=r"^agent.environment.id: .*decoder.py:\d+: JSONDecodeError: "):
        load(build_settings("", EPISODES, **settings("{")))
    with pytest.raises(UserError, match=r"adapter.py:5: ModuleNotFoundError: .*; add its package to agent.environment"):
        load(build_settings("", EPISODES, **settings("missing")))


def test_plugin_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(
        UserError, match=r"^agent.environment.framework: the plugin rljob_sums.adapter cannot be imported"
    ):
        load(build_settings("class Sums: ...", EPISODES, **OWN))


def test_reply_is_json() -> None:
    assert json.loads(json.dumps(play("def run(): return 1").value)) == {
        "reward": 1.0, "rewards": {}, "state": {}, "info": {}, "seats": [],
    }  # fmt: skip
