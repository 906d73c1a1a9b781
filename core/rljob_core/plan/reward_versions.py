"""The versions of a reward that its Pods run. Pure; reads Pods and decides nothing.

A version is what changes how a Pod scores: what its server reads at its start (the digest on the Pod), and the images
of its template, without a webhook's changes. The server computes its own version, which the driver compares, from the
same inputs. Invariant: equal sets of Pods give equal messages.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rljob_api.wire.contract import ENV_REWARD_IMAGES
from rljob_core.backend import Manifest
from rljob_core.children.common import ANNOTATION_CONFIG_HASH, REWARD
from rljob_core.plan.conditions import Reason
from rljob_core.plan.observed_job import RoleView, is_ready

MIXED = "MixedVersions"
STARTING = "RollingOut"
SETTLED = "SingleVersion"
_NUM_DIGITS = 7


class Version(NamedTuple):
    """What determines how a Pod scores."""

    digest: str
    images: str


def version_of(pod: Manifest) -> Version:
    """The version of a Pod, or of a template."""
    annotations = pod["metadata"].get("annotations") or {}
    spec = pod.get("spec") or {}
    env = [entry for c in spec.get("containers") or [] if c.get("name") == REWARD for entry in c.get("env") or []]
    images = next((entry.get("value", "") for entry in env if entry["name"] == ENV_REWARD_IMAGES), "")
    return Version(str(annotations.get(ANNOTATION_CONFIG_HASH, "")), images)


def count_versions(pods: Iterable[Manifest]) -> dict[Version, int]:
    """Pods per version, in a fixed order. Pods without a digest do not count."""
    return dict(sorted(Counter(version for version in map(version_of, pods) if version.digest).items()))


def describe_mixed_rewards(roles: Iterable[RoleView]) -> str:
    """The rewards whose ready Pods run different versions, with their numbers; empty if there are none."""
    mixed = []
    for role in roles:
        counts = count_versions(filter(is_ready, role.pods)) if role.kind == REWARD else {}
        if len(counts) > 1:
            name = role.name.removeprefix(f"{REWARD}-")
            mixed.append(f"reward {name}: {describe_counts(counts)}; each step is scored by one version only")
    return "; ".join(mixed)


def describe_counts(counts: dict[Version, int]) -> str:
    """'2 ready Pods of version 1a2b3c4 and 1 of 9f8e7d6', with their images if only these differ."""
    names = [version.digest[:_NUM_DIGITS] for version in counts]
    if len({version.digest for version in counts}) < len(counts):
        names = [f"{name} ({version.images})" for name, version in zip(names, counts, strict=True)]
    (first, number), *others = zip(names, counts.values(), strict=True)
    parts = [f"{number} ready {'Pod' if number == 1 else 'Pods'} of version {first}"]
    return " and ".join(parts + [f"{number} of {name}" for name, number in others])


def describe_update(pods: Sequence[Manifest], template: Manifest | None) -> Reason | None:
    """Reason and message of a rolling update; None if all Pods run the same version, which is the template's."""
    counts, existing = count_versions(filter(is_ready, pods)), count_versions(pods)
    desired = {version_of(template)} if template else set(existing)
    if len(existing) < 2 and set(existing) <= desired:
        return None
    if len(counts) > 1:
        return MIXED, describe_counts(counts)
    ready = describe_counts(counts) if counts else "no Pod is ready"
    return STARTING, f"{ready}, and none of the new version yet"
