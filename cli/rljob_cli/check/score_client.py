"""A client of one reward server, which sends samples, groups, or both, by the reward's scope, as the driver does.

Invariant: results are in the order of the samples, one each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from pydantic import BaseModel

from rljob_api.errors import UserError
from rljob_api.manifest.reward import Reward, Scope
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.protocol import GroupRequest, GroupResult, ScoreRequest, ScoreResult

_CONNECT_SECONDS = 30.0


class RewardClient:
    """Sends at most as many concurrent requests as the server has slots."""

    def __init__(self, session: aiohttp.ClientSession, url: str, slots: int) -> None:
        self._session = session
        self._url = url
        self._slots = asyncio.Semaphore(slots)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        return ScoreResult.model_validate_json(await self._post(UrlPath.SCORE, request))

    async def score_group(self, request: GroupRequest) -> list[ScoreResult]:
        return GroupResult.model_validate_json(await self._post(UrlPath.SCORE_GROUP, request)).results

    async def _post(self, path: UrlPath, request: BaseModel) -> bytes:
        async with self._slots, self._session.post(self._url + path, json=request.model_dump(mode="json")) as response:
            body = await response.read()
            if response.status != 200:
                raise UserError(f"the reward server answered {response.status}: {body.decode(errors='replace')}")
            return body


async def score_all(
    url: str, token: str, reward: Reward, groups: Sequence[Sequence[ScoreRequest]]
) -> list[list[ScoreResult]]:
    """Return the results of all groups. The requests of a comparing judge have no timeout."""
    compares = reward.judge is not None and reward.judge.compare is not None
    timeout = aiohttp.ClientTimeout(total=None if compares else reward.timeout_seconds + _CONNECT_SECONDS)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        client = RewardClient(session, url, reward.slots)
        return list(await asyncio.gather(*(_score_samples(client, reward.scope, group) for group in groups)))


async def _score_samples(client: RewardClient, scope: Scope, samples: Sequence[ScoreRequest]) -> list[ScoreResult]:
    if scope == "group":
        return await client.score_group(_build_group(samples, None))
    results = list(await asyncio.gather(*map(client.score, samples)))
    valid = [number for number, result in enumerate(results) if result.valid]
    if scope == "sampleThenGroup" and valid:
        request = _build_group([samples[number] for number in valid], [results[number] for number in valid])
        for number, result in zip(valid, await client.score_group(request), strict=True):
            results[number] = result
    return results


def _build_group(samples: Sequence[ScoreRequest], results: list[ScoreResult] | None) -> GroupRequest:
    return GroupRequest(id=f"group-of-{samples[0].id}", lane=samples[0].lane, samples=list(samples), results=results)
