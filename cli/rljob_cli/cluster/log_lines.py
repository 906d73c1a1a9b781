"""Which Pods and containers `rljob logs` reads, and how it parses and prints their lines. Pure, except find_pods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Console
from rich.style import Style

from rljob_api.errors import UserError
from rljob_api.wire.contract import LABEL_JOB, LABEL_ROLE
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.formatting import format_job_name
from rljob_cli.manifests import role_of
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import name_of

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")
_STYLES = [Style.parse(f"{prefix}{colour}") for prefix in ("", "bright_") for colour in _COLOURS]
"""Without red, black and white."""
_ROLES = ("head", "trainer", "rollout", "reward")


@dataclass(frozen=True)
class Selection:
    """Which logs, as the options say."""

    job: str
    role: str | None = None
    container: str | None = None
    """None: the container that is named after the role."""
    tail: int | None = None
    """Lines of each Pod."""
    previous: bool = False


class Line(NamedTuple):
    """One line, ordered by its time in UTC."""

    time: str
    pod: str
    text: str


class Printer:
    """Prints lines behind their Pod's name, in a colour per Pod on a terminal."""

    def __init__(self, write: Callable[[str], object], colour: bool) -> None:
        self._write, self._colour = write, colour
        self._styles: dict[str, Style] = {}
        self._width = 0

    def widen(self, pods: list[str]) -> None:
        """Make room for the names of the Pods."""
        self._width = max([self._width, *map(len, pods)])

    def print(self, line: Line) -> None:
        self.widen([line.pod])
        style = self._styles.setdefault(line.pod, _STYLES[len(self._styles) % len(_STYLES)])
        name = line.pod.ljust(self._width)
        # The text is not changed: it may contain escape sequences.
        self._write(f"{style.render(name) if self._colour else name} {line.text}\n")


def make_printer() -> Printer:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    console = Console()
    return Printer(write, console.is_terminal and not console.no_color)


async def find_pods(cluster: Cluster, selection: Selection) -> list[Manifest]:
    """Return the job's Pods that have the selected role and container."""
    found = await cluster.list_pods(f"{LABEL_JOB}={selection.job},{LABEL_ROLE} in ({', '.join(_ROLES)})")
    selected = (pod for pod in found if _has_role(role_of(pod), selection.role))
    return sorted((pod for pod in selected if selection.container in (None, *_container_names(pod))), key=name_of)


def check_role(job: Manifest, role: str | None) -> None:
    """Raise UserError if the job has no such role, or none of its Pods serves the reward."""
    rewards = {f"reward-{reward['name']}": reward for reward in job["spec"].get("rewards") or []}
    if role in rewards and not {"function", "model", "judge"} & rewards[role].keys():
        reference = rewards[role].get("rewardModelRef")
        where = "runs at its url"
        if reference:
            where = (
                f"runs in RewardModel {reference['name']}: kubectl logs -l rljob.dev/reward-model={reference['name']}"
            )
        raise UserError(f"{format_job_name(job)}: {role} is not served by a Pod of this job; it {where}")
    if role is not None and role not in (*_ROLES, *rewards):
        raise UserError(f"--role must be one of {', '.join([*_ROLES, *rewards])}, got {role}")


def _has_role(role: str, selected: str | None) -> bool:
    return selected in (None, role) or (selected == "reward" and role.startswith("reward-"))


def container_of(pod: Manifest) -> str:
    """Return the container that is named after the Pod's role, else the first."""
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    role = (pod["metadata"].get("labels") or {}).get(LABEL_ROLE)
    return role if role in names else names[0]


def _container_names(pod: Manifest) -> list[str]:
    spec = pod["spec"]
    return [str(container["name"]) for container in [*(spec.get("initContainers") or []), *spec["containers"]]]


def has_node(pod: Manifest) -> bool:
    """The API server has no log of a Pod without a node."""
    return bool(pod["spec"].get("nodeName"))


def parse_line(pod: str, raw: str) -> Line:
    stamp, _, text = raw.partition(" ")
    return Line(_to_utc(stamp), pod, text)


def _to_utc(stamp: str) -> str:
    """2026-01-01T01:00:00.000000001+01:00 as 2026-01-01T00:00:00.000000001: kubelets write their node's time zone."""
    if stamp.endswith("Z"):
        return stamp[:-1]
    try:
        # The digits of the second stay text, because Python's times have no nanoseconds.
        moment, fraction = datetime.fromisoformat(stamp), stamp[19:].partition("+")[0].partition("-")[0]
    except ValueError:
        return stamp
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") + fraction
