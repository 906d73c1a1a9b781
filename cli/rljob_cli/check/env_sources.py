"""What is said of env:// sources where nothing is started: their rows are known once the job runs."""

from rljob_api.manifest.job import RLJob

_WITHOUT_ROWS = ", and no function is called without a row: `rljob test-agent` does"


def describe_unread(job: RLJob) -> list[str]:
    """Return a line for each source whose rows are not known before the job runs."""
    return [
        f"{path}: {source.source}: rows of the agent, read when the job starts; their columns and lengths are not "
        f"checked here{_WITHOUT_ROWS if path == 'spec.data.train' else ''}"
        for path, source in job.spec.env_sources.items()
    ]
