from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_cli.cluster.client import NotFoundError
from rljob_cli.cluster.logs import (
    Follower,
    Instance,
    Line,
    Printer,
    Selection,
    check_role,
    container_of,
    follow_logs,
    parse_line,
    print_logs,
)


class FakeCluster:
    """Returns one list of lines each time that a log is opened."""

    def __init__(self, *logs: list[str]) -> None:
        self.logs = list(logs)
        self.requests: list[dict[str, Any]] = []

    async def stream_log(self, pod: str, container: str, **options: Any) -> AsyncIterator[str]:
        self.requests.append(options)
        for line in self.logs.pop(0):
            yield line


def stamp(number: int) -> str:
    return f"2026-01-01T00:00:00.{number:09d}Z"


def drain(follower: Follower) -> list[str]:
    return [follower.lines.get_nowait().text for _ in range(follower.lines.qsize())]


def test_lines_of_kubelets_in_different_time_zones_sort_by_time() -> None:
    east = parse_line("a", "2026-01-01T01:00:00.000000001+01:00 later")
    utc = parse_line("b", "2026-01-01T00:00:00.000000000Z first")
    assert sorted([east, utc]) == [utc, east]


async def test_follower_repeats_and_loses_no_line_after_a_broken_connection() -> None:
    cluster = FakeCluster([f"{stamp(1)} a", f"{stamp(2)} b"], [f"{stamp(1)} a", f"{stamp(2)} b", f"{stamp(3)} c"])
    follower = Follower(Instance("pod", "uid", 0), "head", tail=5)
    await follower.read(cluster)  # type: ignore[arg-type]
    await follower.read(cluster)  # type: ignore[arg-type]
    assert drain(follower) == ["a", "b", "c"]
    assert cluster.requests[0]["tail"] == 5
    assert cluster.requests[1]["tail"] is None, "all lines since then are wanted"
    assert cluster.requests[1]["since_seconds"] >= 1


async def test_follower_keeps_all_lines_with_the_same_time() -> None:
    follower = Follower(Instance("pod", "uid", 0), "head", tail=None)
    await follower.read(FakeCluster([f"{stamp(1)} a", f"{stamp(1)} b"]))  # type: ignore[arg-type]
    assert drain(follower) == ["a", "b"]


def test_printer_uses_one_colour_per_pod_and_none_in_a_pipe() -> None:
    printed: list[str] = []
    printer = Printer(printed.append, colour=True)
    for pod in ("a", "bb", "a"):
        printer.print(Line("", pod, "text \x1b[1mbold"))
    first, second, third = (text.split("m")[0] for text in printed)
    assert first == third != second
    assert printed[0].endswith("\x1b[0m text \x1b[1mbold\x1b[0m\n"), "a colour ends with its line"
    Printer(printed.append, colour=False).print(Line("", "a", "text"))
    assert printed[-1] == "a text\n"


@pytest.mark.parametrize("colour", [True, False])
def test_printer_writes_no_control_characters_of_a_log(colour: bool) -> None:
    printed: list[str] = []
    Printer(printed.append, colour).print(Line("", "a", "\x1b]52;c;aGk=\x07 \x1b[2J \x9b2J 10%\r20%"))
    written = re.sub(r"\x1b\[\d*m", "", printed[0]).removesuffix("\n")
    assert written.isprintable(), "besides colours"
    assert colour == ("\x1b" in printed[0])


def test_container_of_the_role_is_chosen_among_others() -> None:
    pod = {
        "metadata": {"labels": {"rljob.dev/role": "rollout"}},
        "spec": {"containers": [{"name": "proxy"}, {"name": "rollout"}]},
    }
    assert container_of(pod) == "rollout"


