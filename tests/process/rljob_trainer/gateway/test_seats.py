"""Several seats at one gateway, with OpenAI's client: each trajectory has the tokens of its own answers alone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import openai
import pytest

from rljob_trainer.agents.base import Recording
from tests.support.episodes import listed
from tests.support.gateways import SpelledPolicy, make_task, running_gateway

GAME = [{"role": "user", "content": "Your move."}]


@pytest.fixture
async def seated():
    """Return a function that opens an episode with seats: its client, and what it has recorded."""
    async with AsyncExitStack() as stack:

        async def begin(policy: SpelledPolicy, seats=("a", "b"), **fields):
            gateway = await stack.enter_async_context(running_gateway(seats=seats and list(seats), **fields))
            episode = gateway.open(make_task(policy))
            access = episode.start_attempt()[1]
            client = openai.AsyncOpenAI(base_url=f"{access.url}/v1", api_key=access.api_key, max_retries=0)
            return await stack.enter_async_context(client), episode

        yield begin


async def ask(client, seat, messages, session=None):
    """Let a seat answer, which becomes a part of its conversation."""
    headers = {"X-Session-ID": session} if session else {}
    model = f"policy/{seat}" if seat else "policy"
    completion = await client.chat.completions.create(model=model, messages=messages, extra_headers=headers)
    messages.append({"role": "assistant", "content": completion.choices[0].message.content})
    return completion.id


def spans(recording: Recording):
    """Return of each turn the tokens, and those before it, as recorded."""
    found = []
    for segment in listed(recording.segments):
        for turn in sorted(set(segment.turns) - {-1}):
            places = [index for index, owner in enumerate(segment.turns) if owner == turn]
            found.append((segment.token_ids[: places[0]], segment.token_ids[places[0] : places[-1] + 1]))
    return found


async def test_interleaved_seats_have_their_own_tokens_and_turns(seated):
    policy = SpelledPolicy("one", "uno", "two", "dos", "three")
    client, episode = await seated(policy)
    conversations = {"a": list(GAME), "b": list(GAME)}  # equal at first: only the seat tells them apart
    for seat in "ababa":
        await ask(client, seat, conversations[seat])
        conversations[seat].append({"role": "user", "content": "Next."})

    recording = episode.read()
    assert (recording.turns, [each.seat for each in recording.seats]) == ([], ["a", "b"])
    texts = [[turn.text for turn in each.turns] for each in recording.seats]
    assert texts == [["one", "two", "three"], ["uno", "dos"]]
    for each, numbers in zip(recording.seats, ((0, 2, 4), (1, 3)), strict=True):
        assert len(each.segments) == 1, each.breaks
        expected = [(policy.prompts[number], policy.completions[number].token_ids) for number in numbers]
        assert spans(each) == expected, f"seat {each.seat}"
    assert recording.waits_for == "computes since its turn 5"


async def test_equal_seats_at_once_are_two_trajectories_of_two_samples(seated):
    policy = SpelledPolicy("same", "same", "same", "same")
    client, episode = await seated(policy)
    conversations = {(seat, session): list(GAME) for seat in "ab" for session in ("1", "2")}
    await asyncio.gather(*[ask(client, seat, said, session) for (seat, session), said in conversations.items()])
    recording = episode.read()
    assert sorted((each.seat, each.session, len(each.turns)) for each in recording.seats) == [
        ("a", "1", 1),
        ("a", "2", 1),
        ("b", "1", 1),
        ("b", "2", 1),
    ]


async def test_each_seat_has_its_own_limit_of_turns(seated):
    client, episode = await seated(SpelledPolicy("1", "2", "3"), maxAssistantTurns=1)
    for seat in "ab":
        await ask(client, seat, list(GAME))
    with pytest.raises(openai.BadRequestError, match="maxAssistantTurns"):
        await ask(client, "a", [{"role": "user", "content": "again"}])
    assert [len(each.turns) for each in episode.read().seats] == [1, 1]


async def test_the_policy_without_a_seat_is_a_player_that_does_not_train(seated):
    client, episode = await seated(SpelledPolicy("mine", "theirs"))
    await ask(client, "a", list(GAME))
    await ask(client, "", list(GAME))
    recording = episode.read()
    assert [turn.text for turn in recording.turns] == ["theirs"]
    assert [[turn.text for turn in each.turns] for each in recording.seats] == [["mine"]]


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        (("a", "b"), "policy/a, policy/b \\(agent.seats\\), which train"),
        (None, "policy/SEAT with the names of agent.seats"),
    ],
)
async def test_an_unknown_seat_is_refused_with_the_models_that_exist(seated, seats, message):
    client, _ = await seated(SpelledPolicy("x"), seats=seats)
    with pytest.raises(openai.NotFoundError, match=message):
        await ask(client, "c", list(GAME))


async def test_rewards_are_posted_for_a_seat(seated):
    client, episode = await seated(SpelledPolicy("x", "y"))
    [await ask(client, seat, list(GAME)) for seat in "ab"]
    url, headers = f"{client.base_url}rewards", {"Authorization": f"Bearer {client.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for body, status in (
            ({"reward": 1, "seat": "a"}, 200),
            ({"reward": -0.5, "seat": "b", "turn": 0}, 200),
            ({"reward": 1, "seat": "c"}, 400),
        ):
            async with session.post(url, json=body) as response:
                assert response.status == status, await response.text()
    a, b = episode.read().seats
    assert (a.reward, b.reward) == (1.0, None)
    assert list(b.rewards.values()) == [-0.5]
