"""How long the Pods of a run may take to end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rljob_cli.local.cluster import SAVE_SECONDS, STOP_SECONDS
from rljob_cli.local.node.kubelet import Kubelet


class Runner:
    def __init__(self, name: str, stopped: list[Any], grace: float) -> None:
        self.name, self.stopped, self.grace = name, stopped, grace

    async def stop(self, grace_seconds: float) -> None:
        self.stopped.append((self.name, grace_seconds))


async def test_the_head_ends_first_and_has_the_time_of_a_checkpoint() -> None:
    kubelet: Any = Kubelet(*[SimpleNamespace()] * 5)
    stopped: list[Any] = []
    graces = {"job-rollout-0": 90.0, "job-head-x": 60.0, "job-tool-0": 1.0}
    kubelet._runners = {name: Runner(name, stopped, grace) for name, grace in graces.items()}
    await kubelet.shutdown(("job-head",), STOP_SECONDS, SAVE_SECONDS)
    assert stopped == [("job-head-x", SAVE_SECONDS), ("job-rollout-0", STOP_SECONDS), ("job-tool-0", 1.0)]
    assert SAVE_SECONDS / 2 > 10 * 60, "half of it is for the checkpoint of a model that takes minutes to write"