def test_role_without_pods_is_rejected_with_its_place() -> None:
    rewards = [{"name": "shared", "rewardModelRef": {"name": "judge"}}]
    job = {"metadata": {"namespace": "ns", "name": "sums"}, "spec": {"rewards": rewards}}
    with pytest.raises(UserError, match="RewardModel judge"):
        check_role(job, "reward-shared")
    with pytest.raises(UserError, match="must be one of head, trainer, rollout, reward, reward-shared"):
        check_role(job, "judge")


def test_rollouts_in_the_trainers_pods_log_there() -> None:
    job = {"metadata": {"namespace": "ns", "name": "sums"}, "spec": {"rollout": {"placement": "trainer"}}}
    check_role(job, "trainer")
    with pytest.raises(UserError, match=r"rollouts run in the trainer's Pods .* log there: --role trainer"):
        check_role(job, "rollout")


def test_roles_of_an_agent_are_known_if_the_job_has_one() -> None:
    agent = {"tools": [{"name": "search"}]}
    job = {"metadata": {"namespace": "ns", "name": "sums"}, "spec": {"rewards": [], "agent": agent}}
    check_role(job, "agent")
    check_role(job, "agent-search")
    with pytest.raises(UserError, match="reward, agent, agent-search, got agent-user"):
        check_role(job, "agent-user")


class JobWithJudge:
    """A head, and a judge's Pod with its vLLM."""

    namespace = "ns"

    def __init__(self, phase: str = "Running") -> None:
        self.phase = phase
        self.opened: list[tuple[str, str]] = []

    async def get_job(self, name: str) -> dict[str, Any]:
        spec = {"rewards": [{"name": "good", "judge": {}}]}
        return {"metadata": {"namespace": "ns", "name": name}, "spec": spec, "status": {"phase": self.phase}}

    async def list_pods(self, selector: str) -> list[dict[str, Any]]:
        def pod(name: str, role: str, *sidecars: str) -> dict[str, Any]:
            init = {"initContainers": [{"name": sidecar} for sidecar in sidecars]} if sidecars else {}
            labels = {"rljob.dev/role": role} | ({"rljob.dev/reward": "good"} if role == "reward" else {})
            spec = {"nodeName": "node", "containers": [{"name": role}], **init}
            return {"metadata": {"name": name, "uid": name, "labels": labels}, "spec": spec}

        return [pod("judge", "reward", "vllm"), pod("head", "head")]

    async def stream_log(self, pod: str, container: str, **_: Any) -> AsyncIterator[str]:
        self.opened.append((pod, container))
        if self.opened.count((pod, container)) > 1:
            raise NotFoundError("the Pod was deleted")
        times = (1, 4) if pod == "head" else (2, 3)
        for time in times:
            yield f"{stamp(time)} {container} {time}"


@pytest.mark.parametrize(
    ("selection", "opened"),
    [
        (Selection("sums"), [("head", "head"), ("judge", "reward")]),
        (Selection("sums", container="vllm"), [("judge", "vllm")]),
        (Selection("sums", role="reward-good", container="vllm"), [("judge", "vllm")]),
        (Selection("sums", role="head", container="vllm"), []),
    ],
)
async def test_logs_read_the_selected_containers(
    selection: Selection, opened: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = JobWithJudge()
    assert await print_logs(cluster, selection) == (0 if opened else 1)  # type: ignore[arg-type]
    assert cluster.opened == opened
    printed = capsys.readouterr()
    if not opened:
        assert "no head Pods with a container vllm found; run `rljob explain sums -n ns`" in printed.err
    if len(opened) == 2:
        lines = ["head  head 1", "judge reward 2", "judge reward 3", "head  head 4"]
        assert printed.out.splitlines() == lines, "merged by time"


async def test_followed_logs_end_with_the_job(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("rljob_cli.cluster.logs._POLL_SECONDS", 0.05)
    assert await follow_logs(JobWithJudge("Succeeded"), Selection("sums")) == 0  # type: ignore[arg-type]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [number for pod, _, number in printed if pod == "head"] == ["1", "4"]
    assert [number for pod, _, number in printed if pod == "judge"] == ["2", "3"]
