from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rljob_api.errors import TransientError
from rljob_cli.cluster import top
from rljob_cli.cluster.words import format_age, format_table

NOW = datetime(2026, 1, 2, tzinfo=UTC)
JOB = {"metadata": {"namespace": "ns", "name": "sums", "creationTimestamp": "2026-01-01T23:59:00Z"}, "spec": {}}


def test_cpu_and_memory_are_summed_over_a_pods_containers() -> None:
    pod = {"metadata": {"name": "p"}, "spec": {}}
    usage = [{"usage": {"cpu": "250m", "memory": "1Mi"}}, {"usage": {"cpu": "500000000n", "memory": "1024Ki"}}]
    view = top.view_job(JOB, [pod], [{"metadata": {"name": "p"}, "containers": usage}], NOW)
    assert (view.pods[0].cpu_cores, view.pods[0].memory_bytes) == (0.75, 2 * 2**20)
    assert "MEMORY" in top.format_job(view, None)
    assert "MEMORY" not in top.format_job(top.view_job(JOB, [pod], [], NOW), None)


def test_lines_are_cut_to_the_terminal_and_nowhere_else() -> None:
    rows = [["sums", "x" * 100]]
    assert max(map(len, format_table(["NAME", "WAITS FOR"], rows, 40))) == 40
    assert max(map(len, format_table(["NAME", "WAITS FOR"], rows))) > 100


@pytest.mark.parametrize(("seconds", "age"), [(45, "45s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200000, "2d")])
def test_ages_read_as_kubectls(seconds: int, age: str) -> None:
    assert format_age(NOW - timedelta(seconds=seconds), NOW) == age


def test_watch_keeps_what_it_saw_while_the_cluster_cannot_be_asked(capsys: Any) -> None:
    def draws() -> Any:
        yield "table 1"
        yield TransientError("the API server does not answer")
        yield "table 2"
        yield KeyboardInterrupt()

    looks = draws()

    def draw() -> str:
        look = next(looks)
        if isinstance(look, BaseException):
            raise look
        return str(look)

    with pytest.raises(KeyboardInterrupt):
        top.watch(draw, 0.0)
    said = capsys.readouterr().out
    assert said.count("table 1") == 2, "drawn again while nothing newer is known"
    assert said.index("not up to date: the API server does not answer") < said.index("table 2")
