"""A client of one reward server: sends samples or groups as the driver does. Results are in the samples' order."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.scores import GroupRequest, GroupResult, ScoreRequest, ScoreResult
from rljob_cli.check import token_ids

GUESSED = "verl0.2"
"""The form that `auto` chooses by text in the source."""
_CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 1.0


async def read_info(url: str, token: str) -> dict[str, Any]:
    """Return what a server says about the function that it serves."""
    headers, timeout = {"Authorization": f"Bearer {token}"}, aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
    async with (
        aiohttp.ClientSession(url, timeout=timeout, headers=headers) as session,
        session.get(UrlPath.INFO) as response,
    ):
        found: dict[str, Any] = await response.json()
    return found


def describe_guess(reward: Reward, info: Mapping[str, Any]) -> str:
    """Return how to set another form than the one that the function's source, not its parameters, led to."""
    is_guess = reward.function is not None and reward.function.signature == "auto" and info["signature"] == GUESSED
    return (
        f"taken as {GUESSED}, by its source: gets prompt and answer; function.signature: verl sets another" * is_guess
    )


async def score_all(
    url: str,
    token: str,
    job: RLJob,
    reward: Reward,
    groups: list[list[ScoreRequest]],
    say: Callable[[str], None] = lambda line: None,
) -> list[list[ScoreResult]]:
    """Return the results of all groups. The requests of a comparing judge have no timeout.

    While a judge's endpoint that has answered before is away, wait up to spec.outageSeconds, and `say` so.
    A reward that reads token ids gets those of the job's model for samples that have none.
    """
    compares = reward.judge is not None and reward.judge.compare is not None
    timeout = aiohttp.ClientTimeout(total=None if compares else reward.timeout_seconds + _CONNECT_SECONDS)
    headers = {"Authorization": f"Bearer {token}"}
    slots, has_answered = asyncio.Semaphore(reward.slots), False
    async with aiohttp.ClientSession(url, timeout=timeout, headers=headers) as session:
        async with session.get(UrlPath.INFO) as response:
            reads = (await response.json()).get("reads", ()) if response.status == 200 else ()
        if {"rendered", "tokens", "segments"}.intersection(reads) and token_ids.are_missing(groups):
            groups = await asyncio.to_thread(token_ids.add_token_ids, job, groups)

        async def post(path: UrlPath, request: ScoreRequest | GroupRequest) -> bytes:
            async with slots, session.post(path, json=request.model_dump(mode="json")) as response:
                body = await response.read()
                if response.status != 200:
                    raise UserError(f"the reward server answered {response.status}: {body.decode(errors='replace')}")
                return body

        async def score(sample: ScoreRequest) -> ScoreResult:
            return (await wait_out(lambda: score_once(sample)))[0]

        async def score_once(sample: ScoreRequest) -> list[ScoreResult]:
            return [ScoreResult.model_validate_json(await post(UrlPath.SCORE, sample))]

        async def wait_out(send: Callable[[], Awaitable[list[ScoreResult]]]) -> list[ScoreResult]:
            """Send again what found the endpoint away, unless that has never answered: it may be a wrong one."""
            nonlocal has_answered
            ends_at = time.monotonic() + job.spec.outage_seconds
            while True:
                results = await send()
                away = next((each for each in results if each.reason is InvalidReason.UNREACHABLE), None)
                has_answered |= away is None
                if away is None or not has_answered or time.monotonic() >= ends_at:
                    return results
                say(f"reward {reward.name} waits: {away.message}")
                await asyncio.sleep(_RETRY_SECONDS)

        async def score_together(samples: list[ScoreRequest], results: list[ScoreResult] | None) -> list[ScoreResult]:
            first = samples[0]
            request = GroupRequest(id=f"group-of-{first.id}", lane=first.lane, samples=samples, results=results)

            async def send() -> list[ScoreResult]:
                return GroupResult.model_validate_json(await post(UrlPath.SCORE_GROUP, request)).results

            return await wait_out(send)

        async def score_group(samples: list[ScoreRequest]) -> list[ScoreResult]:
            if reward.scope == "group":
                return await score_together(samples, None)
            results = list(await asyncio.gather(*map(score, samples)))
            valid = [number for number, result in enumerate(results) if result.valid]
            if reward.scope == "sampleThenGroup" and valid:
                together = await score_together([samples[n] for n in valid], [results[n] for n in valid])
                for number, result in zip(valid, together, strict=True):
                    results[number] = result
            return results

        return list(await asyncio.gather(*map(score_group, groups)))
