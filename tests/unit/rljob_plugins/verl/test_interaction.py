"""verl's former interaction classes run unchanged, although each call may meet another process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.paths import ROOT
from tests.support.agent_functions import call_user

SUMS = (ROOT / "tests" / "data" / "rewards" / "verl_interaction.py").read_text()
CONVERSATION = [
    {"role": "user", "content": "An example: 1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "Wrong."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Wrong."},
    {"role": "assistant", "content": "4"},
]


def test_first_turn_of_an_unchanged_class() -> None:
    outcome = call_user(SUMS, messages=CONVERSATION[:4], ground_truth="4", episode="e")
    assert outcome.value == {
        "text": "That is wrong. You have had 1 try.",
        "reward": 0.0,
        "state": {},
        "info": {"answers": ["3"], "level": "easy"},
    }, outcome.message


def test_earlier_turns_are_repeated_in_a_new_process() -> None:
    second = call_user(SUMS, messages=CONVERSATION[:6], turn=1, episode="e")
    assert second.value["info"]["answers"] == ["3", "5"], "the turns of the prompt's example are not the user's"
    third = call_user(SUMS, messages=CONVERSATION, turn=2, episode="e")
    assert (third.value["text"], third.value["reward"]) == (None, 1.0)
    assert third.value["info"] == {"answers": ["3", "5", "4"], "level": "easy", "response": "That is right."}


def test_methods_get_what_verl_passes_and_the_columns_by_name() -> None:
    kwargs = {"interaction_kwargs": {"name": "sums", "ground_truth": "7", "level": "hard"}, "split": "train"}
    outcome = call_user(SUMS, messages=CONVERSATION[:4], extra_info=kwargs)
    assert outcome.value["info"]["level"] == "hard"
    columns = call_user(SUMS, messages=CONVERSATION[:4], extra_info={"level": "medium"})
    assert columns.value["info"]["level"] == "medium"


def test_config_has_the_kwargs_of_the_function() -> None:
    outcome = call_user(SUMS, {"kwargs": {"right": "Yes!"}}, messages=CONVERSATION, turn=2)
    assert outcome.value["info"]["response"] == "Yes!"


PLAIN = """
class Interaction:
    def generate_response(self, instance_id, messages):
        return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "reason", "message"),
    [
        ("(True, None, 1.0, None)", None, ""),
        ("(True, 'x', None, {})", None, ""),
        ("'x'", "bad_return", "expected (should_terminate, response, score, extra)"),
        ("(1, 'x', 1.0, {})", "bad_return", "should_terminate is int 1; expected a bool"),
        ("(False, None, 1.0, {})", "bad_return", "response is NoneType None; expected a str"),
        ("(False, 'x', 'y', {})", "bad_return", "reward is str 'y'"),
        ("1 / 0", "exception", "function.py:4: ZeroDivisionError"),
    ],
)
def test_class_without_base_and_start_is_an_interaction(returned: str, reason: str | None, message: str) -> None:
    outcome = call_user(PLAIN.replace("RETURNED", returned))
    assert outcome.reason == reason, outcome.message
    assert message in outcome.message


def test_interaction_is_finalized_also_after_a_failure() -> None:
    source = """
import json
log = []
class Interaction:
    def start_interaction(self, instance_id, **kwargs):
        log.append("start")
    def generate_response(self, instance_id, messages, **kwargs):
        log.append("generate")
        raise ValueError(json.dumps(log))
    def finalize_interaction(self):
        raise ValueError(json.dumps([*log, "finalize"]))
"""
    outcome: Any = call_user(source)
    assert (outcome.reason, '["start", "generate", "finalize"]' in outcome.message) == ("exception", True)
