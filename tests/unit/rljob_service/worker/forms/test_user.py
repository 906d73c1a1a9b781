"""Simulated users: what they get by name, every form of reply, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.calls import UserReply
from rljob_api.wire.contract import MAX_USER_REPLY_BYTES
from tests.support.agent_functions import ANSWERS, call_user

RESPOND = "def respond(messages, state):\n    return "


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("'Try again.'", UserReply(text="Try again.")),
        ("None", UserReply()),
        ("('no', 0.5)", UserReply(text="no", reward=0.5)),
        ("('no', None, {'why': {1}})", UserReply(text="no", info={"why": "{1}"})),
        ("(None, True, None)", UserReply(reward=1.0)),
        ("['no', 1, {}, {'n': (1, 2)}]", UserReply(text="no", reward=1.0, state={"n": [1, 2]})),
        ("{'text': 'no', 'reward': __import__('numpy').float32(0.5)}", UserReply(text="no", reward=0.5)),
        (
            "{'text': None, 'state': {'n': 1}, 'info': {'x': float('nan')}}",
            UserReply(state={"n": 1}, info={"x": "nan"}),
        ),
        ("__import__('types').SimpleNamespace and state.update(n=1) or 'no'", UserReply(text="no", state={"n": 1})),
        ("(state.update(n=1), 'no')[1], -1", UserReply(text="no", reward=-1.0, state={"n": 1})),
        ("'\\ud83d'", UserReply(text="?")),
    ],
)
def test_each_form_of_a_reply_is_read(returned: str, expected: UserReply) -> None:
    outcome = call_user(RESPOND + returned)
    assert outcome.reason is None, outcome.message
    assert UserReply.model_validate(outcome.value) == expected


@pytest.mark.parametrize(
    ("returned", "reason", "message"),
    [
        ("3", "bad_return", "respond returned int 3; expected (text or None"),
        ("()", "bad_return", "expected (text or None"),
        ("('a', 1, {}, {}, 5)", "bad_return", "expected (text or None"),
        ("(1, 2, {})", "bad_return", "text is int 1; expected a str"),
        ("('no', 'good', {})", "bad_return", "reward is str 'good'; expected a number or None"),
        ("('no', float('nan'), {})", "not_finite", "reward is nan"),
        ("('no', 1, 'info')", "bad_return", "info is str 'info'; expected a dict"),
        ("('no', 1, {}, [1])", "bad_return", "state is list [1]; expected a dict"),
        ("('no', 1, {}, {'a': {1}})", "bad_return", "state['a'] is a set"),
        ("('no', 1, {}, {1: 2})", "bad_return", "keys must be str"),
        ("{'content': 'no'}", "bad_return", "unknown key content; its keys may be text, reward, info, state"),
        ("{'reward': 1}", "bad_return", 'without "text"'),
        ("'x' * (2 << 20)", "bad_return", "the reply has 2048 KiB as JSON, at most 1024 KiB"),
        ("1 / 0", "exception", "function.py:2: ZeroDivisionError"),
        ("__import__('sys').exit(3)", "exception", "SystemExit: 3"),
    ],
)
def test_malformed_reply_is_a_reason_with_what_was_expected(returned: str, reason: str, message: str) -> None:
    outcome = call_user(RESPOND + returned)
    assert (outcome.value, outcome.reason) == (None, reason)
    assert message in outcome.message
    assert len(outcome.message) <= 2000


def test_reply_of_the_allowed_size_is_kept() -> None:
    length = MAX_USER_REPLY_BYTES - 100
    assert len(call_user(f"def respond(): return 'x' * {length}").value["text"]) == length


def test_deeply_nested_state_is_refused() -> None:
    nest = "    inner = state\n    for _ in range(9999):\n        inner['a'] = inner = {}\n"
    outcome = call_user(f"def respond(state):\n{nest}    return 'x'")
    assert (outcome.reason, outcome.message) == ("bad_return", "respond: state or info is nested too deeply")


@pytest.mark.parametrize(
    ("parameters", "fields", "expected"),
    [
        ("messages", {}, ANSWERS),
        ("prompt", {}, ANSWERS[:1]),
        ("ground_truth", {}, "4"),
        ("answer", {}, "4"),
        ("data_source", {"data_source": "sums"}, "sums"),
        ("turn", {"turn": 3}, 3),
        ("turn", {}, 0),
        ("episode", {"episode": "e7"}, "e7"),
        ("state", {"state": {"n": 1}}, {"n": 1}),
        ("extra_info", {"extra_info": {"level": 2}}, {"level": 2}),
        ("level, messages", {"extra_info": {"level": 2}}, 2),
        ("level=5", {}, 5),
        ("answer", {"extra_info": {"answer": "of the row"}}, "of the row"),
        ("**given", {"extra_info": {"level": 2}}, ["answer", "data_source", "episode", "extra_info", "ground_truth",
                                                   "level", "messages", "prompt", "state", "turn"]),
    ],
)  # fmt: skip
def test_parameters_get_their_values_by_name(parameters: str, fields: dict[str, Any], expected: Any) -> None:
    name = parameters.strip("*").partition("=")[0].partition(",")[0]
    shown = f"sorted({name})" if parameters == "**given" else name
    assert call_user(f"def respond({parameters}): return None, None, {{'seen': {shown}}}", **fields).value["info"] == {
        "seen": expected
    }


def test_column_that_the_row_does_not_have_is_named() -> None:
    outcome = call_user("def respond(messages, level): ...", extra_info={"split": "train"})
    assert outcome.reason == "exception"
    assert "respond(messages, level) requires level, which the row does not have (its other columns: split)" in (
        outcome.message
    )


def test_async_functions_and_methods_are_awaited() -> None:
    assert call_user("async def respond(messages): return 'yes'").value["text"] == "yes"
    assert call_user("class U:\n    async def respond(self, messages): return 'yes'").value["text"] == "yes"


CLASS = """
class Strict:
    def __init__(self, level=1):
        self.level = level
    def respond(self, messages):
        return f"level {self.level}"
