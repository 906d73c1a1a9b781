"""What engines must do in which turn, for any sequence of failures, lost answers and changes of turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.wire.weights import EngineMemory
from rljob_trainer.worker.turns import SERVE, SLEEP, Engine, Engines, Order

START_SECONDS = 600.0
ROLLOUT, MODEL = "", "spec.rewards[0].model"
ENGINES = [(range(0, 1), ROLLOUT), (range(1, 2), ROLLOUT), (range(0, 2), MODEL)]
"""Two rollouts with a GPU each, and a reward's model on both."""
NUM_ENGINES = len(ENGINES)
TRAINER = Order("trainer")
MEMORY = EngineMemory(num_bytes=100, seconds=1)


class Pod:
    """Does what the machine says. Knows the true state of each engine: dead, warming, asleep, serving, or a key."""

    def __init__(self) -> None:
        self.machine = Engines([Engine(START_SECONDS, gpus, model) for gpus, model in ENGINES])
        self.truth = ["dead"] * NUM_ENGINES
        self.now = 0.0

    def step(self, number: int, outcome: str = "obeys") -> str:
        """`outcome`: of a question. lost: the engine obeys, and its answer does not arrive; warming, hangs: no
        effect."""
        step = self.machine.next_step(number, self.now)
        if step == "start":
            assert self.machine.order.turn != "trainer"
            assert self.truth[number] == "dead"
            assert all(truth in ("dead", self.wish(other)) for other, truth in self.around(number)), "another changes"
            self.truth[number] = "warming"
            self.machine.record_started(number, self.now)
        elif step == "kill":
            self.die(number)
        elif step == "ask" and outcome in ("obeys", "lost"):
            self.truth[number] = self.wish(number)
            if outcome == "obeys":
                self.machine.record_obeyed(number, self.truth[number], MEMORY, self.now)
        return step

    def wish(self, number: int) -> str:
        return self.machine.order.wish_of(self.machine.engines[number])

    def around(self, number: int) -> list[tuple[int, str]]:
        """Return the others on the same GPUs, and their true states."""
        gpus = set(ENGINES[number][0])
        return [(i, self.truth[i]) for i, (other, _) in enumerate(ENGINES) if i != number and gpus & set(other)]

    def begin(self) -> None:
        """Start all, one after the other."""
        for _ in range(2 * NUM_ENGINES):
            for number in range(NUM_ENGINES):
                self.step(number)

    def die(self, number: int) -> None:
        if self.truth[number] != "dead":
            self.truth[number] = "dead"
            self.machine.record_died(number, self.now)

    def check(self) -> None:
        order = self.machine.order
        if not self.machine.is_true(self.now):
            return
        if order.turn == "start":
            assert self.truth == [SLEEP] * NUM_ENGINES
        elif order.turn == "trainer":
            assert set(self.truth) <= {"dead", SLEEP}
        else:
            for number, engine in enumerate(self.machine.engines):
                assert not engine.is_warm or self.truth[number] == (SERVE if engine.model else order.want)


NUMBERS = st.integers(0, NUM_ENGINES - 1)
EVENTS = st.one_of(
    st.tuples(st.just("step"), NUMBERS, st.sampled_from(["obeys", "lost", "warming"])),
    st.tuples(st.just("die"), NUMBERS),
    st.tuples(st.just("pass"), st.floats(0, 200)),
    st.tuples(st.just("turn"), st.sampled_from([TRAINER, Order("rollouts", "g:1"), Order("rollouts", "g:2")])),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=60))
def test_no_engine_starts_in_the_trainers_turn_and_no_turn_waits_forever(events: list[tuple[object, ...]]) -> None:
    pod = Pod()
    for kind, *arguments in events:
        if kind == "step":
            pod.step(*arguments)  # type: ignore[arg-type]
        elif kind == "die":
            pod.die(*arguments)  # type: ignore[arg-type]
        elif kind == "pass":
            pod.now += arguments[0]  # type: ignore[operator]
        else:
            pod.machine.order = arguments[0]  # type: ignore[assignment]
        pod.check()
    pod.now += 61
    for _ in range(3 * NUM_ENGINES):  # of each a kill, a start, and an answer
        for number in range(NUM_ENGINES):
            pod.step(number)
            pod.now += 61 if pod.truth[number] == "dead" else 0
            pod.check()
    assert pod.machine.is_true(pod.now)
    if pod.machine.order.turn != "trainer":
        assert pod.truth == [pod.wish(i) for i in range(NUM_ENGINES)], "every dead engine was started again"


