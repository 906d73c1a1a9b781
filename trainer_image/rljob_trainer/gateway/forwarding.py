"""Models besides the policy: requests for a model of agent.models go to its endpoint, and its answer comes back as it
is, streams included.

What they answer never trains and counts as no turn. A program needs no key of theirs: the gateway has it. The client's
SDK retries 429 and 5xx of an endpoint as if it had called the endpoint itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.manifest.agent import OtherModel
from rljob_api.wire.contract import ENV_MODEL_API_KEY
from rljob_trainer.gateway.types import RequestError
from rljob_trainer.outages import FIRST_ANSWER_SECONDS, Dependency, Outages, hide_secrets

_SENT: Final = ("Accept", "anthropic-beta", "anthropic-version", "openai-beta")
"""Headers of a request that the endpoint gets, besides the key and the type of the body."""
_RETURNED: Final = ("Content-Type", "Retry-After", "request-id", "retry-after-ms", "x-request-id", "x-should-retry")
_CONNECT_SECONDS: Final = 30.0
_AWAY_STATUSES: Final = (401, 402, 404, 405)
_MAX_REASON_CHARACTERS: Final = 300
_FIRST_CHUNK_BYTES: Final = 4096
"""Enough for the reason of a refusal."""


def read_api_keys(models: Sequence[OtherModel], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each model that has one, by its name. Raise UserError if its variable is empty or missing."""
    keys = {}
    for index, model in enumerate(models):
        reference = model.api_key_secret_ref
        if reference is None:
            continue
        keys[model.name] = variables.get(f"{ENV_MODEL_API_KEY}{index}", "").strip()
        if not keys[model.name]:
            raise UserError(
                f"spec.agent.models[{index}].apiKeySecretRef: Secret {reference.name} has no key {reference.key}, or "
                f"it is empty; with `rljob run` set the variable {reference.key}"
            )
    return keys


def watch_models(models: Sequence[OtherModel], outages: Outages) -> dict[str, Dependency]:
    """Return what learns whether each model answers, by name."""
    return {
        model.name: outages.watch(
            f"spec.agent.models[{index}] ({hide_secrets(model.url)})",
            "make it answer at its url, or correct its key",
            first_answer_seconds=FIRST_ANSWER_SECONDS,
        )
        for index, model in enumerate(models)
    }


def _record(health: Dependency, status: int) -> None:
    """A refusal of one request says nothing about others; one of the key or of the URL does, if they were right."""
    if status < 400:
        health.succeeded()
    elif status >= 500 or (status in _AWAY_STATUSES and health.has_answered):
        health.failed(f"it answered {status}")


class OtherModels:
    """The models of agent.models."""

    def __init__(
        self, models: Sequence[OtherModel], api_keys: Mapping[str, str], health: Mapping[str, Dependency] | None = None
    ) -> None:
        """`api_keys`: by name, see read_api_keys. `health`: by name, see watch_models."""
        self._models = {model.name: model for model in models}
        self._health = health or watch_models(models, Outages())
        self._api_keys = api_keys
        self._session: aiohttp.ClientSession | None = None

    @property
    def names(self) -> list[str]:
        """The `model` of requests that are forwarded."""
        return list(self._models)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: web.Request, body: Mapping[str, Any]) -> tuple[web.StreamResponse, str]:
        """Return the endpoint's answer, which the client has got, and why it refused; empty if it did not.

        `body["model"]` must be one of `names`. Raise RequestError if the endpoint cannot be reached.
        """
        model = self._models[body["model"]]
        url = model.url.rstrip("/") + request.path_qs.removeprefix("/v1")  # clients send ?beta=true
        headers = {name: request.headers[name] for name in _SENT if name in request.headers}
        if key := self._api_keys.get(model.name):
            headers |= {"x-api-key": key} if "x-api-key" in request.headers else {"Authorization": f"Bearer {key}"}
        given, health = {**body, "model": model.model or model.name}, self._health[model.name]
        try:
            async with self._open().post(url, json=given, headers=headers, allow_redirects=False) as answer:
                _record(health, answer.status)
                return await _copy(request, answer, model)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            health.failed(reason)
            message = f"{model.name}: {url} did not answer: {reason}; check url of agent.models"
            raise RequestError(502, "model_unreachable", message, may_retry=True) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The deadline of the episode bounds an answer: its client then leaves.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=True,
            )
        return self._session


async def _copy(
    request: web.Request, answer: aiohttp.ClientResponse, model: OtherModel
) -> tuple[web.StreamResponse, str]:
    headers = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
    # Before the status is sent, an endpoint that breaks off is an error that the client may retry.
    first = await answer.content.read(_FIRST_CHUNK_BYTES)
    response = web.StreamResponse(status=answer.status, headers=headers)
    try:
        await response.prepare(request)
        await response.write(first)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except aiohttp.ClientError as error:  # of either side; the client gets a body without an end
        raise ConnectionResetError(str(error)) from error
    if answer.status < 400:
        return response, ""
    text = " ".join(first.decode(errors="replace").split())[:_MAX_REASON_CHARACTERS]
    return response, f"{model.name}: its endpoint answered {answer.status}: {text}"
