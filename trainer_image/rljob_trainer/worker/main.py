"""The trainer Pod: a Ray node that offers its ranks. `python -m rljob_trainer.worker`.

After the head restarts, it joins again, so a dead driver costs no Pod. Invariant: no process of a node outlives the
node or this program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from types import FrameType

import psutil

from rljob_api.errors import UserError
from rljob_api.read.pod_files import load_job_file
from rljob_api.wire import discovery
from rljob_api.wire.contract import ENV_HEAD, ENV_JOB_FILE, ENV_POD_IP, RAY_RESOURCE_TRAINER, ExitCode
from rljob_api.wire.termination import end_program
from rljob_inputs.memory.object_store import trainer_store_bytes
from rljob_trainer.ranks import ray_node

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_WAIT_LOG_SECONDS = 30.0
_HEAD_GONE_SECONDS = 3.0
"""A head that accepts no connection for this long is dead. Ray's own node would wait for a minute."""
_LOOKUP_SECONDS = 5.0
"""Interval of DNS lookups of the head. A new head has a new address, and another Pod may reuse the old one for its own
Ray, which accepts connections."""
_STOP_SECONDS = 8.0
_PR_SET_CHILD_SUBREAPER = 36


def build_command(address: str, head_address: str, num_gpus: int, folder: str, store_bytes: int) -> list[str]:
    """Return the command line of the node, with an object store of `store_bytes`. It offers one rank per GPU,
    or one without GPUs."""
    arguments = [
        f"--address={head_address}:{ray_node.ray_port()}",
        f"--num-gpus={num_gpus}",
        f"--resources={json.dumps({RAY_RESOURCE_TRAINER: max(1, num_gpus)})}",
        # Any free port: Pods of one machine may share its network.
        "--dashboard-agent-listen-port=0",
        "--metrics-export-port=0",
    ]
    return ray_node.build_start_command(arguments, address, folder, store_bytes)


def build_environment(values: Mapping[str, str]) -> dict[str, str]:
    num_threads = {ray_node.ENV_NUM_THREADS: values["OMP_NUM_THREADS"]} if values.get("OMP_NUM_THREADS") else {}
    return {**values, **ray_node.ray_environment(), **num_threads}


class Worker:
    def __init__(self, address: str, head: str, num_gpus: int, store_bytes: int) -> None:
        self._address, self._head, self._num_gpus, self._store_bytes = address, head, num_gpus, store_bytes
        self._stopping = False

    def stop(self, number: int, _: FrameType | None) -> None:
        log.info("received %s; stopping", signal.Signals(number).name)
        self._stopping = True

    def run(self) -> None:
        while (head_address := self._wait_for_head()) is not None:
            self._run_node(head_address)

    def _wait_for_head(self) -> str | None:
        """Return the address of a head that accepts connections; None when stopped."""
        next_log = 0.0
        while not self._stopping:
            for address in discovery.resolve(self._head):
                if ray_node.is_listening(address):
                    return address
            if time.monotonic() >= next_log:
                log.info("waiting for the head: %s:%d", self._head, ray_node.ray_port())
                next_log = time.monotonic() + _WAIT_LOG_SECONDS
            time.sleep(_POLL_SECONDS)
        return None

    def _run_node(self, head_address: str) -> None:
        log.info("joining the head at %s", head_address)
        started = time.monotonic()
        with ray_node.ray_folder() as folder:
            command = build_command(self._address, head_address, self._num_gpus, folder, self._store_bytes)
            environment = build_environment(os.environ)
            node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                reason = self._watch(node, head_address)
                log.info("leaving the head at %s: %s", head_address, reason)
            finally:
                terminate_descendants(_STOP_SECONDS if self._stopping else 0)
        # A node that cannot join must not be restarted in a tight loop.
        while not self._stopping and time.monotonic() < started + _HEAD_GONE_SECONDS:
            time.sleep(_POLL_SECONDS)

    def _watch(self, node: subprocess.Popen[bytes], head_address: str) -> str:
        """Wait until the node ends, the head dies or moves, or the worker is stopped. Return the reason."""
        last_seen = last_lookup = time.monotonic()
        raylet = ray_node.Raylet(node.pid)
        while not self._stopping:
            if node.poll() is not None:
                return f"the Ray node exited with {node.returncode}"
            if raylet.has_died():
                return "the Ray node lost its raylet"
            now = time.monotonic()
            if ray_node.is_listening(head_address):
                last_seen = now
            elif now - last_seen > _HEAD_GONE_SECONDS:
                return "the head accepts no connection"
            if now - last_lookup > _LOOKUP_SECONDS:
                addresses = discovery.resolve(self._head)
                if addresses and head_address not in addresses:  # no address proves nothing: DNS may be down
                    return "the head has another address"
                last_lookup = time.monotonic()
                last_seen += last_lookup - now  # a slow DNS server does not mean a dead head
            time.sleep(_POLL_SECONDS)
        return "the worker was stopped"


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that terminate_descendants finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def terminate_descendants(grace_seconds: float) -> None:
    """Send SIGTERM to all descendants, after `grace_seconds` SIGKILL, and return once all have ended. With 0, kill them
    at once."""
    deadline = time.monotonic() + grace_seconds
    this_process = psutil.Process()
    if grace_seconds:
        for process in this_process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
    while remaining := this_process.children(recursive=True):
        if time.monotonic() >= deadline:
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        job = load_job_file(os.environ[ENV_JOB_FILE])
    except UserError as error:
        return end_program(str(error), ExitCode.USER)
    worker = Worker(
        os.environ[ENV_POD_IP], os.environ[ENV_HEAD], job.spec.trainer.gpus_per_replica, trainer_store_bytes(job)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    adopt_orphans()
    worker.run()
    return ExitCode.SUCCEEDED
