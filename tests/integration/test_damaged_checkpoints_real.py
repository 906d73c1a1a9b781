"""`rljob run` on real vLLM, Ray and FSDP2 is killed, and its newest checkpoint is damaged.

The next run resumes from the checkpoint before, and removes what the killed one has left in temporary folders.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_METRICS, complete_checkpoints
from rljob_api.run.metrics import read_metrics
from tests.support.local_run import SLOW_REWARD, Run

NUM_STEPS = 5
SETTINGS = (f"spec.schedule.steps={NUM_STEPS}", "spec.checkpoint.everySteps=1", "spec.checkpoint.keep=2")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of a run. Its path is short: Ray has sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.real
@pytest.mark.slow
def test_damaged_newest_checkpoint_costs_only_its_steps(tmp_path: Path, temporary: Path) -> None:
    run = Run(tmp_path, SLOW_REWARD, *SETTINGS)
    try:
        run.wait_for("two checkpoints", lambda: len(complete_checkpoints(run.folder)) == 2)
    finally:
        run.close()
    before, newest = complete_checkpoints(run.folder)
    trained = read_metrics(run.folder / FILE_METRICS).prompts_trained
    left = {path.name for path in temporary.glob("rljob-*")}
    assert any(name.startswith("rljob-ray-") for name in left), left
    shard = complete_checkpoints(run.folder)[newest] / "trainer" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    run = Run(tmp_path, None, *SETTINGS)
    try:
        summary = run.finish()
    finally:
        run.close()
    name = f"damaged-step-{newest:06d}"
    assert "trainer/__0_0.distcp has the hash" in summary.damaged_checkpoints[name]
    output = (tmp_path / "output.txt").read_text()
    assert f"spec.checkpoint: damaged: {shard} has the hash" in output.replace("\n", " "), output
    assert f"resumed from step {before}" in output.replace("\n", " "), output
    assert (run.folder / "checkpoints" / name / "trainer" / "__0_0.distcp").read_bytes() == content
    assert [record.step for record in read_metrics(run.folder / FILE_METRICS).steps] == list(range(1, NUM_STEPS + 1))
    prompts = summary.prompts_trained
    assert prompts[: len(trained)] == trained, "what is repeated has the same prompts"
    assert len(set(chain(*prompts))) == sum(map(len, prompts)), "a prompt was trained on twice"
    assert summary.restarts.get("trainer", 0) == 0, "no rank has failed"
    assert not [path.name for path in temporary.glob("rljob-*") if path.name in left]
