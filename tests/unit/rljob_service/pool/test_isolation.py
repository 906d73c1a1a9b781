"""Isolation before any worker starts."""

from __future__ import annotations

import pytest

from rljob_api.errors import UserError
from rljob_service.pool.isolation import Isolation
from rljob_service.worker.settings import FunctionSettings


def test_unknown_mechanism_cannot_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_REWARD_DISABLE_ISOLATION", "landlock, uids")
    message = "^RLJOB_REWARD_DISABLE_ISOLATION must contain only uid, landlock, .*private-tmp, got uids$"
    with pytest.raises(UserError, match=message):
        Isolation(FunctionSettings("", "function.inline", None, "auto", {}, 2048))
