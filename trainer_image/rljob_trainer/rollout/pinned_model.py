"""Which version of a model in object storage, or which step of a run, a rollout reads: the head has found it."""

import asyncio
import os

import aiohttp

from rljob_api.errors import TransientError
from rljob_api.wire import contract
from rljob_api.wire.discovery import resolve
from rljob_api.wire.ports import listening_port
from rljob_inputs.objects.access import is_object
from rljob_trainer.outages.registry import Dependency
from rljob_trainer.outages.waiting import wait_out

_TIMEOUT = aiohttp.ClientTimeout(total=10)


async def find_model(head: Dependency) -> str:
    """Return what this rollout loads its model by. The head is asked only if it chooses, and waited for."""
    source = os.environ[contract.ENV_MODEL]
    if not is_object(source) and not os.environ.get(contract.ENV_MODEL_STEP):
        return source
    return await wait_out(head, _ask, lambda error: str(error) if isinstance(error, TransientError) else "")


async def _ask() -> str:
    host, token = os.environ[contract.ENV_HEAD], os.environ.get(contract.ENV_TOKEN, "")
    addresses = await asyncio.to_thread(resolve, host)
    if not addresses:
        raise TransientError(f"the head {host!r} has no address")
    url = f"http://{addresses[0]}:{listening_port(contract.PORT_DRIVER)}{contract.UrlPath.MODEL}"
    try:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=_TIMEOUT) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise TransientError(f"{url}: HTTP {response.status}: {text.strip()}")
            return text
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransientError(f"{url}: {type(error).__name__}: {error}") from error
