"""The environment of containers: entries of `env`, and which of a role's own replace them.

To send traces, the head and the servers of a job need the standard variables of OpenTelemetry.
"""

from collections.abc import Mapping
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.manifest.sources import OBJECT_VARIABLES, Hub, ObjectStorage
from rljob_api.wire import contract
from rljob_api.wire.contract import ENV_OTLP_ENDPOINT, ENV_OTLP_HEADERS
from rljob_core.backend import Manifest, Owner
from rljob_core.children import common
from rljob_core.children.start_model import list_model_env
from rljob_core.defaults import Defaults

TOKEN_KEY = "token"
ENV_HUB_ENDPOINT = "HF_ENDPOINT"
ENV_HUB_TOKEN = "HF_TOKEN"
ENV_OBJECT_ENDPOINT = "AWS_ENDPOINT_URL_S3"
ENV_OBJECT_REGION = "AWS_REGION"


def build_token_env(secret_name: str) -> list[Manifest]:
    """The env of every container: the token of its job or RewardModel, and the Pod's address."""
    secret = {"name": secret_name, "key": TOKEN_KEY}
    return [
        {"name": contract.ENV_TOKEN, "valueFrom": {"secretKeyRef": secret}},
        build_field_env(contract.ENV_POD_IP, "status.podIP"),
    ]


def build_field_env(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def build_job_env(job: RLJob, *, run_dir: bool) -> list[Manifest]:
    """The env of the trainer image's containers: the job file, the head, the model, and the run folder."""
    env = {
        contract.ENV_JOB_FILE: f"{contract.PATH_CONFIG}/{contract.FILE_JOB}",
        contract.ENV_HEAD: common.child_name(job, common.HEAD),
        **list_model_env(job),
    } | ({contract.ENV_RUN_DIR: contract.PATH_RUN} if run_dir else {})
    sources = build_source_env(job.spec.hub, job.spec.object_storage)
    return build_token_env(common.child_name(job, "token")) + build_env(env) + sources


def build_grace_env(template: Mapping[str, Any]) -> list[Manifest]:
    """The grace period that the user's template sets: head and trainers save what fits in it."""
    seconds = (template.get("spec") or {}).get("terminationGracePeriodSeconds")
    return build_env({contract.ENV_GRACE_SECONDS: str(seconds)}) if isinstance(seconds, int) else []


def build_source_env(hub: Hub, storage: ObjectStorage) -> list[Manifest]:
    """How programs find what hf:// and s3:// sources name."""
    return _build_hub_env(hub) + _build_object_env(storage)


def _build_object_env(storage: ObjectStorage) -> list[Manifest]:
    """How botocore finds the storage and the credentials. Keys are optional: each storage has its own."""
    env = build_env({ENV_OBJECT_ENDPOINT: storage.endpoint} if storage.endpoint else {})
    env += build_env({ENV_OBJECT_REGION: storage.region} if storage.region else {})
    if storage.secret_ref:
        for name in OBJECT_VARIABLES:
            reference = {"name": storage.secret_ref.name, "key": name, "optional": True}
            env.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return env


def _build_hub_env(hub: Hub) -> list[Manifest]:
    """How huggingface_hub, and so every library that reads models or datasets, finds the Hub and the token."""
    env = build_env({ENV_HUB_ENDPOINT: hub.endpoint} if hub.endpoint else {})
    if hub.token_secret_ref:
        env.append({"name": ENV_HUB_TOKEN, "valueFrom": {"secretKeyRef": hub.token_secret_ref.to_manifest()}})
    return env


def build_log_env(defaults: Defaults) -> list[Manifest]:
    return build_env({contract.ENV_LOG_FORMAT: defaults.log_format}) if defaults.log_format != "text" else []


def override_env(env: list[Manifest], overrides: dict[str, str]) -> list[Manifest]:
    """The env with the role's own. The API server rejects two entries of the same name."""
    return [entry for entry in env if entry["name"] not in overrides] + build_env(overrides)


def build_env(env: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in env.items()]


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
