from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_cli.cluster.logs import (
    Follower,
    Instance,
    Line,
    Printer,
    Selection,
    check_role,
    container_of,
    parse_line,
    print_logs,
)


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


class JobWithAJudge:
    """A head, and a judge's Pod with its vLLM."""

    namespace = "ns"

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []

    def get_job(self, name: str) -> dict[str, Any]:
        return {"metadata": {"namespace": "ns", "name": name}, "spec": {"rewards": [{"name": "good", "judge": {}}]}}

    def list_pods(self, selector: str) -> list[dict[str, Any]]:
        def pod(name: str, role: str, *beside: str) -> dict[str, Any]:
            init = {"initContainers": [{"name": each} for each in beside]} if beside else {}
            labels = {"rljob.dev/role": role} | ({"rljob.dev/reward": "good"} if role == "reward" else {})
            spec = {"nodeName": "node", "containers": [{"name": role}], **init}
            return {"metadata": {"name": name, "labels": labels}, "spec": spec}

        return [pod("judge", "reward", "vllm"), pod("head", "head")]

    def open_log(self, pod: str, container: str, **_: Any) -> Iterator[str]:
        self.opened.append((pod, container))
        return iter([f"{stamp(1)} {container} speaks"])


@pytest.mark.parametrize(
    ("selection", "opened"),
    [
        (Selection("sums"), [("head", "head"), ("judge", "reward")]),
        (Selection("sums", container="vllm"), [("judge", "vllm")]),
        (Selection("sums", role="reward-good", container="vllm"), [("judge", "vllm")]),
        (Selection("sums", role="head", container="vllm"), []),
    ],
)
def test_a_container_beside_the_roles_own_is_read_where_it_is(
    selection: Selection, opened: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = JobWithAJudge()
    assert print_logs(cluster, selection) == (0 if opened else 1)  # type: ignore[arg-type]
    assert cluster.opened == opened
    if not opened:
        assert "the job has no head Pods with a container vllm now" in capsys.readouterr().err
