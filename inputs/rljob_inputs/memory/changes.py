"""A job with other values of some fields, as the manifest's rules allow them. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from rljob_api.manifest.job import RLJob


def change_job(job: RLJob, fields: Mapping[str, Any], removed: Collection[str] = ()) -> RLJob:
    """Return the job with these fields, and without `removed` ones, which get their defaults. Raise ValidationError if
    a rule forbids it. Paths are those within spec, such as trainer.gradientCheckpointing or rewards[0].model.dtype."""
    data = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path in (*fields, *removed):
        *parents, leaf = path.split(".")
        section = data["spec"]
        for name, index in map(_split_index, parents):
            section = section.setdefault(name, {}) if index is None else section[name][index]
        if path in fields:
            section[leaf] = fields[path]
        else:
            section.pop(leaf, None)
    return RLJob.model_validate(data)


def _split_index(part: str) -> tuple[str, int | None]:
    """Return name and index: rewards[0] -> rewards, 0."""
    name, _, index = part.removesuffix("]").partition("[")
    return name, int(index) if index else None
