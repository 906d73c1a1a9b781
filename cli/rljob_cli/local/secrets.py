"""A user's Secrets on this machine: environment variables of this program replace them. Kept only in memory.

Invariant: only variables that the job references are read.
"""

import base64
from collections.abc import Iterator, Mapping

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.sources import SecretKeyRef
from rljob_core.backend import Manifest


def find_reference(settings: Reward | CallService) -> SecretKeyRef | None:
    """Return the key of the API key of its endpoint."""
    return settings.endpoint.api_key_secret_ref if settings.endpoint else None


def _find_template_references(settings: ServiceSettings) -> Iterator[SecretKeyRef]:
    """Yield the Secret keys in the env of the service's own Pod template: how a function gets a key of the user's."""
    spec = settings.template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for container in containers if isinstance(containers, list) else ():
        for entry in container.get("env") or ():
            if reference := (entry.get("valueFrom") or {}).get("secretKeyRef"):
                yield SecretKeyRef.model_validate({name: reference[name] for name in ("name", "key")})


def build_secrets(job: RLJob, environ: Mapping[str, str]) -> dict[str, Manifest]:
    """Return Secrets by name, with the keys whose variables are set."""
    secrets: dict[str, Manifest] = {}
    services = [service.settings for service in job.spec.services]
    references = [job.spec.hub.token_secret_ref, *map(find_reference, services)]
    references += [reference for service in services for reference in _find_template_references(service)]
    references += [model.api_key_secret_ref for model in job.spec.agent.models]
    references.append(job.spec.tracing.headers_secret_ref if job.spec.tracing else None)
    for reference in filter(None, references):
        value = environ.get(reference.key)
        if value:
            empty: Manifest = {"kind": "Secret", "metadata": {"name": reference.name}, "data": {}}
            secret = secrets.setdefault(reference.name, empty)
            secret["data"][reference.key] = base64.b64encode(value.encode()).decode()
    return secrets
