from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_cli.cluster.logs import Follower, Instance, Line, Printer, check_role, container_of, parse_line


class Cluster:
    """Gives one list of lines for each time that a log is opened."""

    def __init__(self, *logs: list[str]) -> None:
        self.logs = list(logs)
        self.asked: list[dict[str, Any]] = []

    def open_log(self, pod: str, container: str, **options: Any) -> Iterator[str]:
        self.asked.append(options)
        return iter(self.logs.pop(0))


def stamp(number: int) -> str:
    return f"2026-01-01T00:00:00.{number:09d}Z"


def test_lines_of_kubelets_in_different_zones_are_in_the_order_of_their_times() -> None:
    east = parse_line("a", "2026-01-01T01:00:00.000000001+01:00 later")
    utc = parse_line("b", "2026-01-01T00:00:00.000000000Z first")
    assert sorted([east, utc]) == [utc, east]


def test_a_connection_that_broke_prints_no_line_twice_and_loses_none() -> None:
    cluster = Cluster([f"{stamp(1)} a", f"{stamp(2)} b"], [f"{stamp(1)} a", f"{stamp(2)} b", f"{stamp(3)} c"])
    follower = Follower(Instance("pod", "uid", 0), "head", tail=5)
    follower.read(cluster)  # type: ignore[arg-type]
    follower.read(cluster)  # type: ignore[arg-type]
    assert [follower.lines.get_nowait().text for _ in range(follower.lines.qsize())] == ["a", "b", "c"]
    assert cluster.asked[0]["tail"] == 5
    assert cluster.asked[1]["tail"] is None, "the lines written meanwhile are all wanted"
    assert cluster.asked[1]["since_seconds"] >= 1


def test_lines_of_one_moment_are_all_printed() -> None:
    follower = Follower(Instance("pod", "uid", 0), "head", tail=None)
    follower.read(Cluster([f"{stamp(1)} a", f"{stamp(1)} b"]))  # type: ignore[arg-type]
    assert follower.lines.qsize() == 2


def test_each_pod_has_a_colour_of_its_own_and_none_in_a_pipe() -> None:
    said: list[str] = []
    printer = Printer(said.append, colour=True)
    for pod in ("a", "bb", "a"):
        printer.print(Line("", pod, "text"))
    first, second, third = (text.split("m")[0] for text in said)
    assert first == third != second
    Printer(said.append, colour=False).print(Line("", "a", "text"))
    assert said[-1] == "a text\n"


def test_the_container_of_the_role_is_read_whatever_runs_beside_it() -> None:
    pod = {
        "metadata": {"labels": {"rljob.dev/role": "rollout"}},
        "spec": {"containers": [{"name": "proxy"}, {"name": "rollout"}]},
    }
    assert container_of(pod) == "rollout"


def test_a_reward_that_runs_elsewhere_says_where() -> None:
    rewards = [{"name": "shared", "rewardModelRef": {"name": "judge"}}]
    job = {"metadata": {"namespace": "ns", "name": "sums"}, "spec": {"rewards": rewards}}
    with pytest.raises(UserError, match="RewardModel judge"):
        check_role(job, "reward-shared")
    with pytest.raises(UserError, match="must be one of head, trainer, rollout, reward, reward-shared"):
        check_role(job, "judge")
