"""What classifiers, judges and model users share: the session to a model's server, its vLLM, and the warm-up."""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rljob_api.errors import UserError
from rljob_api.wire.calls import UserReply
from rljob_service.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_service.models.rate_limiter import RateLimiter
from rljob_service.models.shared_engines import POLL_SECONDS, open_engines
from rljob_service.models.upstream import UpstreamClient
from rljob_service.models.vllm_sidecar import VllmSidecar, open_session
from rljob_service.results import StartupReport

TURN = "turn"
"""What an execution waits for while its model's engines are asleep, or start."""
_WARM_UP_SECONDS = 600.0
_T = TypeVar("_T")


class ModelBackend(ABC):
    enforces_timeout = False
    """Whether it enforces timeoutSeconds itself."""
    upstream: UpstreamClient
    """The client of the model's server."""

    def __init__(self, limiter: RateLimiter, *, uses_vllm: bool) -> None:
        """`uses_vllm`: whether vLLM serves the model, as a sidecar or in the trainer's Pods."""
        self.limiter = limiter
        self._engines = open_engines() if uses_vllm else None
        self._sidecar = VllmSidecar() if uses_vllm and self._engines is None else None
        server = self._engines or self._sidecar
        self._session = server.session if server else open_session()

    @property
    def can_serve(self) -> bool:
        """Whether it accepts requests. Those for engines that are asleep wait for their turn."""
        return self._sidecar is None or self._sidecar.is_up

    def required_wait(self) -> tuple[float, str]:
        """Return the seconds until an execution may start, and what it waits for."""
        if self._engines is not None and not self._engines.is_awake:
            return POLL_SECONDS, TURN
        return self.limiter.required_wait()

    @property
    def pause_seconds(self) -> float:
        return self.limiter.pause_seconds

    @abstractmethod
    async def start(self) -> StartupReport:
        """Wait until the model's server answers; not if that is an engine in the trainer's Pods, which warms up there,
        and may sleep. Raises UserError if the service cannot be served."""

    @abstractmethod
    async def execute(self, body: bytes, progress: ExecutionProgress) -> Sequence[Score | UserReply | NoScoreError]:
        """Score the samples of one request, or answer a call. Raises NoScoreError if it applies to the request."""

    async def close(self) -> None:
        if self._engines is not None:
            await self._engines.close()
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
