"""A training service on CPUs, as a user starts it, with a small model that answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.local_run import DEADLINE_SECONDS, RLJOB
from tests.support.tinker_models import write_answering_model
from tests.support.waiting import wait_for

NAME = "Qwen/Qwen3-8B"
"""A name of the cookbook's table of models, by which it chooses how to render conversations."""


def _read_name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


class RunningService:
    """`rljob serve`, observed from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.log = folder, write_answering_model(folder / "model"), folder / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [RLJOB, "serve", self.model, "--name", NAME, "--gpus", "0", "--ranks", "2", "--max-rank", "32"]
        command += ["--port", str(port), "--dir", folder / "runs", "--client", "ann", "--client", "bob"]
        self.command = command
        self.start()
        self.url = str(self.find(r"TINKER_BASE_URL=(\S+)"))
        self.keys = {name: str(self.find(rf"TINKER_API_KEY=(\S+)  # {name}")) for name in ("ann", "bob")}

    def start(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)
        wait_for(lambda: "# bob" in self.text or self.process.poll() is not None, "the start of the service")
        assert self.process.poll() is None, self.text

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def head_log(self) -> str:
        """The logs of all heads of the last start, in their order."""
        logs = sorted((self.folder / "runs").glob("*/logs/*-head-*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def kill(self, name: str) -> None:
        """End the first process of this name at once."""
        found = [each for each in psutil.Process(self.process.pid).children(recursive=True) if name in _read_name(each)]
        assert found, f"there is no process {name}"
        found[0].kill()

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.text)
        assert found, self.text
        return found[1]

    def checkpoint(self, client: str, path: str) -> Path:
        """Return the folder of a checkpoint, by its tinker:// path."""
        model, kind, name = path.removeprefix("tinker://").split("/")
        [root] = (self.folder / "runs").glob("*/tinker")
        return root / client / model.replace(":", "-") / kind / name

    def environment(self, client: str) -> dict[str, str]:
        given = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.keys[client], "TINKER_TELEMETRY": "0"}
        return {**os.environ, **given}

    def kill_head(self) -> None:
        [head] = [
            each
            for each in psutil.Process(self.process.pid).children(recursive=True)
            if each.cmdline()[1:] == ["-m", "rljob_trainer.tinker"]
        ]
        head.kill()

    def close(self) -> None:
        self.process.terminate()  # Ctrl-C is ignored where a shell started the tests in the background
        self.process.wait(DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    service = RunningService(tmp_path_factory.mktemp("service"))
    try:
        yield service
    finally:
        service.close()
