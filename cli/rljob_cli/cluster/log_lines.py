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
from rljob_api.wire.contract import LABEL_JOB, LABEL_REWARD_MODEL, LABEL_ROLE
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.formatting import format_job_name
from rljob_cli.manifests import labels_of, role_of
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import name_of

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")
_STYLES = [Style.parse(f"{prefix}{colour}") for prefix in ("", "bright_") for colour in _COLOURS]
"""Without red, black and white."""
_ROLES = ("head", "trainer", "rollout", "reward")


@dataclass(frozen=True)
class Selection:
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
    found = await cluster.list_pods(f"{LABEL_JOB}={selection.job},{LABEL_ROLE} in ({', '.join(_ROLES)})")
    return sorted((pod for pod in found if _is_selected(pod, selection)), key=name_of)


def _is_selected(pod: Manifest, selection: Selection) -> bool:
    role, spec = role_of(pod), pod["spec"]
    containers = [container["name"] for container in [*(spec.get("initContainers") or []), *spec["containers"]]]
    has_role = selection.role in (None, role) or (selection.role == "reward" and role.startswith("reward-"))
    return has_role and selection.container in (None, *containers)


def check_role(job: Manifest, role: str | None) -> None:
    """Raise UserError if the job has no such role, or none of its Pods serves the reward."""
    rewards = {f"reward-{reward['name']}": reward for reward in job["spec"].get("rewards") or []}
    if role in rewards and not {"function", "model", "judge"} & rewards[role].keys():
        reference = rewards[role].get("rewardModelRef")
        model = reference and reference["name"]
        where = "runs at its url"
        if model:
            where = f"runs in RewardModel {model}: kubectl logs -l {LABEL_REWARD_MODEL}={model}"
        raise UserError(f"{format_job_name(job)}: {role} is not served by a Pod of this job; it {where}")
    if role is not None and role not in (*_ROLES, *rewards):
        raise UserError(f"--role must be one of {', '.join([*_ROLES, *rewards])}, got {role}")


def container_of(pod: Manifest) -> str:
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    role = labels_of(pod).get(LABEL_ROLE)
    return role if role in names else names[0]


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
