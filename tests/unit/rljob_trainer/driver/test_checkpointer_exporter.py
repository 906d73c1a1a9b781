"""Which steps become models, whatever dies: spec.checkpoint.exportPolicy in the loop."""

import asyncio
import shutil

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import checkpoint_folder, complete_checkpoints, export_folder, last_checkpoint, list_exports
from rljob_api.run.summaries import BestStep
from rljob_trainer.driver.checkpointer import Exporter
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.run_state import History
from tests.support.driver_harness import stop_when
from tests.support.waiting import DEADLINE_SECONDS
from tests.unit.rljob_trainer.driver.test_loop_evaluation import best_settings


def weight(folder):
    return (folder / "weight").read_text()


def trained(harness, step):
    return weight(checkpoint_folder(harness.run_dir, step) / "trainer")


def assert_each_checkpoint_has_its_export(harness):
    steps = list(complete_checkpoints(harness.run_dir))
    assert list(list_exports(harness.run_dir)) == steps
    assert [weight(folder) for folder in list_exports(harness.run_dir).values()] == [trained(harness, s) for s in steps]


async def test_every_checkpoint_has_an_export_and_keep_bounds_them(make_harness):
    async with make_harness(checkpoint={"export": "every"}) as harness:
        summary = await harness.run()
    assert list(complete_checkpoints(harness.run_dir)) == [4, 6]
    assert_each_checkpoint_has_its_export(harness)
    assert summary.export == str(harness.run_dir / "exports" / "step-000006")
    assert not (harness.run_dir / "export").exists()


async def test_export_of_a_step_has_its_name_once_its_checkpoint_is_complete(make_harness):
    async with make_harness(checkpoint={"export": "every"}) as harness, harness.driver() as driver:
        is_open = asyncio.Event()
        harness.before_write = is_open.wait
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(DEADLINE_SECONDS):
            while harness.board.status.step < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert (harness.run_dir / ".export.partial" / "weight").exists()
        assert list_exports(harness.run_dir) == {}
        is_open.set()
        await asyncio.wait_for(running, DEADLINE_SECONDS)
    assert_each_checkpoint_has_its_export(harness)


async def test_last_save_before_a_stop_does_not_take_the_time_for_an_export(make_harness):
    async with make_harness(checkpoint={"export": "every", "everySteps": 5}) as harness:
        harness.kill_trainer = lambda at: at == "export"
        await stop_when(harness, lambda: harness.board.status.step == 2)
        assert list_exports(harness.run_dir) == {}
        assert list(complete_checkpoints(harness.run_dir)) == [harness.board.status.step]
        harness.kill_trainer = lambda at: False
        await harness.run()
    assert_each_checkpoint_has_its_export(harness)


@pytest.mark.parametrize("what", ["export", "after export"])
async def test_export_that_a_crash_prevented_is_written_by_the_next_group(make_harness, what):
    async with make_harness(checkpoint={"export": "every"}) as harness:
        deaths = iter([False, True])  # during the second checkpoint's
        harness.kill_trainer = lambda at: at == what and next(deaths, False)
        await harness.run()
    assert_each_checkpoint_has_its_export(harness)


async def test_export_is_written_at_the_start_if_its_checkpoint_has_none(make_harness):
    async with make_harness(checkpoint={"export": "every"}) as harness:
        await stop_when(harness, lambda: 2 in list_exports(harness.run_dir))
        last = last_checkpoint(harness.run_dir)
        expected = export_folder(harness.run_dir, last)
        shutil.rmtree(expected, ignore_errors=True)  # as after a crash between COMPLETE and the export's name
        await stop_when(harness, lambda: expected.exists())
        assert weight(expected) == trained(harness, last)
        await harness.run()
    assert_each_checkpoint_has_its_export(harness)


async def test_best_step_is_exported_from_its_checkpoint(make_harness):
    async with make_harness(**best("best")) as harness:
        summary = await harness.run()
        step = summary.best.step
        assert 0 < step < 6, "or it would be the last one"
        assert weight(harness.run_dir / "export") == trained(harness, step) != trained(harness, 6)
        assert summary.export == str(harness.run_dir / "export")


async def test_best_step_is_exported_after_a_crash_of_its_export(make_harness):
    async with make_harness(**best("best")) as harness:
        deaths = iter([True])
        harness.kill_trainer = lambda at: at == "after export" and next(deaths, False)
        summary = await harness.run()
        assert summary.restarts == {"trainer": 1}
        assert weight(harness.run_dir / "export") == trained(harness, summary.best.step)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_text("0"), "is damaged: .*trainer/weight has"),
        (lambda file: (file.parent.parent / "COMPLETE").unlink(), "no longer has a checkpoint"),
    ],
)
async def test_best_step_without_an_intact_checkpoint_says_what_to_do(make_harness, damage, message):
    async with make_harness(**best("never")) as harness:
        step = (await harness.run()).best.step
        damage(checkpoint_folder(harness.run_dir, step) / "trainer" / "weight")
    async with make_harness(**best("best")) as harness:
        with pytest.raises(
            UserError, match=rf"spec.checkpoint.exportPolicy: .*best step, {step}, {message}.*set it to last"
        ):
            await harness.run()
        assert checkpoint_folder(harness.run_dir, 6).is_dir(), "the newest checkpoint is not set aside for it"


@pytest.mark.parametrize(
    ("best_step", "why"),
    [
        (None, "no evaluation has its figure"),
        (BestStep(set="math", metric="accuracy", value=0.5, step=0), "the best model is that before the first step"),
    ],
)
async def test_run_without_weights_of_a_best_step_exports_nothing(tmp_path, caplog, best_step, why):
    exporter = Exporter(tmp_path, None, "best", tokenizer_source="/m", disk=RunDisk(tmp_path), record=None)
    await exporter.finish(History(step=6, best=best_step), None)
    assert f"nothing is exported: {why}" in caplog.text


async def test_never_exports_nothing(make_harness):
    async with make_harness(checkpoint={"export": "never"}, schedule={"steps": 2}) as harness:
        assert (await harness.run()).export is None
    assert not list(harness.run_dir.glob("*export*"))


def best(steps):
    settings = best_settings()
    return settings | {"checkpoint": {**settings["checkpoint"], "export": steps}}
