"""The real prometheus and promtool: from PATH, else from Debian's package, unpacked into the cache without root.

A build from Go source takes minutes; Debian's package has 20 MB. If neither is available, the tests skip with the
reason. Under CI they fail, so that a green run includes them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_cluster.host.debian import lock_apt
from rljob_cluster.host.paths import cache_root
from tests.support.waiting import DEADLINE_SECONDS

_CACHE = cache_root().parent / "prometheus"


def find(name: str) -> str:
    """Return the path of `prometheus` or `promtool`."""
    found = shutil.which(name) or shutil.which(name, path=str(_CACHE / "usr/bin"))
    if found:
        return found
    can_unpack = shutil.which("apt-get") and shutil.which("dpkg-deb")
    reason = _unpack() if can_unpack else "this is not a Debian machine"
    found = shutil.which(name, path=str(_CACHE / "usr/bin"))
    if not found:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"{name}: not found on PATH, and not installed: {reason}; put it on PATH")
    return found


def _unpack() -> str:
    """Unpack Debian's package into the cache. Return the last error message."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "prometheus"]
    with lock_apt():
        done = subprocess.run(download, cwd=_CACHE, capture_output=True, text=True)
        if done.returncode and os.geteuid() == 0:  # no package lists yet
            subprocess.run(["apt-get", "update"], capture_output=True)
            done = subprocess.run(download, cwd=_CACHE, capture_output=True, text=True)
    for package in _CACHE.glob("prometheus_*.deb"):
        done = subprocess.run(["dpkg-deb", "-x", package, _CACHE], capture_output=True, text=True)
        package.unlink()
    return done.stderr.strip()[-500:]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, folder: Path, address: str, scrape_configs: list[dict[str, Any]]) -> None:
        self.url = f"http://{address}:9090"
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrape_configs}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (folder / "prometheus.log").open("w")
        command = [
            find("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={address}:9090",
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_SECONDS)
        self._log.close()

    def query_api(self, path: str, **parameters: Any) -> Any:
        """Return the `data` of an API call. Raise AssertionError with Prometheus' message if it rejects the call."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise ConnectionError("it is starting") from None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def wait_until_up(self, num_targets: int) -> None:
        """Wait until that many targets were scraped."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        targets: list[Any] = []
        while sum(target["health"] == "up" for target in targets) < num_targets:
            assert time.monotonic() < deadline, f"not scraped: {targets}"
            time.sleep(0.2)
            try:
                targets = self.query_api("targets")["activeTargets"]
            except OSError:
                assert self._process.poll() is None, "Prometheus has ended; see its log"
