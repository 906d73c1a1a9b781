"""The episodes that programs play now: which key belongs to which attempt, and which request to which trajectory.

    key --> attempt;  model and X-Session-ID --> one of its trajectories, by default the only one

Invariants: at most one attempt of an episode takes requests; what an earlier one recorded is dropped. Trajectories
share nothing but the key and the episode's end: each has its own transcript and turns.

A key, which a program sends as its API key, names its attempt and proves that this gateway made it. So an ended episode
needs no memory: its keys still differ from unknown ones.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rljob_api.wire.calls import ModelAccess
from rljob_api.wire.contract import MAX_TRAJECTORIES, POLICY_MODEL
from rljob_trainer.agents.base import EpisodeTask, Recording
from rljob_trainer.gateway.attempt import WAITS_FOR_COMPLETION, Attempt, Policy
from rljob_trainer.gateway.types import RequestError

_PREFIX = "sk-rljob"
"""Some programs require that a key begins with `sk-`."""
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class AttemptName:
    """One attempt of one episode."""

    episode: str
    attempt: int


class AttemptKeys:
    def __init__(self, secret: bytes | None = None) -> None:
        """`secret`: None makes a random one, so that keys end with the process."""
        self._secret = secret or secrets.token_bytes(32)

    def make(self, name: AttemptName) -> str:
        """Return the key: letters, digits, `-`, `_` and `.`."""
        body = f"{_encode(name.episode.encode())}.{name.attempt}"
        return f"{_PREFIX}.{body}.{self._sign(body)}"

    def read(self, key: str) -> AttemptName | None:
        """Return the attempt of a key; None if this gateway did not make it."""
        prefix, _, rest = key.partition(".")
        body, _, signature = rest.rpartition(".")
        if prefix != _PREFIX or not hmac.compare_digest(signature.encode(errors="replace"), self._sign(body).encode()):
            return None
        episode, _, attempt = body.rpartition(".")
        return AttemptName(_decode(episode).decode(), int(attempt))

    def _sign(self, body: str) -> str:
        digest = hmac.digest(self._secret, body.encode(errors="replace"), hashlib.sha256)
        return _encode(digest[:_DIGEST_BYTES])


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


POLICY = POLICY_MODEL
"""The `model` of requests that train."""
ALIASES = ("default", "auto")
"""Other names of the policy: agents that were written for AReaL call it default, those for Agent Lightning auto."""
_STOPPED = RequestError(410, "gateway_stopped", "the job's driver stops; end the program")


class TrajectoryName(NamedTuple):
    """One conversation of one player."""

    seat: str = ""
    """Empty: the episode has one player, or this one does not train."""
    session: str = ""


class Seats:
    """Which seats a job's episodes may have."""

    def __init__(self, names: Collection[str] | None, *, are_open: bool) -> None:
        """`names`: agent.seats. `are_open`: without names, the environment knows them."""
        self._names, self._are_open = names, are_open

    def read(self, model: str) -> str | None:
        """Return the seat of a `model`, empty for that of a job without seats; None if it is not the policy's."""
        if model in (POLICY, *ALIASES):
            return ""
        name, slash, seat = model.partition("/")
        if not slash or not seat or name != POLICY:
            return None
        known = self._are_open if self._names is None else seat in self._names
        return seat if known else None

    def models(self) -> list[str]:
        """Return the known models of the policy."""
        return [POLICY, *(f"{POLICY}/{name}" for name in self._names or ())]

    def describe(self) -> str:
        """Return the models of the policy, for an error."""
        if self._names:
            return f"{', '.join(f'{POLICY}/{name}' for name in self._names)} (agent.seats), which train, and {POLICY}"
        seats = "" if self._are_open else f", or {POLICY}/SEAT with the names of agent.seats"
        return f"{POLICY}, which trains{seats}"


class Attempts:
    """The trajectories of one attempt."""

    def __init__(self, task: EpisodeTask, policy: Policy) -> None:
        self._task, self._policy = task, policy
        self.main = Attempt(task, policy)
        """That of requests without a seat. It also has what is refused before a trajectory is known."""
        self._others: dict[TrajectoryName, Attempt] = {}

    def choose(self, name: TrajectoryName) -> Attempt:
        """Return a trajectory, which begins with its first request. Raise RequestError if there are too many."""
        if not name.seat:
            return self.main
        self.main.check_open()
        if name not in self._others:
            if len(self._others) == MAX_TRAJECTORIES:
                message = f"an episode must have at most {MAX_TRAJECTORIES} trajectories; use fewer seats or sessions"
                raise RequestError(400, "too_many_trajectories", message)
            self._others[name] = Attempt(self._task, self._policy)
        return self._others[name]

    def find(self, name: TrajectoryName) -> Attempt:
        """Return a trajectory that has begun. Raise RequestError for another one."""
        if name.seat and name not in self._others:
            which = f" in the session {name.session:.80}" if name.session else ""
            raise RequestError(400, "invalid_value", f"seat: {name.seat:.80} has not called the model{which}")
        return self._others[name] if name.seat else self.main

    def all(self) -> list[Attempt]:
        return [self.main, *self._others.values()]

    def close(self, reason: RequestError) -> None:
        for attempt in self.all():
            attempt.close(reason)

    def read(self) -> Recording:
        recording = self.main.read()
        for name, attempt in self._others.items():
            found = attempt.read()
            found.seat, found.session = name
            found.refusal = found.refusal or recording.refusal
            found.reward = recording.reward if found.reward is None else found.reward
            recording.seats.append(found)
        if self._others:
            recording.waits_for = self._describe_wait(recording)
        return recording

    def _describe_wait(self, recording: Recording) -> str:
        """Return what the episode does: whatever plays it waits for all completions in flight."""
        if any(attempt.exchanges.num_waiting for attempt in self.all()):
            return WAITS_FOR_COMPLETION
        num_turns = sum(len(each.turns) for each in [recording, *recording.seats])
        return f"computes since its turn {num_turns}" if num_turns else recording.waits_for


class Episodes:
    def __init__(self, policy: Policy) -> None:
        self.url = ""
        """Address of the gateway, without a path. Set once it listens."""
        self.keys = AttemptKeys()
        self._policy = policy
        self._open: dict[str, HostedEpisode] = {}

    def open(self, task: EpisodeTask) -> HostedEpisode:
        """`task.id` must not be open already."""
        if task.id in self._open:
            raise ValueError(f"the episode {task.id} is open already")
        episode = self._open[task.id] = HostedEpisode(task, self._policy, self)
        return episode

    def find(self, key: str) -> Attempts:
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
        episode.attempt.main.check_open()
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
        """Yield the trajectories that take requests."""
        return (each for episode in self._open.values() if episode.attempt for each in episode.attempt.all())


@dataclass(eq=False)
class HostedEpisode:
    """Implements agents.base.OpenEpisode."""

    task: EpisodeTask
    _policy: Policy
    _episodes: Episodes

    def __post_init__(self) -> None:
        self.attempt: Attempts | None = None
        """The current one."""
        self.number = -1
        """Number of the current attempt."""

    def start_attempt(self) -> tuple[int, ModelAccess]:
        self.number += 1
        if self.attempt is not None:
            self.attempt.close(_superseded(self.number - 1, self.number))
        self.attempt = Attempts(self.task, self._policy)
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
