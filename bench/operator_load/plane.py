"""A control plane with KWOK's nodes and their addresses, a namespace and CRDs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from rljob_cluster.control_plane.control_plane import COMPONENTS, ControlPlane
from rljob_cluster.control_plane.kwok import CONTROLLER_ARGUMENTS, run_kwok
from rljob_core.kube.client import MERGE_PATCH, KubeApi, connect

CONSOLE = Console(stderr=True, log_path=False, width=140)
NAMESPACE = "bench"
NUM_NODES = 50
_FIRST_NETWORK = 40
"""Pods of node N have addresses of 127.(40 + N).0.0/16, on which the benchmark's drivers listen."""
_START_SECONDS = 60.0
_CLIENT_RATE = ("--kube-api-qps=2000", "--kube-api-burst=4000")
_ARGUMENTS = {
    "kube-scheduler": _CLIENT_RATE,
    # Pods get loopback addresses, which endpoints may not have, and no Service is used here.
    "kube-controller-manager": (
        *_CLIENT_RATE,
        "--controllers=*,-endpoints-controller,-endpointslice-controller,-endpointslice-mirroring-controller",
        *CONTROLLER_ARGUMENTS,
    ),
}


@contextlib.contextmanager
def run_plane(folder: Path, address: str, crds: Sequence[Path]) -> Iterator[ControlPlane]:
    """The controllers have no rate limits, so that they are not the bottleneck."""
    with (
        ControlPlane(folder, address=address, components=COMPONENTS, extra_arguments=_ARGUMENTS) as plane,
        run_kwok(plane, num_nodes=NUM_NODES, jobs_end=False),
    ):
        asyncio.run(_prepare(plane, crds))
        yield plane


@contextlib.asynccontextmanager
async def open_api(plane: ControlPlane) -> AsyncIterator[KubeApi]:
    api = await connect(str(plane.kubeconfig))
    try:
        yield api
    finally:
        await api.close()


async def _prepare(plane: ControlPlane, crds: Sequence[Path]) -> None:
    async with open_api(plane) as api:
        for path in crds:
            definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            await api.request("POST", definitions, body=yaml.safe_load(path.read_text()))
        await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": NAMESPACE}})
        for index in range(NUM_NODES):
            cidr = f"127.{_FIRST_NETWORK + index}.0.0/16"
            body = {"spec": {"podCIDR": cidr, "podCIDRs": [cidr]}}
            await api.request("PATCH", f"/api/v1/nodes/kwok-{index}", body=body, content_type=MERGE_PATCH)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        deadline = time.monotonic() + _START_SECONDS
        while not (await api.request("GET", account)).get("items"):  # Pods cannot be created without it
            if time.monotonic() > deadline or not plane.processes.is_running("kube-controller-manager"):
                log = (plane.folder / "logs/kube-controller-manager.log").read_text()
                sys.exit(f"the controller manager created no service account:\n{log[-1000:]}")
            await asyncio.sleep(0.1)
