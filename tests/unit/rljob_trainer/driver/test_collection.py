"""Requests of a collection to its rewards."""

from rljob_api.manifest.roles import Sampling
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import CollectionPlan, Collector, build_request
from rljob_trainer.episodes.types import ContextBreak, Episode, EpisodeEnd, Group, Segment, ToolCall, Turn
from tests.support.episodes import episode


def test_request_has_the_token_ids_of_the_prompt_and_of_the_completion():
    prompt = Prompt(7, "2+2?", [1, 2], ground_truth="4", extra_info={"level": 3})
    ended = episode([1, 2, 8, 9], [0, 0, 1, 1], text="4", index=(7, 0, 1))
    request = build_request(prompt, ended, CollectionPlan("train", 1, 2, Sampling(), 0, "g"))
    assert (request.prompt_ids, request.completion_ids) == ([1, 2], [8, 9])
    assert request.extra_info == {"level": 3, "truncated": False, "num_tokens": 2}


PLAN = CollectionPlan("train", 1, 2, Sampling(), 0, "g")


def talk(**fields):
    """Return an episode of two answers, [5] and [8, 9], in one segment."""
    segment = Segment([1, 2, 5, 6, 8, 9], [0, 0, 1, 0, 1, 1], [0.0] * 6, [0] * 6, [-1, -1, 0, -1, 1, 1])
    call = ToolCall("call_0_0", "add", {"a": 1}, error="timeout: 30 s", seconds=30.0, tool="calc")
    turns = [Turn("a", reward=-0.5, tool_calls=[call]), Turn("b")]
    messages = [{"role": "user", "content": "2+2?"}]
    return Episode(7, 0, 1, [segment], turns, messages=messages, state={"tries": 2}, end=EpisodeEnd.USER, **fields)


def test_single_turn_request_has_only_its_former_fields():
    prompt = Prompt(7, "2+2?", [1, 2], ground_truth="4", extra_info={"level": 3})
    ended = episode([1, 2, 8, 9], [0, 0, 1, 1], text="4", index=(7, 0, 1))
    assert build_request(prompt, ended, PLAN).model_dump_json() == (
        '{"id":"g/train/1/0/1","lane":"train","prompt":"2+2?","completion":"4","ground_truth":"4","data_source":"",'
        '"extra_info":{"level":3,"truncated":false,"num_tokens":2},"prompt_ids":[1,2],"completion_ids":[8,9]}'
    )


def test_request_of_a_conversation_has_the_episode_and_the_tokens_of_the_last_answer():
    request = build_request(Prompt(7, [], [1, 2], extra_info={"level": 3}), talk(), PLAN)
    assert (request.completion, request.prompt_ids, request.completion_ids) == ("b", [1, 2, 5, 6], [8, 9])
    call = {"name": "add", "arguments": {"a": 1}, "error": "timeout: 30 s"}
    assert request.extra_info == {
        "level": 3,
        "truncated": False,
        "num_tokens": 3,
        "messages": [{"role": "user", "content": "2+2?"}],
        "turns": [
            {"text": "a", "reward": -0.5, "tool_calls": [call]},
            {"text": "b", "reward": None, "tool_calls": []},
        ],
        "state": {"tries": 2},
        "end": "user",
    }


def test_request_has_the_prompt_of_the_last_segment():
    ended = talk(breaks=[ContextBreak("history")])
    ended.segments.append(Segment([3, 4], [0, 1], [0.0] * 2, [0] * 2, [-1, 2]))
    request = build_request(Prompt(7, [], [1, 2]), ended, PLAN)
    assert (request.prompt_ids, request.completion_ids) == ([3], [4])


def test_request_has_the_tokens_of_the_last_answer_wherever_its_segment_is():
    ended = talk(breaks=[ContextBreak("branch")])
    ended.segments.insert(1, Segment([3, 4], [0, 1], [0.0] * 2, [0] * 2, [-1, 0]))
    request = build_request(Prompt(7, [], [1, 2]), ended, PLAN)
    assert (request.prompt_ids, request.completion_ids) == ([1, 2, 5, 6], [8, 9])


async def test_each_answer_has_its_own_seed_and_at_most_the_room_that_is_left():
    requests = []

    class Rollouts:
        async def complete(self, token_ids, sampling, seed):
            requests.append((sampling.max_tokens, seed))

    plan = CollectionPlan("train", 1, 2, Sampling(max_tokens=16), 0, "g")
    collector = Collector(None, Rollouts(), None, [])
    for sample in (0, 1):
        generate = collector._bind_generate(Group(3, Prompt(7, [], [1])), sample, plan)
        await generate([1])
        await generate([1, 2], 40)
        await generate([1, 2, 3], 5)
    assert [max_tokens for max_tokens, _ in requests] == [16, 16, 5] * 2
    assert [seed for _, seed in requests] == [
        plan.sample_seed(7, 3, sample, turn) for sample in (0, 1) for turn in (0, 1, 2)
    ]
    assert len({seed for _, seed in requests}) == 6


async def test_strings_that_end_one_answer_are_added_to_those_of_the_job():
    stops = []

    class Rollouts:
        async def complete(self, token_ids, sampling, seed):
            stops.append(sampling.stop)

    plan = CollectionPlan("train", 1, 2, Sampling(stop=["END"]), 0, "g")
    generate = Collector(None, Rollouts(), None, [])._bind_generate(Group(3, Prompt(7, [], [1])), 0, plan)
    await generate([1], None, ["\n"])
    await generate([1])
    assert stops == [["END", "\n"], ["END"]]
