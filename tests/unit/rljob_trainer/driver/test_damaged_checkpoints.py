"""A run whose newest checkpoint is damaged resumes from the one before, and ends as an undisturbed one."""

import asyncio
import shutil

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import checkpoint_folder, complete_checkpoints, damaged_checkpoints
from tests.support.driver_harness import run_undisturbed, stop_when
from tests.support.waiting import DEADLINE_SECONDS


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def stop_with(harness, *steps):
    """Stop a run once it has the checkpoints of these steps, and remove those of later ones."""
    await stop_when(harness, lambda: steps[-1] in complete_checkpoints(harness.run_dir))
    for step, folder in complete_checkpoints(harness.run_dir).items():
        if step > steps[-1]:
            shutil.rmtree(folder)
    assert tuple(complete_checkpoints(harness.run_dir)) == steps


@pytest.mark.parametrize("name", ["driver.json", "trainer/weight", "COMPLETE"])
async def test_damaged_checkpoint_falls_back_to_the_one_before(make_harness, caplog, name):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:
        await stop_with(harness, 2, 4)
        damage(complete_checkpoints(harness.run_dir)[4] / name)
        summary = await harness.run()
        kept = harness.run_dir / "checkpoints" / "damaged-step-000004"
        assert (kept / "trainer" / "weight").exists()
        assert list(complete_checkpoints(harness.run_dir)) == [4, 6], "the damaged one is not one of those to keep"
        where = f"checkpoints/step-000004/{name}"
        assert where in (kept / "DAMAGED").read_text()
        assert where in summary.damaged_checkpoints[kept.name]
        [problem] = harness.board.status.problems
        assert (problem.reward, problem.step) == ("spec.checkpoint", 2)
        assert where in problem.message
        assert "kept as damaged-step-000004, and the job resumed from step 2" in problem.message
        assert where in caplog.text
    assert summary.restarts["trainer"] == 0, "no rank has failed"
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert summary.step_rewards == expected.summary.step_rewards
    assert harness.final_weight() == expected.final_weight
    assert [step.step for step in harness.metrics().steps] == [1, 2, 3, 4, 5, 6]
    assert harness.trajectories().keys() == expected.trajectories.keys()


async def test_run_with_damaged_checkpoints_alone_fails_and_stays_so(make_harness):
    async with make_harness() as harness:
        await stop_with(harness, 2, 4)
        for step, name in ((2, "driver.json"), (4, "trainer/weight")):
            damage(checkpoint_folder(harness.run_dir, step) / name)
        for _ in range(2):
            with pytest.raises(UserError) as caught:
                await harness.run()
            for part in ("step-000002/driver.json has the hash", "step-000004/trainer/weight has the hash", "step 0"):
                assert part in str(caught.value)
        for name in damaged_checkpoints(harness.run_dir):
            shutil.rmtree(harness.run_dir / "checkpoints" / name)
        await asyncio.wait_for(harness.run(), DEADLINE_SECONDS)
        assert [step.step for step in harness.metrics().steps] == [1, 2, 3, 4, 5, 6], "from step 0, as the error says"
