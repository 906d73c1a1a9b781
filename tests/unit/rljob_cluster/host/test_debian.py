import os

import pytest

from rljob_cluster.host.debian import PackagesError, install_missing


def test_what_is_there_needs_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    install_missing({"sh": "dash"})


def test_what_is_missing_is_named_to_those_who_may_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PackagesError, match="of-none-such, z-last"):
        install_missing({"no-such-program": "of-none-such", "sh": "dash", "another": "z-last"})
