"""The model of a step of a job in a cluster, copied to this machine: through its head, or through a reader Pod.

Invariant: which base model a checkpoint is exported with, and whether its code runs here, is the API server's word, not
that of the head, in which a job's own code may run.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import aiohttp

from rljob_api.errors import TransientError, UserError
from rljob_api.run.folder import FILE_JOB
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.head_files import FolderCopy, open_files
from rljob_cli.output import say
from rljob_core.children.common import to_yaml
from rljob_inputs.machine.installation import require

Use = Callable[[Path, int, Path | None], int]
"""Gets the copy of the run's folder, the step, and where in the copy its export is; None: it has the checkpoint."""


async def use_model(cluster: Cluster, job: str, step: str, given: str, parent: Path, use: Use) -> int:
    """Call `use` with a copy of what the run has of a step: a number, last or best. The copy is below `parent`, and
    is deleted afterwards. Return its exit code. Raise UserError if the run has no such step."""
    with tempfile.TemporaryDirectory(prefix=".export-", dir=parent) as folder:
        copy = Path(folder) / job
        copy.mkdir()
        async with open_files(cluster, job) as head, aiohttp.ClientSession() as session:
            say(f"copies the model of RLJob {cluster.namespace}/{job}")
            files = FolderCopy(session, head, copy)
            try:
                await files.refresh(lambda log: False)
                found = await files.copy_model(step)
            except TransientError as error:
                raise ClusterError(f"RLJob {cluster.namespace}/{job}: {error}") from None
            except UserError as error:
                raise UserError(f"{given}: {error}") from None
        if found.is_export:
            return use(copy, found.step, copy / found.folder)
        manifest = await cluster.get_job(job)
        kept = {name: manifest[name] for name in ("apiVersion", "kind", "spec")}
        kept["metadata"] = {name: manifest["metadata"].get(name) for name in ("name", "namespace")}
        (copy / FILE_JOB).write_text(to_yaml(kept), encoding="utf-8")
        require(f"rljob export of a checkpoint; {job} has no export of step {found.step}")
        return await asyncio.to_thread(use, copy, found.step, None)
