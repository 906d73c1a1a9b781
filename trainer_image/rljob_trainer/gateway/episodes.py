"""The episodes that programs play now: which key belongs to which attempt.

Invariant: at most one attempt of an episode takes requests. What an earlier one recorded is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.wire.protocol import ModelAccess
from rljob_trainer.agents.base import EpisodeTask, Recording
from rljob_trainer.gateway.attempt import Attempt, Policy
from rljob_trainer.gateway.keys import AttemptKeys, AttemptName
from rljob_trainer.gateway.types import RequestError

POLICY = "policy"
"""The `model` of requests that train."""
ALIASES = ("default", "auto")
"""Other names of the policy: agents that were written for AReaL call it default, those for Agent Lightning auto."""
_STOPPED = RequestError(410, "gateway_stopped", "the job's driver stops; end the program")


class Episodes:
    def __init__(self, policy: Policy) -> None:
        self.url = ""
        """Address of the gateway, without a path. Set once it listens."""
        self.keys = AttemptKeys()
        self._policy = policy
        self._open: dict[str, HostedEpisode] = {}
        self._is_closed = False

    def open(self, task: EpisodeTask) -> HostedEpisode:
        """`task.id` must not be open already."""
        if task.id in self._open:
            raise ValueError(f"the episode {task.id} is open already")
        episode = self._open[task.id] = HostedEpisode(task, self._policy, self)
        return episode

    def find(self, key: str) -> Attempt:
        """Return the attempt of a key. Raise RequestError if it takes no requests."""
        name = self.keys.read(key)
        if name is None:
            message = "the API key is not one of this job's episodes; use the api_key of the episode's model access"
            raise RequestError(401, "invalid_api_key", message)
        episode = self._open.get(name.episode)
        if episode is None or episode.attempt is None:
            raise RequestError(410, "episode_ended", f"the episode {name.episode} has ended; end the program")
        if name.attempt != episode.number:
            raise _superseded(name.attempt, episode.number)
        episode.attempt.check_open()
        return episode.attempt

    def close(self) -> None:
        """End all episodes."""
        for episode in list(self._open.values()):
            episode.close(_STOPPED)

    def forget(self, episode: HostedEpisode) -> None:
        self._open.pop(episode.task.id, None)

    def __len__(self) -> int:
        return len(self._open)

    def attempts(self) -> Iterator[Attempt]:
        """Yield the attempts that take requests."""
        return (episode.attempt for episode in self._open.values() if episode.attempt is not None)


class HostedEpisode:
    """Implements agents.base.OpenEpisode."""

    def __init__(self, task: EpisodeTask, policy: Policy, episodes: Episodes) -> None:
        self.task = task
        self.attempt: Attempt | None = None
        """The current one."""
        self.number = -1
        """Number of the current attempt."""
        self._policy, self._episodes = policy, episodes

    def start_attempt(self) -> tuple[int, ModelAccess]:
        self.number += 1
        if self.attempt is not None:
            self.attempt.close(_superseded(self.number - 1, self.number))
        self.attempt = Attempt(self.task, self._policy)
        key = self._episodes.keys.make(AttemptName(self.task.id, self.number))
        return self.number, ModelAccess(url=self._episodes.url, api_key=key, name=POLICY)

    def end_attempt(self) -> None:
        if self.attempt is not None:
            message = f"attempt {self.number} of the episode has ended; end the program"
            self.attempt.close(RequestError(410, "attempt_ended", message))

    def read(self) -> Recording:
        return Recording() if self.attempt is None else self.attempt.read()

    def close(self, reason: RequestError | None = None) -> None:
        self._episodes.forget(self)
        if self.attempt is not None:
            ended = RequestError(410, "episode_ended", f"the episode {self.task.id} has ended; end the program")
            self.attempt.close(reason or ended)


def _superseded(attempt: int, current: int) -> RequestError:
    message = f"attempt {attempt} of the episode was superseded by attempt {current}; end the program"
    return RequestError(410, "attempt_superseded", message)
