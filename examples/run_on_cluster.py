"""The quickstart on this machine's cluster, from files to report: `make demo-cluster`.

Does what a user of a cluster does once: install the chart, and create a claim with the model and the data. Then it runs
`kubectl apply -k examples/quickstart`, prints the job's status while it runs, and reads the results from the claim.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from rljob_api.run.folder import FILE_METRICS, last_checkpoint
from rljob_api.run.metrics import read_metrics
from rljob_api.run.sessions import Session
from rljob_api.run.summaries import read_driver_summary
from rljob_cli.commands import has_bfloat16
from rljob_cli.run.summary import build_summary, print_summary
from rljob_cluster.host.go_programs import find_or_build
from rljob_cluster.host.paths import state_folder

EXAMPLES = Path(__file__).resolve().parent
MODEL = EXAMPLES.parent / ".models/smollm2-135m-instruct"
NAMESPACE = "rljob-demo"
NAME = "quickstart"
_POLL_SECONDS = 2.0
_LINE_LENGTH = 110
_POD_MODE = 0o777  # Pods use the folder as another user


def kubectl(*arguments: str, input: str | None = None) -> str:
    command = [str(find_or_build("kubectl") / "kubectl"), "--kubeconfig", str(state_folder() / "kubeconfig")]
    done = subprocess.run([*command, *arguments], input=input, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def cluster(*arguments: str) -> None:
    if subprocess.run([sys.executable, "-m", "rljob_cluster", *arguments]).returncode:
        raise SystemExit(1)


def fill_claim(folder: Path) -> None:
    """Copy the model and the data, and delete an earlier run, as `rljob run --fresh` does."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(_POD_MODE)
    shutil.rmtree(folder / NAME, ignore_errors=True)
    shutil.copytree(MODEL, folder / MODEL.name, dirs_exist_ok=True)
    shutil.copytree(EXAMPLES / NAME / "data", folder / "data", dirs_exist_ok=True)


def render() -> str:
    """Return the manifests of `kubectl apply -k`; with the type that `rljob run` would choose for these CPUs."""
    text = kubectl("kustomize", str(EXAMPLES / NAME))
    if has_bfloat16():
        return text
    manifests = list(yaml.safe_load_all(text))
    for manifest in manifests:
        if manifest["kind"] == "RLJob":
            manifest["spec"]["trainer"]["dtype"] = "float32"
    return yaml.safe_dump_all(manifests)


def follow() -> dict[str, Any]:
    """Print changes until the job has ended, and its Pods once. Return the finished job."""
    start, last_line, has_run = time.monotonic(), "", False
    while True:
        job: dict[str, Any] = json.loads(kubectl("get", "rljob", NAME, "-n", NAMESPACE, "-o", "json"))
        line = describe(job.get("status") or {})
        if line != last_line:
            print(f"[{time.monotonic() - start:4.0f}s] {line}", flush=True)
            last_line = line
        if not has_run and find_true(job, "Running"):
            has_run = True
            print(
                kubectl("get", "pods", "-n", NAMESPACE, "-o", "wide", "-l", f"rljob.dev/job={NAME}"), end="", flush=True
            )
        if find_true(job, "Succeeded") or find_true(job, "Failed"):
            return job
        time.sleep(_POLL_SECONDS)


def describe(status: dict[str, Any]) -> str:
    """Describe a job in one line: what it waits for until it runs, then its progress."""
    progress, phase = status.get("progress") or {}, status.get("phase") or "Pending"
    if not progress.get("step"):
        running: dict[str, Any] = next((c for c in status.get("conditions") or () if c["type"] == "Running"), {})
        waits = running.get("message") if running.get("status") != "True" else progress.get("phase")
        return textwrap.shorten(f"{phase}: {waits or 'its Pods are starting'}", _LINE_LENGTH, placeholder=" ...")
    reward = progress.get("reward")
    shown = "" if reward is None else f"  reward {float(reward):.3f}"
    return f"{phase}: step {progress['step']}/{progress['totalSteps']}{shown}"


def find_true(job: dict[str, Any], type_: str) -> dict[str, Any] | None:
    found = (job.get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == type_ and c["status"] == "True"), None)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    claim, start = state_folder() / "volumes" / NAME, time.monotonic()
    cluster("install")
    kubectl(
        "apply",
        "-f",
        "-",
        input=yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
    )
    kubectl("delete", "rljob", NAME, "-n", NAMESPACE, "--ignore-not-found", "--cascade=foreground")
    fill_claim(claim)
    cluster("volume", NAME, str(claim), "--namespace", NAMESPACE)
    changed = "" if has_bfloat16() else " (with spec.trainer.dtype: float32, for CPUs without bfloat16)"
    print(f"kubectl apply -n {NAMESPACE} -k examples/{NAME}{changed}", flush=True)
    print(kubectl("apply", "-n", NAMESPACE, "-f", "-", input=render()), end="", flush=True)
    applied = time.monotonic()
    job = follow()
    if failed := find_true(job, "Failed"):
        print(f"{failed['reason']}: {failed['message']}", file=sys.stderr)
        return 1
    run = claim / NAME
    restarts = {role["name"]: role["restarts"] for role in job["status"]["roles"]}
    session = Session(
        started=job["metadata"]["creationTimestamp"], seconds=time.monotonic() - applied, restarts=restarts
    )
    summary = build_summary(
        name=NAME,
        phase=job["status"]["phase"],
        total_steps=job["spec"]["schedule"]["steps"],
        driver=read_driver_summary(run),
        metrics=read_metrics(run / FILE_METRICS),
        sessions=[session],
        checkpoint=last_checkpoint(run),
    )
    print_summary(Console(), summary.model_copy(update={"export": str(run / "export")}))
    print(f"{time.monotonic() - start:.0f} s with the chart and the files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
