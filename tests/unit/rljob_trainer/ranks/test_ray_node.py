"""What Ray's nodes and ranks get in their environment."""

from __future__ import annotations

import pytest

from rljob_trainer.ranks.ray_node import ray_environment


@pytest.mark.parametrize(("log_format", "expected"), [("json", "1"), ("text", None)])
def test_lines_of_ranks_have_no_prefix_in_json(monkeypatch, log_format, expected):
    monkeypatch.setenv("RLJOB_LOG_FORMAT", log_format)
    assert ray_environment().get("RAY_DISABLE_WORKER_LOG_PREFIX") == expected
