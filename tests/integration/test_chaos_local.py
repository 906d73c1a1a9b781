"""Kill plans: what dies when is drawn, under each schedule, with real processes on this machine.

Each example is one `rljob run` on real vLLM, Ray and FSDP2 with ten kills. Whatever dies, the job trains on the
prompts of an undisturbed run, each once. `make chaos-local` runs at least 40 kills for each schedule.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from rljob_api.manifest.schedule import ScheduleType
from tests.support.local_run import SLOW_REWARD, Run

NUM_STEPS = 24
NUM_PLANS = int(os.environ.get("RLJOB_CHAOS_PLANS", "4"))
SCHEDULES = get_args(ScheduleType)
PROCESSES = {
    "reward worker": "rljob_service.worker",
    "reward server": "-m rljob_service ",
    "trainer rank": "ray::RankProcess",
    "rollout": "-m rljob_trainer.rollout",
    "head": "-m rljob_trainer.head",
}
plans = st.permutations(2 * sorted(PROCESSES)).flatmap(
    lambda order: st.tuples(*(st.tuples(st.just(what), st.floats(0, 2)) for what in order))
)
"""What dies, and how many seconds after the next step has begun: each process twice."""


def run_job(schedule: str, plan: Sequence[tuple[str, float]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            Path(folder),
            SLOW_REWARD,
            f"spec.schedule.type={schedule}",
            f"spec.schedule.steps={NUM_STEPS}",
            "spec.checkpoint.everySteps=2",
            "spec.checkpoint.exportPolicy=never",
            *(f"spec.{role}.backoffLimit=1000" for role in ("head", "trainer", "rollout", "rewards[0]")),
        )
        try:
            for number, (what, delay) in enumerate(plan):
                run.wait_for_step(number + 1)
                time.sleep(delay)
                run.kill(PROCESSES[what])
            return run.finish()
        finally:
            run.close()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kill_plan_trains_each_prompt_once(schedule: str) -> None:
    expected = sorted(itertools.chain(*run_job(schedule, ())["prompts_trained"]))

    @settings(
        max_examples=NUM_PLANS,
        deadline=None,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans)
    def check(plan: Sequence[tuple[str, float]]) -> None:
        note(f"{schedule}: {plan}")
        started_at = time.monotonic()
        summary = run_job(schedule, plan)
        assert sorted(itertools.chain(*summary.prompts_trained)) == expected, "a prompt was skipped or repeated"
        assert len(summary.prompts_trained) == NUM_STEPS
        print(f"{schedule}: {len(plan)} kills, {time.monotonic() - started_at:.0f} s, {summary.restarts}")

    check()
