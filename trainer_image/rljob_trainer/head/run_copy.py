"""Opens the copy of the run's files in object storage, before the head reads its folder."""

from collections.abc import Callable
from functools import partial

from rljob_api.errors import UserError
from rljob_inputs.objects.access import ObjectAccess
from rljob_inputs.objects.folder import ObjectFolder
from rljob_trainer.driver.watcher import run_with_watcher
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.origin import check_origin
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.mirror.owner import Ownership
from rljob_trainer.outages.registry import Outages


async def open_run_copy(
    environment: Environment, access: ObjectAccess, outages: Outages, disk: RunDisk, report: Callable[[str], None]
) -> Mirror | None:
    """Return the copy, which this head owns, once its folder has what a resume needs; None without
    spec.checkpoint.storage. `report`: gets what the head waits for. Raise UserError if the copy is of another job or
    run."""
    job, run_dir = environment.job, environment.run_dir
    url = job.copy_url
    if url is None:
        return None
    folder = ObjectFolder(url, access)
    ownership = Ownership(folder, f"{job.metadata.namespace}/{job.metadata.name}", environment.head_job_uid)
    check = partial(check_origin, environment)
    mirror = Mirror(run_dir, folder, ownership, environment.shown_job_file, outages, disk, report, check)
    report(f"reads the copy of the run at {url}")
    await mirror.take_over()
    try:
        await run_with_watcher(mirror.bring_back(), mirror.renew())
    except UserError:
        await mirror.close(saves=False)
        raise
    return mirror
