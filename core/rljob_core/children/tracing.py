"""What the head and the servers of a job need to send traces: the standard variables of OpenTelemetry."""

from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.wire.contract import ENV_OTLP_ENDPOINT, ENV_OTLP_HEADERS
from rljob_core.backend import Manifest, Owner


def build_tracing_env(owner: Owner) -> list[Manifest]:
    """Nothing without spec.tracing, and for a RewardModel: its env has the variables, if it is traced."""
    tracing = owner.spec.tracing if isinstance(owner, RLJob) else None
    if tracing is None:
        return []
    env: list[Manifest] = [{"name": ENV_OTLP_ENDPOINT, "value": tracing.endpoint}]
    if tracing.headers_secret_ref:
        reference = {"secretKeyRef": tracing.headers_secret_ref.to_manifest()}
        env.append({"name": ENV_OTLP_HEADERS, "valueFrom": reference})
    return env


def read_tracing(owner: Owner) -> dict[str, Any]:
    """What a server restarts for; empty if nothing is traced. The head alone reads samplingRatio."""
    tracing = owner.spec.tracing if isinstance(owner, RLJob) else None
    settings = {} if tracing is None else tracing.to_manifest(exclude={"sampling_ratio": True})
    return {"tracing": settings} if settings else {}


def list_tracing_urls(owner: Owner, role: Role) -> list[str]:
    """The URL that a role sends traces to, if it does."""
    own = role.env.get(ENV_OTLP_ENDPOINT)
    if isinstance(owner, RLJob):
        return [own or owner.spec.tracing.endpoint] if owner.spec.tracing else []
    return [own] if own else []
