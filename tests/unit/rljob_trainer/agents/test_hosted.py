"""Episodes that a runner plays: every end, every failure, rewards, attempts, and what ends the job."""

import asyncio

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.base import InvalidReason
from rljob_trainer.episodes.types import EpisodeEnd, PromptTooLongError
from tests.support.agent_services import GivenPolicy, complete
from tests.support.hosted_episodes import MESSAGES, FakeHost, make_program, play_hosted


def program(*rewards, turns=1, **reply):
    """Return a program that asks for answers; `rewards`: of the answers, in order."""

    async def run(call, episode):
        ids = [await episode.answer() for _ in range(turns)]
        return {"rewards": dict(zip(ids, rewards, strict=False)), **reply}

    return run


async def test_episode_has_what_the_gateway_recorded_and_what_the_program_returned():
    host = FakeHost(program(0.25, None, turns=2, reward=1.5, state={"board": "x"}, info={"moves": 2}))
    episode = await play_hosted(host, GivenPolicy("3", complete("4", truncated=True)))
    assert (episode.end, episode.failure, episode.own_reward) == (EpisodeEnd.RETURNED, None, 1.5)
    assert [(turn.text, turn.reward, turn.truncated) for turn in episode.turns] == [
        ("3", 0.25, False),
        ("4", None, True),
    ]
    assert (episode.state, episode.info, episode.generation) == ({"board": "x"}, {"moves": 2}, "g")
    assert (episode.prompt_index, episode.group, episode.sample) == (7, 5, 2)
    assert episode.messages[-1] == {"role": "assistant", "content": "4"}
    assert episode.num_sampled == len(complete("3").token_ids) + len(complete("4", truncated=True).token_ids)
    assert host.episodes[0].num_closed == 1


async def test_runner_gets_the_row_the_limits_and_the_key():
    host = FakeHost(program(turns=1, reward=1))
    await play_hosted(host, GivenPolicy("4"), make_program(maxAssistantTurns=5, episodeSeconds=30))
    [call], [request] = host.calls, host.requests
    assert (request.id, request.lane, request.function) == ("g/train/1/5/2", "train", "")
    assert (call.episode, call.attempt, call.model.api_key) == ("g/train/1/5/2", 0, "key-0")
    assert (call.prompt, call.ground_truth, call.data_source) == (MESSAGES, "4", "sums")
    assert (call.extra_info, call.seed, call.max_turns) == ({"index": 7, "level": "easy"}, 11, 5)
    assert 0 < call.deadline_seconds <= 30


async def test_another_attempt_has_another_key_and_drops_what_was_recorded():
    async def raise_after_an_answer(call, episode):
        await episode.answer()
        return InvalidReason.EXCEPTION

    host = FakeHost(raise_after_an_answer, program(reward=1.0), retries=1)
    episode = await play_hosted(host, GivenPolicy("wrong", "right"))
    assert [call.model.api_key for call in host.calls] == ["key-0", "key-1"]
    assert {request.id for request in host.requests} == {"g/train/1/5/2"}
    assert ([turn.text for turn in episode.turns], episode.failure) == (["right"], None)


@pytest.mark.parametrize("reason", [InvalidReason.EXCEPTION, InvalidReason.WORKER_DIED, InvalidReason.UNREACHABLE])
async def test_runner_that_fails_makes_the_episode_invalid_with_the_last_refusal(reason):
    async def run(call, episode):
        await episode.answer()
        episode.recording.refusal = "turn_limit: the episode has 1 answers"
        return reason

    episode = await play_hosted(FakeHost(run), GivenPolicy("4"))
    assert (episode.end, episode.own_reward, episode.score) == (EpisodeEnd.FAILED, None, None)
    assert (episode.failure.service, len(episode.turns)) == ("runner", 1)
    assert str(episode.failure) == (
        f"spec.agent.runner: {reason}: agent.py:3: KeyError: 'a'; the gateway had refused a request: turn_limit: the "
        "episode has 1 answers"
    )


@pytest.mark.parametrize(
    "reply", ["not a result", {"reward": "much"}, {"reward": float("nan")}, {"rewards": {"0": float("inf")}}]
)
async def test_reply_that_breaks_the_protocol_is_invalid(reply):
    async def run(call, episode):
        await episode.answer()
        return reply

    episode = await play_hosted(FakeHost(run), GivenPolicy("4"))
    assert (episode.end, episode.failure.reason) == (EpisodeEnd.FAILED, "bad_return")
    assert "not a result" in episode.failure.message
    assert episode.turns[0].reward is None, "no reward is not 0"


async def test_program_that_never_calls_the_model_is_invalid_with_a_row():
    host = FakeHost(lambda call, episode: {"reward": 1.0})
    episode = await play_hosted(host, GivenPolicy())
    assert (episode.end, episode.failure.reason) == (EpisodeEnd.FAILED, "no_turns")
    assert episode.failure.message == "the program ended without an answer of the model"
    assert (episode.num_tokens, episode.num_sampled, episode.messages) == (2, 0, MESSAGES)


async def test_prompt_that_the_gateway_refused_is_the_reason_for_no_turns():
    def run(call, episode):
        episode.recording.refusal = "context_length_exceeded: the prompt has 900 tokens"
        return {"reward": 1.0}

    episode = await play_hosted(FakeHost(run), GivenPolicy())
    assert "context_length_exceeded: the prompt has 900 tokens" in episode.failure.message


