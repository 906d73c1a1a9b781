"""What is said of env:// sources where nothing is started: their rows are known once the job runs."""

from rljob_api.manifest.job import RLJob


def describe_unread(job: RLJob) -> list[str]:
    """Return a line for each source whose rows are not known before the job runs."""
    return [
        f"{path}: {source.source}: rows of the agent, read when the job starts; their columns and lengths are not "
        "checked here"
        for path, source in job.spec.env_sources.items()
    ]
