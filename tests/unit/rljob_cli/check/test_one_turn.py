"""Conversations of one answer, for calls of a reward without an episode."""

from rljob_api.manifest.agent import Agent
from rljob_cli.check.one_turn import describe_one_turn

SOURCE = {"function": {"inline": "x"}}


def test_single_turn_has_no_conversation():
    assert describe_one_turn(Agent(), "2+2?", "4") == {}


def test_loop_has_all_that_the_driver_sends():
    agent = Agent.model_validate({"type": "loop", "user": SOURCE})
    asked, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    for prompt in ("2+2?", [asked]):
        assert describe_one_turn(agent, prompt, "4") == {
            "messages": [asked, answer],
            "turns": [{"text": "4", "reward": None, "tool_calls": []}],
            "state": {},
            "end": "user",
        }


def test_episode_of_a_program_ends_when_it_returns():
    agent = Agent.model_validate({"type": "program", "runner": SOURCE})
    assert describe_one_turn(agent, "2+2?", "4")["end"] == "returned"
