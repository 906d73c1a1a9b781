"""What the commands on a cluster's jobs do, from arguments to exit code.

1: the cluster cannot be asked, or refuses; 2: there is no such job, or it is not fit for what is asked.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rljob_api.errors import UserError
from rljob_cli.cluster import control
from rljob_cli.cluster.client import Cluster, ClusterError, Target
from rljob_cli.cluster.explain import explain, format_explanation
from rljob_cli.cluster.observation import take_look
from rljob_cli.commands import guard
from rljob_cli.main import EXIT_FAILED, EXIT_INTERRUPTED
from rljob_operator.backend import utc_now

if TYPE_CHECKING:
    from rljob_cli.cluster.logs import Selection

_OUTPUTS = ("text", "json")


def _on_cluster(target: Target, output: str, command: Callable[[Cluster], int]) -> int:
    def guarded() -> int:
        if output not in _OUTPUTS:
            raise UserError(f"--output must be one of {', '.join(_OUTPUTS)}, got {output}")
        try:
            return command(Cluster(target))
        except ClusterError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return guard(guarded)


def control_command(verb: str, name: str, target: Target, output: str) -> int:
    """suspend, resume or retry a job."""

    def command(cluster: Cluster) -> int:
        job = cluster.get_job(name)
        plans = {"suspend": control.plan_suspend, "resume": control.plan_resume}
        change = plans[verb](job) if verb in plans else control.plan_retry(job, utc_now())
        control.apply_change(cluster, name, change)
        print(json.dumps(control.describe_change(verb, job, change)) if output == "json" else change.message)
        return 0

    return _on_cluster(target, output, command)


def explain_command(name: str, target: Target, output: str) -> int:
    def command(cluster: Cluster) -> int:
        found = explain(take_look(cluster, name))
        print(json.dumps(found.to_json()) if output == "json" else format_explanation(found, utc_now()))
        return 0

    return _on_cluster(target, output, command)


def top_command(
    name: str | None, target: Target, *, everywhere: bool, watch: bool, output: str, interval_seconds: float = 2.0
) -> int:
    from rljob_cli.cluster import top
    from rljob_cli.cluster.rewards import fetch_rewards

    def command(cluster: Cluster) -> int:
        if name and everywhere:
            raise UserError("-A lists the jobs of all namespaces: leave NAME out, or say -n NAMESPACE")
        if watch and output == "json":
            raise UserError("--watch shows a table; for JSON again and again, call without it")

        def draw() -> str:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            if name:
                manifest, (pods, usage) = cluster.get_job(name), top.fetch_pods(cluster, name)
                rewards = fetch_rewards(cluster, manifest, pods)
                view = top.view_job(manifest, pods, usage, utc_now(), rewards)
                return json.dumps(view.to_json()) if output == "json" else top.format_job(view, width)
            rows = top.view_jobs(cluster.list_jobs(everywhere), utc_now())
            if output == "json":
                return json.dumps([row.to_json() for row in rows])
            return top.format_jobs(rows, cluster.namespace, everywhere, width)

        if watch:
            top.watch(draw, interval_seconds)
        else:
            print(draw())
        return 0

    return _on_cluster(target, output, command)


def logs_command(target: Target, selection: Selection, *, follow: bool) -> int:
    from rljob_cli.cluster import logs

    def command(cluster: Cluster) -> int:
        if follow and selection.previous:
            raise UserError("--previous is of containers that have ended: there is nothing to follow; leave out -f")
        return logs.follow_logs(cluster, selection) if follow else logs.print_logs(cluster, selection)

    return _on_cluster(target, "text", command)
