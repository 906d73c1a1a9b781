"""OpenTelemetry's own collector as a process, which passes on what it takes: between RLJob and a test's receiver.

It says itself what it took and what it refused, in its metrics. Its versions are those of cluster/collector/go.mod.
"""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from rljob_cluster.host.go_programs import find_or_build_addon
from tests.support.waiting import wait_for

_PORT, _METRICS_PORT = 4318, 8888
"""The collector's default ports, on an address of its own."""


class ReleasedCollector:
    def __init__(self, folder: Path, address: str, forward_to: str) -> None:
        """`folder`: of its configuration and its log."""
        self.url = f"http://{address}:{_PORT}"
        self._metrics = f"http://{address}:{_METRICS_PORT}/metrics"
        configuration = folder / "collector.yaml"
        configuration.write_text(yaml.safe_dump(_configure(address, forward_to)))
        self._log = (folder / "collector.log").open("w+")
        command = [find_or_build_addon("otelcol"), "--config", configuration]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            wait_for(self._is_ready, "the collector")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"the collector ended:\n{Path(self._log.name).read_text()[-2000:]}")
        return "Everything is ready" in Path(self._log.name).read_text()

    def count_spans(self, what: str) -> int:
        """Return spans `receiver_accepted`, `receiver_refused`, `exporter_sent`, ... by the collector's own metrics."""
        with urllib.request.urlopen(self._metrics, timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [each for family in families for each in family.samples]
        return sum(int(each.value) for each in samples if each.name.startswith(f"otelcol_{what}_spans"))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def _configure(address: str, forward_to: str) -> dict[str, object]:
    reader = {"pull": {"exporter": {"prometheus": {"host": address, "port": _METRICS_PORT}}}}
    return {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"{address}:{_PORT}"}}}},
        "exporters": {"otlp_http": {"endpoint": forward_to}},
        "service": {
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
            "telemetry": {"metrics": {"level": "normal", "readers": [reader]}},
        },
    }
