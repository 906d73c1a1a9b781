"""Headless Services as lines of a hosts file, as cluster DNS would resolve them. Pure.

Invariant: a name resolves only to ready Pods, unless the Service sets publishNotReadyAddresses.
"""

from collections.abc import Iterable

from rljob_cli.manifests import is_ready, labels_of, namespace_of, phase_of
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import is_terminating, name_of

_ENDED = ("Succeeded", "Failed")


def build_hosts(services: Iterable[Manifest], pods: Iterable[Manifest]) -> str:
    """Return the file's text. Pods of StatefulSets also get POD.SERVICE."""
    lines, pods = [], [pod for pod in pods if pod.get("status", {}).get("podIP") and not is_terminating(pod)]
    for service in services:
        spec = service["spec"]
        full = f"{name_of(service)}.{namespace_of(service)}"
        for pod in pods:
            is_selected = spec["selector"].items() <= labels_of(pod).items() and phase_of(pod) not in _ENDED
            if not is_selected or not (spec.get("publishNotReadyAddresses") or is_ready(pod)):
                continue
            names = [name_of(service), full, f"{full}.svc", f"{full}.svc.cluster.local"]
            if pod["spec"].get("subdomain", name_of(service)) == name_of(service):
                hostname = pod["spec"].get("hostname", name_of(pod))
                names += [f"{hostname}.{name}" for name in names]
            lines.append(f"{pod['status']['podIP']} {' '.join(names)}")
    return "".join(f"{line}\n" for line in sorted(set(lines)))
