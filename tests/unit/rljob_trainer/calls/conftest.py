"""Servers of users and tools."""

import pytest

from tests.support.call_servers import CallHarness


@pytest.fixture
async def call_harness(tmp_path, monkeypatch):
    harness = CallHarness(tmp_path, monkeypatch)
    yield harness
    await harness.close()