def running_pod(order: Order) -> Pod:
    pod = Pod()
    pod.begin()
    pod.machine.order = TRAINER
    assert pod.machine.is_true(pod.now)
    pod.machine.order = order
    return pod


def test_engines_on_the_same_gpu_start_one_after_the_other() -> None:
    pod = Pod()
    assert [pod.step(number) for number in range(NUM_ENGINES)] == ["start", "start", "nothing"]
    assert [pod.step(0), pod.step(2)] == ["ask", "nothing"], "the other rollout starts on a GPU of the model"
    assert [pod.step(1), pod.step(2)] == ["ask", "start"]


def test_model_keeps_its_weights_from_turn_to_turn() -> None:
    pod = running_pod(Order("rollouts", "g:1"))
    assert [pod.step(number) for number in range(NUM_ENGINES)] == ["ask"] * NUM_ENGINES
    assert pod.truth == ["g:1", "g:1", SERVE]
    pod.machine.order = Order("rollouts", "g:2")
    assert [pod.step(number) for number in range(NUM_ENGINES)] == ["ask", "ask", "nothing"]


def test_engine_that_was_warm_has_a_right_configuration() -> None:
    pod = running_pod(Order("rollouts", "g:1"))
    pod.die(2)
    assert pod.machine.engines[2].was_warm
    assert not Pod().machine.engines[2].was_warm


def test_engine_that_starts_when_the_trainers_turn_comes_is_awaited() -> None:
    pod = running_pod(Order("rollouts", "g:1"))
    pod.step(1)
    pod.step(2)
    pod.die(0)
    pod.now += 5
    pod.step(0)
    assert pod.machine.is_true(pod.now), "an engine that starts does not delay the others"
    pod.machine.order = TRAINER
    pod.step(1)
    pod.step(2)
    pod.step(0, "warming")
    assert not pod.machine.is_true(pod.now)
    pod.step(0)
    assert pod.machine.is_true(pod.now)


def test_answer_that_was_lost_is_asked_for_again() -> None:
    pod = running_pod(Order("rollouts", "g:1"))
    pod.step(0, "lost")
    pod.machine.order = TRAINER
    assert pod.truth[0] == "g:1"
    assert not pod.machine.is_true(pod.now), "the engine is awake"
    pod.step(0)
    assert pod.machine.is_true(pod.now)


def test_delay_grows_with_failures_in_a_row_to_a_minute() -> None:
    pod, delays = Pod(), []
    for _ in range(9):
        assert pod.step(0) == "start"
        pod.step(0)
        delays.append(pod.machine.record_died(0, pod.now))
        pod.truth[0] = "dead"
        pod.now += delays[-1] - 0.01
        assert pod.step(0) == "nothing"
        pod.now += 0.02
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    pod.step(0)
    pod.step(0)
    pod.now += 60
    assert pod.machine.record_died(0, pod.now) == 1, "it had worked"


@pytest.mark.parametrize(("order", "seconds"), [(Order("start"), START_SECONDS), (TRAINER, 120)])
def test_engine_has_a_deadline(order: Order, seconds: float) -> None:
    pod = running_pod(Order("rollouts", "g:1")) if order is TRAINER else Pod()
    pod.step(0)
    pod.machine.order = order
    pod.step(0, "hangs")
    pod.now += seconds - 0.01
    assert pod.step(0, "hangs") == "ask"
    pod.now += 0.02
    assert pod.step(0) == "kill"


def test_counts_are_of_warm_engines_and_of_starts_after_the_first() -> None:
    pod = running_pod(TRAINER)
    machine = pod.machine

    def held() -> tuple[int, int]:
        return machine.num_bytes(of_models=False), machine.num_bytes(of_models=True)

    assert (machine.num_running, machine.num_restarts, held()) == (3, 0, (200, 100))
    pod.die(1)
    assert (machine.num_running, machine.num_restarts, held()) == (2, 0, (100, 100))
    machine.order = Order("rollouts", "g:1")
    pod.now += 2
    pod.step(2)
    pod.step(1)
    assert (machine.num_running, machine.num_restarts) == (2, 1)
    pod.step(1)
    assert machine.num_running == 3
