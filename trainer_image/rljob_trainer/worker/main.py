"""The trainer Pod: a Ray node that offers its ranks. `python -m rljob_trainer.worker`.

Waits for the head, runs `ray start --block`, and joins again when the head was started anew, at whatever address its
name has then, so that a dead driver costs no Pod. What runs in the ranks is the trainer group's. Invariant: no process
of a node outlives it, nor this program: each node begins with nothing left of the one before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire import discovery
from rljob_api.wire.contract import ENV_HEAD, ENV_JOB_FILE, ENV_POD_IP, RAY_RESOURCE_TRAINER, ExitCode
from rljob_trainer.ranks.process_setup import ENV_NUM_THREADS
from rljob_trainer.ranks.process_tree import Raylet, descendants
from rljob_trainer.ranks.ray_head import ray_environment, ray_port

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100_000_000
"""Samples of a step pass through it, weights do not."""
_POLL_SECONDS = 0.5
_WAIT_LOG_SECONDS = 30.0
_CONNECT_SECONDS = 2.0
_HEAD_GONE_SECONDS = 3.0
"""A head that accepts no connection for this long is dead. Ray's own node would wait for a minute."""
_LOOK_UP_SECONDS = 5.0
"""Between two looks at which address the head's name has. A new head has a new one, and the old one may be another
Pod's by then, with a Ray of its own that accepts connections."""
_STOP_SECONDS = 8.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Environment:
    """What the Pod was given."""

    address: str
    head: str
    num_ranks: int
    num_gpus: int


def read_environment(values: dict[str, str]) -> Environment:
    """Raises UserError for what is missing."""
    missing = [name for name in (ENV_POD_IP, ENV_HEAD, ENV_JOB_FILE) if not values.get(name)]
    if missing:
        raise UserError(f"environment: {', '.join(missing)} must be set; the operator sets it in each trainer Pod")
    manifest = yaml.safe_load(Path(values[ENV_JOB_FILE]).read_text(encoding="utf-8"))
    trainer = RLJob.model_validate(manifest).spec.trainer
    return Environment(values[ENV_POD_IP], values[ENV_HEAD], max(1, trainer.gpus_per_replica), trainer.gpus_per_replica)


def build_command(environment: Environment, head_address: str, folder: Path) -> list[str]:
    """The command line of the node. It offers no CPUs: nothing of Ray's own is to be placed on it."""
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
        f"--address={head_address}:{ray_port()}", f"--node-ip-address={environment.address}",
        "--num-cpus=0", f"--num-gpus={environment.num_gpus}", "--disable-usage-stats",
        f"--resources={json.dumps({RAY_RESOURCE_TRAINER: environment.num_ranks})}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--temp-dir={folder}",
        # Any free port: Pods of one machine may share its network.
        "--dashboard-agent-listen-port=0", "--metrics-export-port=0",
    ]  # fmt: skip


def build_environment(values: dict[str, str]) -> dict[str, str]:
    """What the node and the ranks in it inherit."""
    asked = {ENV_NUM_THREADS: values["OMP_NUM_THREADS"]} if values.get("OMP_NUM_THREADS") else {}
    return {**values, **ray_environment(), **asked}


class Worker:
    """Joins the head again and again until it is told to stop."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._stopping = False

    def stop(self, number: int, _: FrameType | None) -> None:
        log.info("%s: ends", signal.Signals(number).name)
        self._stopping = True

    def run(self) -> None:
        while not self._stopping:
            head_address = self._wait_for_head()
            if head_address is not None:
                self._run_node(head_address)

    def _wait_for_head(self) -> str | None:
        """Address of a head that accepts connections; None when told to stop."""
        say_at = 0.0
        while not self._stopping:
            for address in discovery.resolve(self._environment.head):
                if is_listening(address):
                    return address
            if time.monotonic() >= say_at:
                log.info("waits for the head: %s:%d", self._environment.head, ray_port())
                say_at = time.monotonic() + _WAIT_LOG_SECONDS
            time.sleep(_POLL_SECONDS)
        return None

    def _run_node(self, head_address: str) -> None:
        """One membership, from joining the head to losing it."""
        # A short path: Ray puts sockets below it, whose names are limited to 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="rljob-ray-"))
        log.info("joins the head at %s", head_address)
        started = time.monotonic()
        node = subprocess.Popen(
            build_command(self._environment, head_address, folder),
            env=build_environment(dict(os.environ)),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._watch(node, head_address)
        finally:
            terminate_descendants(_STOP_SECONDS if self._stopping else 0)
            shutil.rmtree(folder, ignore_errors=True)
        # A node that cannot join at all must not be tried in a tight loop.
        while not self._stopping and time.monotonic() < started + _HEAD_GONE_SECONDS:
            time.sleep(_POLL_SECONDS)

    def _watch(self, node: subprocess.Popen[bytes], head_address: str) -> None:
        """Return when the node has ended, the head is gone, or somebody says stop."""
        last_seen = looked_up = time.monotonic()
        raylet = Raylet(node.pid)
        while not self._stopping:
            if node.poll() is not None:
                log.warning("the Ray node ended with %d", node.returncode)
                return
            if raylet.has_died():
                log.warning("the Ray node lost its raylet")
                return
            now = time.monotonic()
            if is_listening(head_address):
                last_seen = now
            elif now - last_seen > _HEAD_GONE_SECONDS:
                log.warning("the head at %s is gone", head_address)
                return
            if now - looked_up > _LOOK_UP_SECONDS:
                if head_has_moved(self._environment.head, head_address):
                    log.warning("the head is no longer at %s", head_address)
                    return
                looked_up = time.monotonic()
                last_seen += looked_up - now  # a slow name server is no sign of a dead head
            time.sleep(_POLL_SECONDS)


def head_has_moved(head: str, address: str) -> bool:
    """Whether the head's name stands for other addresses alone. A name without any says nothing: DNS may be down."""
    addresses = discovery.resolve(head)
    return bool(addresses) and address not in addresses


def is_listening(address: str) -> bool:
    """Whether something listens on Ray's port there."""
    try:
        socket.create_connection((address, ray_port()), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def adopt_orphans() -> None:
    """Become the parent of every process below us whose own parent ends, so that terminate_descendants finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def terminate_descendants(patience_seconds: float) -> None:
    """SIGTERM to everything below us, and SIGKILL to what is left after that time. Returns when all are gone."""
    deadline = time.monotonic() + patience_seconds
    if patience_seconds:
        for process in descendants(os.getpid()):
            _send(process, signal.SIGTERM)
    while remaining := descendants(os.getpid()):
        if time.monotonic() >= deadline:
            for process in remaining:
                _send(process, signal.SIGKILL)
        _reap()
        time.sleep(0.05)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        worker = Worker(read_environment(dict(os.environ)))
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    adopt_orphans()
    worker.run()
    return ExitCode.SUCCEEDED
