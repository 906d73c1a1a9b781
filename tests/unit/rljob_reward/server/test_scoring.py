"""The scorer without a server: what it asks of the requests that wait."""

from __future__ import annotations

from rljob_api.wire.protocol import ScoreRequest
from rljob_reward.server.metrics import Metrics
from rljob_reward.server.scoring import QueueFullError, Scorer
from rljob_reward.server.served_reward import ServedReward
from rljob_reward.worker.loading import FunctionSettings

SOURCE = "def compute_score(solution_str): return 1.0"
NUM_QUEUED, NUM_REFUSED = 200, 100


class Patient:
    """A client that stays; counts how often it is looked at."""

    num_looks = 0

    def deliver(self, result: bytes) -> None: ...

    def is_disconnected(self) -> bool:
        Patient.num_looks += 1
        return False


async def test_a_refusal_does_not_look_at_all_that_wait_each_time():
    settings = FunctionSettings(SOURCE, "function.inline", None, "auto", {}, 2048)
    reward = ServedReward("test", 1, NUM_QUEUED, 30.0, settings, "1")
    scorer = Scorer(reward, Metrics("test", 1))
    refused = 0
    for number in range(1 + NUM_QUEUED + NUM_REFUSED):
        request = ScoreRequest(id=str(number), prompt="p", completion="c")
        try:
            scorer.submit(request, request.model_dump_json().encode(), Patient())
        except QueueFullError:
            refused += 1
    assert refused == NUM_REFUSED
    assert 1 <= Patient.num_looks / NUM_QUEUED < NUM_REFUSED / 2, "looks at the whole queue"
    await scorer.close()