async def test_rewards_of_turns_come_from_the_gateway_and_the_program_by_id_or_number():
    async def run(call, episode):
        ids = [await episode.answer() for _ in range(4)]
        episode.recording.rewards = {ids[0]: 0.1, ids[1]: 0.2, "3": -1.0}
        episode.recording.reward = 5.0
        return {"rewards": {"1": 0.5, ids[2]: None}}

    episode = await play_hosted(FakeHost(run), GivenPolicy(*"abcd"))
    assert [turn.reward for turn in episode.turns] == [0.1, 0.5, None, -1.0]
    assert episode.own_reward == 5.0, "posted, since the program returned none"


@pytest.mark.parametrize(("returned", "expected"), [(0.0, 0.0), (None, 5.0)])
async def test_returned_reward_counts_before_the_posted_one(returned, expected):
    async def run(call, episode):
        await episode.answer()
        episode.recording.reward = 5.0
        return {"reward": returned}

    assert (await play_hosted(FakeHost(run), GivenPolicy("a"))).own_reward == expected


@pytest.mark.parametrize("key", ["chatcmpl-other", "1", "-1", "01"])
async def test_reward_of_an_unknown_answer_is_invalid(key):
    episode = await play_hosted(FakeHost(program(rewards={key: 1.0}, reward=1.0)), GivenPolicy("a"))
    assert episode.failure.reason == "bad_return"
    assert f"a reward is for {key}, and no answer" in episode.failure.message


@pytest.mark.parametrize(
    ("reply", "needs_reward", "is_valid"),
    [({}, True, False), ({"reward": None}, True, False), ({"rewards": {"0": None}}, True, False),
     ({}, False, True), ({"reward": 0.0}, True, True), ({"rewards": {"0": 0.0}}, True, True)],
)  # fmt: skip
async def test_episode_without_any_reward_is_invalid_and_never_a_zero(reply, needs_reward, is_valid):
    episode = await play_hosted(FakeHost(program(**reply)), GivenPolicy("a"), needs_reward=needs_reward)
    assert (episode.failure is None) == is_valid
    if not is_valid:
        assert (episode.failure.reason, episode.failure.path) == ("abstained", "spec.agent.runner")
        assert "gave no reward" in episode.failure.message


async def test_episode_ends_at_its_deadline_and_names_what_it_did():
    async def run(call, episode):
        await episode.answer()
        await asyncio.Event().wait()

    host = FakeHost(run)
    episode = await play_hosted(host, GivenPolicy("a"), make_program(episodeSeconds=0.05))
    assert (episode.end, episode.failure.path) == (EpisodeEnd.FAILED, "spec.agent.episodeSeconds")
    assert (episode.failure.service, episode.failure.reason) == ("agent", "deadline")
    assert episode.failure.message == "the episode took more than 0.05 s, while it computes since its turn 1"
    assert (host.num_cancelled, host.episodes[0].num_closed) == (1, 1), "its request ends, and so its process"


async def test_cancelled_episode_cancels_its_request_and_refuses_its_keys():
    started = asyncio.Event()

    async def run(call, episode):
        started.set()
        await asyncio.Event().wait()

    host = FakeHost(run)
    task = asyncio.create_task(play_hosted(host, GivenPolicy()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (host.num_cancelled, host.episodes[0].num_closed) == (1, 1)


@pytest.mark.parametrize("error", [UserError("vLLM rejected a prompt"), TransientError("no rollout answers")])
async def test_error_of_the_policy_ends_the_job_though_the_program_continues(error):
    async def policy(token_ids, max_tokens=None, stop=()):
        raise error

    async def run(call, episode):
        with pytest.raises(type(error)):
            await episode.answer()
        await asyncio.Event().wait()

    host = FakeHost(run)
    with pytest.raises(type(error), match=str(error)):
        await play_hosted(host, policy)
    assert (host.num_cancelled, host.episodes[0].num_closed) == (1, 1)


async def test_prompt_that_is_too_long_for_the_engine_is_the_programs_own_error():
    async def run(call, episode):
        await episode.answer()
        with pytest.raises(PromptTooLongError):
            await episode.answer()
        return {"reward": 1.0}

    episode = await play_hosted(FakeHost(run), GivenPolicy("4", PromptTooLongError(90, 64)))
    assert (episode.end, episode.failure, len(episode.turns)) == (EpisodeEnd.RETURNED, None, 1)


async def test_error_of_the_runners_configuration_ends_the_job():
    def run(call, episode):
        raise UserError("spec.agent.runner: 127.0.0.1 returned 401")

    host = FakeHost(run)
    with pytest.raises(UserError, match=r"spec.agent.runner: 127.0.0.1 returned 401"):
        await play_hosted(host, GivenPolicy())
    assert host.episodes[0].num_closed == 1


async def test_what_requests_asked_in_vain_is_a_part_of_the_episode():
    async def run(call, episode):
        await episode.answer()
        episode.recording.ignored = ["temperature"]
        return {"reward": 1.0}

    assert (await play_hosted(FakeHost(run), GivenPolicy("a"))).ignored == ["temperature"]
