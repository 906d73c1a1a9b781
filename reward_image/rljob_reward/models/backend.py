"""What classifiers, judges and model users share: the session to a model's server, the vLLM sidecar, its warm-up."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rljob_api.errors import UserError
from rljob_api.wire.protocol import UserReply
from rljob_reward.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_reward.models.rate_limiter import RateLimiter
from rljob_reward.models.vllm_sidecar import VllmSidecar, open_session
from rljob_reward.results import StartupReport

_WARM_UP_SECONDS = 600.0
_T = TypeVar("_T")


class ModelBackend(ABC):
    enforces_timeout = False
    """Whether it enforces timeoutSeconds itself."""

    def __init__(self, limiter: RateLimiter, *, uses_sidecar: bool) -> None:
        self.limiter = limiter
        self._sidecar = VllmSidecar() if uses_sidecar else None
        self._session = self._sidecar.session if self._sidecar else open_session()

    @property
    def can_serve(self) -> bool:
        return self._sidecar is None or self._sidecar.is_up

    @property
    def pause_seconds(self) -> float:
        return self.limiter.pause_seconds

    @abstractmethod
    async def start(self) -> StartupReport:
        """Wait until the model's server answers. Raises UserError if the service cannot be served."""

    @abstractmethod
    async def execute(self, body: bytes, progress: ExecutionProgress) -> Sequence[Score | UserReply | NoScoreError]:
        """Score the samples of one request, or answer a call. Raises NoScoreError if it applies to the request."""

    async def close(self) -> None:
        if self._sidecar is not None:
            self._sidecar.close()
        await self._session.close()

    async def _warm_up(self, send: Callable[[ExecutionProgress], Awaitable[_T]], field: str) -> _T:
        """Wait for vLLM and send one request, which initializes it and checks that it can serve."""
        assert self._sidecar is not None
        await self._sidecar.wait_until_ready()
        try:
            return await send(ExecutionProgress(time.monotonic() + _WARM_UP_SECONDS))
        except NoScoreError as error:
            raise UserError(f"{field}: the warm-up request failed: {error}") from error
