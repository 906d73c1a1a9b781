"""Lines about what a check waits for: the start of a service, which imports the function, or its results."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rljob_api.errors import UserError
from rljob_api.wire.contract import MARK_INSTALLED, MARK_INSTALLS, PORT_SERVICE
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.manifests import is_ready, labels_of
from rljob_core.backend import Manifest
from rljob_core.children.common import read_service_name
from rljob_core.plan.observed_job import container_statuses, name_of

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


def describe_end(pod: Manifest, ended: Mapping[str, Any]) -> str:
    """Return how a container of `find_ended_container` ended, with the end of its log."""
    message = (ended["message"] or "it printed nothing").strip()
    return f"{ended['name']} of {name_of(pod)} ended with exit code {ended['exitCode']}:\n{message}"


def describe_error(_: Manifest, ended: Mapping[str, Any]) -> str:
    """Return what a server said at its end, alone."""
    return (ended["message"] or "its server ended").strip().removeprefix("error: ")


async def wait_until_ready(
    cluster: LocalCluster, name: str, describe: Callable[[Manifest, Mapping[str, Any]], str] = describe_error
) -> str:
    """Return the URL of the first ready Pod of a service. Raise UserError with `describe` if its server ended."""
    while True:
        cluster.check()
        for pod in pods_of(cluster, name):
            if is_ready(pod):
                return f"http://{pod['status']['podIP']}:{cluster.network.port(PORT_SERVICE)}"
            if ended := find_ended_container(pod):
                raise UserError(describe(pod, ended))
        await asyncio.sleep(_POLL_SECONDS)


def find_import_place(cluster: LocalCluster, name: str) -> str:
    """Return `, at FILE:LINE` where the server's log says that the import is; empty if it says nothing."""
    logs = sorted((cluster.paths.root / "logs").glob(f"*{name}*.log"))
    places = [place for log in logs for place in _IMPORT_PLACE.findall(log.read_text(errors="replace"))]
    return f", at {places[-1]}" if places else ""


def is_installing(cluster: LocalCluster, name: str) -> bool:
    """Whether the requirements of the service are installed now."""
    logs = [log.read_text(errors="replace") for log in (cluster.paths.root / "logs").glob(f"*{name}*.log")]
    return any(f"uv {MARK_INSTALLS} " in text and MARK_INSTALLED not in text for text in logs)


async def report(say: Callable[[str], None], describe: Callable[[float], str]) -> None:
    """Say after two seconds, and then every ten, what is waited for. `describe`: takes the seconds until then. Runs
    until it is cancelled."""
    started, pause = time.monotonic(), _FIRST_SECONDS
    while True:
        await asyncio.sleep(pause)
        say(describe(time.monotonic() - started))
        pause = _LATER_SECONDS


async def report_waits(
    cluster: LocalCluster, services: Mapping[str, str], say: Callable[[str], None], limit_seconds: float | None = None
) -> None:
    """Report imports and calls of services. `services`: by name, as text, such as `reward correct`."""
    limit = f"; at most {limit_seconds:g} s" if limit_seconds else ""

    def describe(seconds: float) -> str:
        starting = [name for name in services if not any(map(is_ready, pods_of(cluster, name)))]
        places = "".join(find_import_place(cluster, name) for name in starting)
        what = f"the import of {', '.join(services[name] for name in starting)}"
        what = what if starting else f"a call of {', '.join(services.values())}"
        if installing := [services[name] for name in starting if is_installing(cluster, name)]:
            what = f"uv, which installs the requirements of {', '.join(installing)}"
        return f"waits for {what} ({seconds:.0f} s{limit}){places}"

    await report(say, describe)
