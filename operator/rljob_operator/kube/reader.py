"""Stored objects as this operator's types, also where the CRDs are newer than it.

A newer CRD fills its new fields' defaults into every object that is read. What holds just such a default asks for
nothing that this operator does not do, and is left out; anything else that it does not know is somebody's wish, and
refused with its remedy. Of a status, which is ours to write, unknown fields go in any case.
Invariant: without an unknown field nothing is asked of the API server.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.read.documents import Location, format_path
from rljob_operator.backend import Manifest
from rljob_operator.kube.client import ApiError, KubeApi
from rljob_operator.kube.crds import Schema, crd_path, find_schema
from rljob_operator.kube.invalid import (
    InvalidRewardModelError,
    build_unreadable_job,
    build_unreadable_model,
    find_problems,
)
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB, Resource
from rljob_operator.loop.reconcile import InvalidJobError

log = logging.getLogger(__name__)
_SCHEMA_SECONDS = 60.0
"""For so long a schema counts as the cluster's."""
_Owner = TypeVar("_Owner", RLJob, RewardModel)


class Reader:
    """See above."""

    def __init__(self, api: KubeApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._schemas: dict[Resource, tuple[float, Schema]] = {}
        self._told: set[str] = set()

    async def read_job(self, manifest: Manifest) -> RLJob:
        """Raises InvalidJobError."""
        try:
            return await self._read(RLJob, RLJOB, manifest)
        except ValidationError as error:
            raise InvalidJobError(build_unreadable_job(manifest), find_problems(RLJob, error)) from None

    async def read_model(self, manifest: Manifest) -> RewardModel:
        """Raises InvalidRewardModelError."""
        try:
            return await self._read(RewardModel, REWARD_MODEL, manifest)
        except ValidationError as error:
            raise InvalidRewardModelError(build_unreadable_model(manifest), find_problems(RewardModel, error)) from None

    async def _read(self, type_: type[_Owner], resource: Resource, manifest: Manifest) -> _Owner:
        try:
            return type_.model_validate(manifest)
        except ValidationError as error:
            unknown = [e["loc"] for e in error.errors(include_url=False) if e["type"] == "extra_forbidden"]
            if not unknown:
                raise
            known = leave_out(manifest, unknown, await self._schema(resource))
            self._tell(resource, unknown)
            return type_.model_validate(known)

    async def _schema(self, resource: Resource) -> Schema:
        """Of the cluster's CRD; empty when it may not be read, or is not there now."""
        asked_at, schema = self._schemas.get(resource, (float("-inf"), {}))
        if self._clock() - asked_at >= _SCHEMA_SECONDS:
            try:
                schema = find_schema(resource, await self._api.request("GET", crd_path(resource)))
            except (ApiError, TransientError) as error:
                log.warning("the CRD of %s cannot be read: %s", resource.plural, error)
            self._schemas[resource] = (self._clock(), schema)
        return schema

    def _tell(self, resource: Resource, unknown: list[Location]) -> None:
        fields = {format_path(tuple(part for part in where if isinstance(part, str))) for where in unknown}
        if new := sorted(fields - self._told):
            self._told |= fields
            log.warning("CRD %s is newer than this operator: upgrade it; unknown: %s", resource.plural, ", ".join(new))


def leave_out(manifest: Manifest, unknown: list[Location], schema: Schema) -> Manifest:
    """The manifest without those of the unknown fields that are the status's, or hold what the CRD fills in."""
    known = copy.deepcopy(manifest)
    for *parents, name in unknown:
        holder: Any = known
        rules: Schema = schema
        for part in parents:
            holder = holder[part]
            rules = rules.get("items", {}) if isinstance(part, int) else rules.get("properties", {}).get(part, {})
        field = rules.get("properties", {}).get(name, {})
        is_default = "default" in field and holder[name] == _fill_in(field, field["default"])
        if is_default or parents[:1] == ["status"]:
            del holder[name]
    return known


def _fill_in(schema: Schema, value: Any) -> Any:
    """The value with the defaults of what it leaves out, as the API server fills them in."""
    if isinstance(value, list):
        return [_fill_in(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    given = value | {name: f["default"] for name, f in fields.items() if name not in value and "default" in f}
    return {name: _fill_in(fields.get(name, {}), item) for name, item in given.items()}
