"""What a job's types cannot say but its children need. Returns every problem at once, each with place and remedy.

The CRD and pydantic come first; these are the checks that remain when both have passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.errors import UserError
from rljob_api.job import RLJob
from rljob_api.roles import Role
from rljob_api.sources import parse_source
from rljob_operator.children.common import MAX_NAME_LENGTH, MAX_SERVICE_NAME_LENGTH, reward_name
from rljob_operator.children.config import build_job_config
from rljob_operator.children.merge import merge

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_CONFIG_BYTES = 1_000_000
"""A ConfigMap may hold 1 MiB."""
_RESERVED_ENV = "RLJOB_"


def find_problems(job: RLJob) -> list[str]:
    """All that keeps the job from being built; empty when nothing does."""
    return [*_name_problems(job), *_source_problems(job), *_role_problems(job), *_size_problems(job)]


def _name_problems(job: RLJob) -> Iterator[str]:
    name = job.metadata.name
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        yield (
            f"metadata.name must be at most {MAX_NAME_LENGTH} of a-z, 0-9 and '-', beginning with a letter and "
            f"ending with a letter or digit, got {name}"
        )
    for index, reward in enumerate(job.spec.rewards):
        child = reward_name(job, reward)
        if reward.function and len(child) > MAX_SERVICE_NAME_LENGTH:
            yield (
                f"spec.rewards[{index}].name makes a Service name of {len(child)} characters ({child}), at most "
                f"{MAX_SERVICE_NAME_LENGTH} are allowed; shorten it or metadata.name"
            )


def _source_problems(job: RLJob) -> Iterator[str]:
    data = job.spec.data
    sources = {"spec.model.source": job.spec.model.source, "spec.data.train.source": data.train.source}
    if data.eval:
        sources["spec.data.eval.source"] = data.eval.source
    for path, source in sources.items():
        try:
            parsed = parse_source(source)
        except UserError as error:
            yield f"{path} {error}"
            continue
        if parsed.kind == "relative":
            yield (
                f"{path} must be hf://org/name, pvc://claim/path or an absolute path, got {source}; "
                "only `rljob run` takes relative ones"
            )


def _role_problems(job: RLJob) -> Iterator[str]:
    for path, role in roles_of(job):
        for name in role.env:
            if name.startswith(_RESERVED_ENV):
                yield f"{path}.env: {name} is reserved; names must not begin with {_RESERVED_ENV}"
        unknown = set(role.template) - {"metadata", "spec"}
        if unknown:
            yield f"{path}.template may have metadata and spec, got {', '.join(sorted(unknown))}"
        try:
            merge({"metadata": {}, "spec": {"containers": []}}, role.template, f"{path}.template")
        except UserError as error:
            yield str(error)


def roles_of(job: RLJob) -> list[tuple[str, Role]]:
    """Every role that has Pods of ours, with its place in the manifest."""
    spec = job.spec
    roles: list[tuple[str, Role]] = [
        ("spec.head", spec.head),
        ("spec.trainer", spec.trainer),
        ("spec.rollout", spec.rollout),
    ]
    return roles + [(f"spec.rewards[{i}]", reward) for i, reward in enumerate(spec.rewards) if reward.function]


def _size_problems(job: RLJob) -> Iterator[str]:
    num_bytes = sum(len(text.encode()) for text in build_job_config(job)["data"].values())
    if num_bytes > _MAX_CONFIG_BYTES:
        yield (
            f"the job takes {num_bytes} bytes as a ConfigMap, at most {_MAX_CONFIG_BYTES} are allowed; move inline "
            "functions to a ConfigMap of your own (function.configMapKeyRef)"
        )
