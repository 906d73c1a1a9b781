"""Models that are uploaded to a Hub: private unless the user says otherwise, and one line for what is refused."""

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_inputs.hub import HubAccess, RefusedError, find_repository, require_private, upload_model
from tests.support.hub import run_hub

MODEL = "hf://org/model"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with run_hub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    (model / "adapter").mkdir(parents=True)
    for name in ("config.json", "adapter/weights", "README.md"):
        (model / name).write_text(f"of {name}")
    return model


def upload(hub, folder, token="hf_write", *, is_public=False):
    access = HubAccess(hub.url, token)
    require_private(MODEL, access, may_be_public=is_public)
    return upload_model(folder, MODEL, access, is_public=is_public, message="Step 4")


def test_new_repository_is_private_and_has_all_files(hub, folder):
    assert upload(hub, folder) == f"{hub.url}/org/model"
    found = find_repository(MODEL, "model", None, HubAccess(hub.url, "hf_write"))
    assert set(found.files) == {"config.json", "adapter/weights", "README.md"}
    with pytest.raises(RefusedError):
        find_repository(MODEL, "model", None, HubAccess(hub.url, "hf_other"))


def test_second_upload_is_another_commit_of_the_private_repository(hub, folder):
    upload(hub, folder)
    (folder / "config.json").write_text("new")
    upload(hub, folder)
    assert (hub.folder / "models/org/model/config.json").read_text() == "new"


def test_public_repository_gets_nothing_unless_the_user_says_so(hub, folder):
    hub.add("models/org/model")
    with pytest.raises(UserError, match=r"hf://org/model: exists and is public; .* pass --public"):
        upload(hub, folder)
    assert not any("POST" in request for request in hub.requests)
    upload(hub, folder, is_public=True)
    assert (hub.folder / "models/org/model/config.json").is_file()


def test_new_repository_is_public_if_the_user_says_so(hub, folder):
    upload(hub, folder, is_public=True)
    assert find_repository(MODEL, "model", None, HubAccess(hub.url, "hf_other")).files


def test_token_that_must_not_write_and_none_at_all_are_named(hub, folder):
    with pytest.raises(
        RefusedError, match=r"hf://org/model: the token must not write there \(HTTP 403\); set HF_TOKEN"
    ):
        upload(hub, folder, "hf_read_only")
    with pytest.raises(RefusedError, match="no token for the Hub at http"):
        upload(hub, folder, None)


def test_hub_that_does_not_answer_may_come_back(folder):
    with pytest.raises(TransientError, match=r"the Hub at http://127\.0\.0\.1:9 cannot be used"):
        upload_model(folder, MODEL, HubAccess("http://127.0.0.1:9", "hf_write"), is_public=False, message="x")
