"""`rljob submit` from a local folder to a job that succeeds: files in a ConfigMap, the model on a claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import CLAIM, NAMESPACE, ROOT, TIMEOUT_SECONDS, Cluster, log_step, wait_for

NAME = "submitted"
_POOL = (
    "{{nodeSelector: {{rljob.dev/pool: {0}}}, tolerations: [{{key: rljob.dev/pool, value: {0}, effect: NoSchedule}}]}}"
)
_FIELDS = {
    "data.format": "text",  # the tiny model has learned no chat
    "data.systemPrompt": "null",
    "algorithm.groupSize": "4",
    "schedule.steps": "2",
    "schedule.promptsPerStep": "4",
    "trainer.dtype": "float32",
    "rollout.maxModelLen": "256",
    "rollout.kvCacheMemory": "1Gi",
    "rollout.sampling.maxTokens": "16",
    "head.nodePool": _POOL.format("trainer"),
    "trainer.nodePool": _POOL.format("trainer"),
    "rollout.nodePool": _POOL.format("rollout"),
    "rewards[0].nodePool": _POOL.format("reward"),
}


def rljob(*arguments: str | Path) -> str:
    """Return what a command prints; its progress is visible."""
    command = [sys.executable, "-m", "rljob_cli.main", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}: {done.stdout}"
    return done.stdout


def test_submitted_scaffold_trains_and_its_files_are_deleted_with_it(cluster: Cluster, tmp_path: Path) -> None:
    log_step(f"{NAME}: submitting a scaffold with the tiny model")
    cluster.kubectl("delete", "rljob", "-n", NAMESPACE, NAME, "--ignore-not-found", "--wait")
    folder = tmp_path / NAME
    rljob("init", folder, "--gpus", "0", "--model", ROOT / ".models/tiny-qwen3")
    job = folder / "rljob.yaml"
    (folder / "limits.py").write_text("MAX_SCORE = 1.0\n")
    reward = folder / "reward.py"
    reward.write_text(f"{reward.read_text()}\n\nimport limits  # next to this file\n\nassert limits.MAX_SCORE\n")
    # A relative path is a folder of this machine, which is copied.
    (folder / "model").symlink_to(ROOT / ".models/tiny-qwen3")
    options = [f"--set=spec.{field}={value}" for field, value in (_FIELDS | {"model.source": "./model"}).items()]
    target = ["-n", NAMESPACE, "--claim", CLAIM, *cluster.kubectl_command[1:]]
    result = json.loads(rljob("submit", job, *options, *target, "--wait", "-o", "json"))
    assert (result["phase"], result["name"]) == ("Succeeded", NAME)

    again = json.loads(rljob("submit", job, *options, *target, "-o", "json"))
    assert again["copied_bytes"] == 0, "the model is on the claim"
    [files] = [m["name"] for m in again["objects"] if m["kind"] == "ConfigMap"]
    cluster.kubectl("delete", "rljob", "-n", NAMESPACE, NAME)

    def were_deleted() -> bool:
        return not cluster.kubectl("get", "configmap", "-n", NAMESPACE, files, "--ignore-not-found").strip()

    wait_for(f"ConfigMap {files} is deleted with its job", were_deleted, 120)
