"""A local cluster for tests: real processes on loopback addresses that no other test uses."""

from __future__ import annotations

import asyncio
import time

import pytest

from rljob_api.manifest.job import RLJob
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.local.network import claim_block
from rljob_cli.local.node import container, kubelet
from tests.support.waiting import DEADLINE_SECONDS

_LABELS = {"rljob.dev/job": "t"}
_RETRY_SECONDS = 0.05


def build_job():
    return RLJob.model_validate(
        {
            "metadata": {"name": "t"},
            "spec": {
                "model": {"source": "/m"},
                "data": {"train": {"source": "/d"}},
                "rewards": [{"name": "r", "function": {"inline": "x"}}],
            },
        }
    )


async def until(condition, what):
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen: {what}"
        await asyncio.sleep(0.01)
    return found


def deployment(name, script, replicas=1, **container):
    """A Deployment of one Python script."""
    spec = {"name": "c", "command": ["python", "-c", script], **container}
    pod = {"containers": [spec], "volumes": container.pop("volumes", []), "terminationGracePeriodSeconds": 5}
    spec.pop("volumes", None)
    template = {"metadata": {"labels": {**_LABELS, "app": name}}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": _LABELS},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template},
    }


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    """A running cluster that retries quickly."""
    monkeypatch.setattr(container, "_BACKOFF_SECONDS", _RETRY_SECONDS)
    monkeypatch.setattr(container, "_CONFIG_RETRY_SECONDS", _RETRY_SECONDS)
    monkeypatch.setattr(container, "_EAGER_PERIOD_SECONDS", _RETRY_SECONDS)
    monkeypatch.setattr(kubelet, "_RETRY_SECONDS", _RETRY_SECONDS)
    async with LocalCluster(build_job(), claim_block(str(tmp_path)), tmp_path / "run") as started:
        yield started
