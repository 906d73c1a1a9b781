"""What the head checks before it loads anything."""

from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_COMPLETE, checkpoint_folder
from rljob_api.run.origin import FILE_ORIGIN
from rljob_inputs.findings import InputError
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.origin import keep_origin
from rljob_trainer.head.wiring import run_head
from tests.support.job_simulation import make_job
from tests.support.loopback import next_address


async def test_checkpoints_of_another_job_are_refused(tmp_path):
    def describe(source):
        return Environment(make_job(model={"source": source}), Path(), tmp_path, next_address(), source, ("/data",), {})

    keep_origin(describe("/models/a"))
    checkpoint_folder(tmp_path, 2).mkdir(parents=True)
    (checkpoint_folder(tmp_path, 2) / FILE_COMPLETE).touch()
    with pytest.raises(InputError, match=r"spec\.model\.source: is \"/models/b\", but .* of a job with"):
        await run_head(describe("/models/b"))
    assert '"/models/a"' in (tmp_path / FILE_ORIGIN).read_text()
