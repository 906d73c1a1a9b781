"""A user's Secrets on this machine: environment variables of this program replace them. Kept only in memory.

Invariant: only variables that the job references are read.
"""

import base64
from collections.abc import Mapping

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward
from rljob_api.manifest.sources import SecretKeyRef
from rljob_operator.backend import Manifest


def find_reference(reward: Reward) -> SecretKeyRef | None:
    endpoint = reward.judge.endpoint if reward.judge else None
    return endpoint.api_key_secret_ref if endpoint else None


def build_secrets(job: RLJob, environ: Mapping[str, str]) -> dict[str, Manifest]:
    """Return Secrets by name, with the keys whose variables are set."""
    secrets: dict[str, Manifest] = {}
    for reference in filter(None, [job.spec.hub.token_secret_ref, *map(find_reference, job.spec.rewards)]):
        value = environ.get(reference.key)
        if value:
            empty: Manifest = {"kind": "Secret", "metadata": {"name": reference.name}, "data": {}}
            secret = secrets.setdefault(reference.name, empty)
            secret["data"][reference.key] = base64.b64encode(value.encode()).decode()
    return secrets
