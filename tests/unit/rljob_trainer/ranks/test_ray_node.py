"""What Ray's nodes and ranks get in their environment."""

from __future__ import annotations

import importlib
import sys

import pytest
from ray._private import utils

from rljob_trainer.ranks import ray_head
from rljob_trainer.ranks.ray_node import build_start_command, ray_environment
from rljob_trainer.worker.main import build_command


@pytest.mark.parametrize(("log_format", "expected"), [("json", "1"), ("text", None)])
def test_lines_of_ranks_have_no_prefix_in_json(monkeypatch, log_format, expected):
    monkeypatch.setenv("RLJOB_LOG_FORMAT", log_format)
    assert ray_environment().get("RAY_DISABLE_WORKER_LOG_PREFIX") == expected


def test_nodes_start_what_a_minimal_installation_of_ray_does(monkeypatch):
    program = build_start_command([], "127.0.0.1", "/folder", 1)[2]
    hides, starts = program.split("; ")[1:3]
    assert starts.startswith("from ray"), "Ray must not be imported before"
    monkeypatch.delitem(sys.modules, "ray.dashboard.optional_deps", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", importlib.import_module("grpc"))  # it is this one after the test
    exec(hides, {"sys": sys})
    assert utils.get_ray_client_dependency_error() is not None, "else a server for Ray's client is started"
    assert utils.get_dashboard_dependency_error() is not None, "else agents serve a dashboard and metrics"


def test_logs_of_ranks_are_sent_by_the_trainers_nodes_alone():
    assert "--include-log-monitor=false" in ray_head.build_command("127.0.0.1", "/folder", 1)
    assert not any("log-monitor" in each for each in build_command("127.0.0.1", "127.0.0.2", 0, "/folder", 1))
