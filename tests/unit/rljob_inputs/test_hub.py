"""Repositories of the Hub, against a local one: what is found, and one line for what is refused."""

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_inputs.hub import HubAccess, find_repository
from rljob_inputs.models.files import open_model
from tests.support.hub import run_hub

MODEL = "hf://org/model"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with run_hub(tmp_path / "hub") as running:
        yield running


def find(hub, source=MODEL, revision=None, token=None, kind="model"):
    return find_repository(source, kind, revision, HubAccess(hub.url, token))


def test_repository_has_files_and_a_commit_per_revision(hub):
    (hub.add("models/org/model") / "config.json").write_text("{}")
    (hub.add("models/org/model@v2") / "config.json").write_text('{"v": 2}')
    main, other = find(hub), find(hub, revision="v2")
    assert main.files == {"config.json": 2}
    assert main.commit != other.commit
    assert other.download("config.json").read_text() == '{"v": 2}'
    assert find(hub, revision=main.commit).commit == main.commit


def test_missing_and_private_repositories_and_revisions_are_named(hub):
    hub.add("models/org/model", token="hf_right")
    for source in (MODEL, "hf://org/none", "hf://gpt2"):
        with pytest.raises(UserError, match=rf"model {source} does not exist at {hub.url}, or is private") as raised:
            find(hub, source)
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="or the token must not read it"):
        find(hub, token="hf_wrong")
    with pytest.raises(UserError, match=f"hf://org/model has no revision v9; see {hub.url}/org/model"):
        find(hub, revision="v9", token="hf_right")
    with pytest.raises(UserError, match="dataset hf://org/model does not exist"):
        find(hub, kind="dataset", token="hf_right")
    with pytest.raises(UserError, match="hf://a b/c is not a repository of the Hub"):
        find(hub, "hf://a b/c")


def test_gated_repository_names_the_page_and_the_field(hub):
    hub.add("models/org/model", token="hf_right", gated=True)
    with pytest.raises(UserError, match=f"is gated: accept its terms at {hub.url}/org/model, and set spec.hub.token"):
        find(hub)
    with pytest.raises(UserError, match="is gated, and the account of the token has no access"):
        find(hub, token="hf_wrong")
    assert find(hub, token="hf_right").name == "org/model"


def test_hub_that_cannot_be_reached_is_asked_once_and_the_cache_helps(hub, monkeypatch):
    (hub.add("models/org/model") / "config.json").write_text("{}")
    from huggingface_hub import hf_hub_download

    hf_hub_download("org/model", "config.json", endpoint=hub.url)  # as a run does, by the name of the branch
    nowhere = HubAccess("http://127.0.0.1:1")
    found = find_repository(MODEL, "model", None, nowhere)
    assert found.is_cached
    assert found.download("config.json").read_text() == "{}"
    with pytest.raises(TransientError, match=f"cannot reach the Hub at {nowhere.url} for hf://org/none"):
        find_repository("hf://org/none", "model", None, nowhere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_repository(MODEL, "model", None, nowhere).is_cached
    assert "(in the cache: the Hub does not answer)" in open_model(MODEL, None, nowhere).place
    with pytest.raises(TransientError, match=r"hf://org/none, which its cache lacks .*HF_HUB_OFFLINE"):
        find_repository("hf://org/none", "model", None, nowhere)
