"""Lines about what a check waits for: the start of a service, which imports the function, or its results."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rljob_api.errors import UserError
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.manifests import is_ready, labels_of
from rljob_core.backend import Manifest
from rljob_core.children.common import read_service_name
from rljob_core.plan.observed_job import container_statuses

LIMIT_SECONDS = 60.0
"""For the import of a function that has nothing to install, and for its call by `rljob validate`."""
_POLL_SECONDS = 0.02
_FIRST_SECONDS, _LATER_SECONDS = 2.0, 10.0
_IMPORT_PLACE = re.compile(r"the import of .* now at (.+?:\d+)")


def pods_of(cluster: LocalCluster, name: str) -> list[Manifest]:
    """Return the Pods of a service."""
    return [pod for pod in cluster.store.pods.values() if read_service_name(labels_of(pod)) == name]


def find_ended_container(pod: Manifest) -> dict[str, Any] | None:
    """Return how a container of the Pod ended, with the container's name; None if none has ended."""
    for status in container_statuses(pod):
        if ended := status["state"].get("terminated") or status["lastState"].get("terminated"):
            return ended | {"name": status["name"]}
    return None


async def wait_until_ready(cluster: LocalCluster, name: str) -> Manifest:
    """Return the first Pod of a service that is ready. Raise UserError with what its server said if it ended."""
    while True:
        cluster.check()
        for pod in pods_of(cluster, name):
            if is_ready(pod):
                return pod
            if ended := find_ended_container(pod):
                raise UserError((ended["message"] or "its server ended").strip().removeprefix("error: "))
        await asyncio.sleep(_POLL_SECONDS)


def find_import_place(cluster: LocalCluster, name: str) -> str:
    """Return `, at FILE:LINE` where the server's log says that the import is; empty if it says nothing."""
    logs = sorted((cluster.paths.root / "logs").glob(f"*{name}*.log"))
    places = [place for log in logs for place in _IMPORT_PLACE.findall(log.read_text(errors="replace"))]
    return f", at {places[-1]}" if places else ""


async def report_waits(
    cluster: LocalCluster, services: Mapping[str, str], say: Callable[[str], None], limit_seconds: float | None = None
) -> None:
    """Say after two seconds, and then every ten, what is waited for. Runs until it is cancelled.

    `services`: by name, as text, such as `reward correct`.
    """
    started, pause = time.monotonic(), _FIRST_SECONDS
    limit = f"; at most {limit_seconds:g} s" if limit_seconds else ""
    while True:
        await asyncio.sleep(pause)
        starting = [name for name in services if not any(map(is_ready, pods_of(cluster, name)))]
        places = "".join(find_import_place(cluster, name) for name in starting)
        what = f"the import of {', '.join(services[name] for name in starting)}"
        what = what if starting else f"a call of {', '.join(services.values())}"
        say(f"waits for {what} ({time.monotonic() - started:.0f} s{limit}){places}")
        pause = _LATER_SECONDS