strict = Strict(7)
def build(level):
    return lambda messages: f"built {level}"
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "level 1"),
        ({"kwargs": {"level": 2}}, "level 2"),
        ({"factory_args": {"level": 3}}, "level 3"),
        ({"entrypoint": "strict"}, "level 7"),
        ({"entrypoint": "build", "factory_args": {"level": 4}}, "built 4"),
    ],
)
def test_classes_objects_and_factories_are_users(settings: dict[str, Any], expected: str) -> None:
    assert call_user(CLASS, settings).value["text"] == expected


def test_kwargs_are_arguments_of_each_call_of_a_function() -> None:
    assert call_user("def respond(messages, level=1): return str(level)", {"kwargs": {"level": 5}}).value["text"] == "5"


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("def reply(messages): ...", {}, "function.py:1: neither respond nor a class.*set function.entrypoint: reply"),
        ("def respond(messages): ...", {"entrypoint": "respnd"}, "function.py:1: .*did you mean respond"),
        ("\ndef respond(message): ...", {}, "function.py:2: .*rename message to messages"),
        ("respond = 3", {}, "function.py: respond is a int"),
        (CLASS, {"kwargs": {"lvel": 2}}, "does not accept lvel"),
        ("class U:\n    def __init__(self): 1/0\n    def respond(self): ...", {}, "ZeroDivisionError.*function.kwargs"),
        ("def respond(messages): ...", {"factory_args": {"x": 1}}, "requires messages; set function.factoryArgs"),
    ],
)
def test_source_without_a_user_is_refused_with_the_fix(source: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        call_user(source, settings)


def test_calls_share_nothing_but_the_state() -> None:
    source = "def respond(state):\n    state['n'] = state.get('n', 0) + 1\n    return 'again'"
    first = call_user(source)
    second = call_user(source, state=first.value["state"])
    assert (first.value["state"], second.value["state"]) == ({"n": 1}, {"n": 2})
