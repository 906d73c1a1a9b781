"""The watch of a sidecar's engine, as a middleware of vLLM's own server: its program stays vLLM's.

/health fails once the engine owes an answer for half of its limit, so the reward server, which polls it, is not ready;
at the limit the sidecar ends, and its container starts again. Invariant: a server without an engine is left alone.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import NoReturn

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rljob_api.manifest.job_sections import HangDetection
from rljob_api.wire.contract import ENV_HANG_DETECTION
from rljob_trainer.rollout.engine_watch import EngineWatch, build_watch, end_if_it_hangs

_HEALTH = "/health"


class SidecarWatch:
    """Create it without arguments but the app: vLLM does, for its option --middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[NoReturn] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the first scope of a server, whose app has its engine by then
            self._start(getattr(scope["app"].state, "engine_client", None))
        elif scope.get("path") == _HEALTH and self._watch is not None and (reason := self._watch.reason_silent()):
            await PlainTextResponse(reason, 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _start(self, engine: object) -> None:
        if engine is not None:
            self._watch = build_watch(read_bounds(os.environ), engine)
            self._watching = asyncio.create_task(end_if_it_hangs(self._watch))


def read_bounds(environment: Mapping[str, str]) -> HangDetection:
    """Return spec.hangDetection of the job, or its defaults: a RewardModel has none."""
    given = environment.get(ENV_HANG_DETECTION)
    return HangDetection.model_validate_json(given) if given else HangDetection()
