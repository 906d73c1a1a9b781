"""What stands for a user's Secrets on this machine: environment variables of this program. Kept in memory alone.

Owns which variable stands for which key of which Secret. Invariant: only keys that the job names are looked at.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward
from rljob_api.manifest.scorers import SecretKeyRef
from rljob_operator.backend import Manifest


def find_reference(reward: Reward) -> SecretKeyRef | None:
    """The Secret's key that a reward's server needs."""
    endpoint = reward.judge.endpoint if reward.judge else None
    return endpoint.api_key_secret_ref if endpoint else None


def build_secrets(job: RLJob, environ: Mapping[str, str]) -> dict[str, Manifest]:
    """Secrets by name, with the keys whose variables are set."""
    secrets: dict[str, Manifest] = {}
    for reference in _references(job):
        value = environ.get(reference.key)
        if value:
            empty: Manifest = {"kind": "Secret", "metadata": {"name": reference.name}, "data": {}}
            secret = secrets.setdefault(reference.name, empty)
            secret["data"][reference.key] = base64.b64encode(value.encode()).decode()
    return secrets


def _references(job: RLJob) -> Iterator[SecretKeyRef]:
    yield from filter(None, map(find_reference, job.spec.rewards))
