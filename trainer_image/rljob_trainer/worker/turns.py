"""What each engine of a trainer Pod must do, by whose turn it is on the Pod's devices. Pure.

    start    (at the Pod's begin): engines start, and fall asleep once they are warm
    trainer: those that run are asleep; nothing starts
    rollouts: those that run are awake; those that have died are started again

Invariants: no engine starts in the trainer's turn. A dead engine is started again in the other two, after a delay that
grows with its failures in a row, and while those on the same GPU have done what they were asked: vLLM measures the free
memory at its start. An engine that does not obey in time is to be killed, so that no turn waits forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rljob_api.wire.weights import EngineMemory, Turn
from rljob_trainer.outages import pause

SLEEP = "sleep"
SERVE = "serve"
Step = Literal["start", "ask", "kill", "nothing"]

_CHANGE_SECONDS = 120.0
"""For a warm engine to fall asleep or wake up. It may first end a load."""
_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0
_STEADY_SECONDS = 60.0
"""An engine that was warm for this long has not failed again."""


@dataclass(frozen=True)
class Order:
    turn: Turn | Literal["start"]
    want: str = ""
    """In the rollouts' turn: key of the weights to load."""

    def wish_of(self, engine: Engine) -> str:
        """What the engine is asked: SLEEP, SERVE, or the key of the weights for which to wake up."""
        if self.turn != "rollouts":
            return SLEEP
        return SERVE if engine.model else self.want


@dataclass
class Engine:
    start_seconds: float
    """For it to get warm."""
    gpus: range = range(0)
    """Those that it uses; empty without GPUs."""
    model: str = ""
    """Path of the served model whose weights it keeps; empty for a rollout, which loads published ones."""
    is_alive: bool = False
    is_warm: bool = False
    """It has fulfilled a wish since its start."""
    was_warm: bool = False
    """It was warm once: its configuration is right."""
    obeys: str = ""
    """The wish that it has fulfilled; empty from the next question until its answer."""
    asked: str = ""
    """The wish for which `deadline` holds."""
    deadline: float = 0.0
    """When to kill it unless it obeys."""
    warm_at: float = 0.0
    num_bytes: int = 0
    num_starts: int = 0
    num_failures: int = 0
    """In a row."""
    start_at: float = 0.0
    """While it is dead: the earliest time of its next start."""


@dataclass
class Engines:
    engines: list[Engine]
    order: Order = field(default_factory=lambda: Order("start"))

    def next_step(self, number: int, now: float) -> Step:
        """Return what to do with this engine. The caller reports the result."""
        engine = self.engines[number]
        if not engine.is_alive:
            may_start = self.order.turn != "trainer" and now >= engine.start_at
            return "start" if may_start and self._is_quiet_around(engine) else "nothing"
        wish = self.order.wish_of(engine)
        if engine.obeys == wish:
            return "nothing"
        if engine.asked != wish:
            engine.asked = wish
            if engine.is_warm:
                engine.deadline = now + _CHANGE_SECONDS
        engine.obeys = ""
        return "ask" if now < engine.deadline else "kill"

    def _is_quiet_around(self, engine: Engine) -> bool:
        """Whether no other engine on the same GPUs starts, or changes between sleeping and serving."""
        others = (each for each in self.engines if each is not engine and set(each.gpus) & set(engine.gpus))
        return all(each.obeys == self.order.wish_of(each) for each in others if each.is_alive)

    def record_started(self, number: int, now: float) -> None:
        engine = self.engines[number]
        assert self.order.turn != "trainer"
        assert not engine.is_alive
        engine.is_alive, engine.is_warm, engine.obeys, engine.asked = True, False, "", ""
        engine.deadline = now + engine.start_seconds
        engine.num_starts += 1

    def record_obeyed(self, number: int, wish: str, memory: EngineMemory, now: float) -> None:
        engine = self.engines[number]
        if not engine.is_warm:
            engine.is_warm, engine.was_warm, engine.warm_at = True, True, now
        engine.obeys, engine.num_bytes = wish, memory.num_bytes

    def record_died(self, number: int, now: float) -> float:
        """No process of it is left. Return the seconds until its next start, if it is not the trainer's turn."""
        engine = self.engines[number]
        if engine.is_warm and now - engine.warm_at >= _STEADY_SECONDS:
            engine.num_failures = 0
        delay = pause(_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS, engine.num_failures)
        engine.num_failures += 1
        engine.is_alive, engine.is_warm, engine.obeys, engine.num_bytes = False, False, "", 0
        engine.start_at = now + delay
        return delay

    def is_true(self, now: float) -> bool:
        """Whether the turn has come. In the rollouts' turn, an engine that starts, or that waits for its next start,
        does not delay the others."""
        return all(self._is_true_of(engine, now) for engine in self.engines)

    def _is_true_of(self, engine: Engine, now: float) -> bool:
        if engine.is_alive and engine.obeys == self.order.wish_of(engine):
            return True
        if self.order.turn == "trainer":
            return not engine.is_alive
        if self.order.turn == "rollouts":
            return not engine.is_warm if engine.is_alive else now < engine.start_at
        return False

    @property
    def has_models(self) -> bool:
        return any(engine.model for engine in self.engines)

    @property
    def num_running(self) -> int:
        """Engines that are warm."""
        return sum(engine.is_warm for engine in self.engines)

    @property
    def num_restarts(self) -> int:
        return sum(max(0, engine.num_starts - 1) for engine in self.engines)

    def num_bytes(self, *, of_models: bool) -> int:
        """What the rollouts hold, or the engines of served models."""
        return sum(engine.num_bytes for engine in self.engines if bool(engine.model) is of_models)
