"""Which settings enter the version of a service."""

import copy
from pathlib import Path

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.services.models import UserModel
from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_service.server.served_service import load_service
from rljob_service.worker.settings import EPISODES, USER, FunctionSettings

FUNCTION = {"name": "r", "timeoutSeconds": 5, "function": {"inline": "def compute_score(solution_str): return 1.0\n"}}
LISTS = {"name": "r", "function": {"inline": "def reward(completions): return [1.0] * len(completions)\n"}}
JUDGE = {
    "name": "r",
    "judge": {
        "model": {"source": "/m"},
        "template": "Is {{ response }} good?",
        "parser": {"regex": "([0-9])"},
    },
}
MODEL = {"name": "r", "model": {"source": "/m"}}
MODEL_USER = {"name": "user", "userModel": {"endpoint": {"url": "https://x", "model": "m"}, "persona": "Be kind."}}


def version_of(folder, config, images=""):
    folder.mkdir(exist_ok=True)
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    return load_service(folder / "service.yaml", images=images).version


def changed(config, path, value):
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    place = config
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        (FUNCTION, "function.inline", "def compute_score(solution_str): return 0.0\n"),
        (FUNCTION, "function.kwargs", {"strict": True}),
        (FUNCTION, "function.requirements", ["math-verify==0.9.0"]),
        (FUNCTION, "timeoutSeconds", 6),
        (LISTS, "scope", "group"),
        (JUDGE, "judge.template", "Is {{ response }} bad?"),
        (JUDGE, "judge.model.source", "/other"),
        (MODEL, "model.source", "/other"),
    ],
)
def test_setting_that_decides_a_score_changes_the_version(tmp_path, config, path, value):
    assert version_of(tmp_path, config) != version_of(tmp_path, changed(config, path, value))


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        (FUNCTION, "slots", 7),
        (FUNCTION, "queueLength", 7),
        (JUDGE, "judge.model.gpusPerReplica", 1),
        (MODEL, "model.gpusPerReplica", 1),
    ],
)
def test_setting_of_placement_or_speed_keeps_the_version(tmp_path, config, path, value):
    assert version_of(tmp_path, config) == version_of(tmp_path, changed(config, path, value))


@pytest.mark.parametrize("config", [FUNCTION, JUDGE, MODEL])
def test_version_depends_on_the_image_and_not_on_the_folder(tmp_path, config):
    first = version_of(tmp_path / "a", config, "mine:1")
    assert first == version_of(tmp_path / "b", config, "mine:1")
    assert len({first, version_of(tmp_path / "a", config, "mine:2"), version_of(tmp_path / "a", config)}) == 3


def test_reward_without_function_judge_or_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="reward r must have a function, model, judge or teacher"):
        version_of(tmp_path, {"name": "r", "http": {"url": "https://x/score"}})


def test_server_of_a_user_or_tools_needs_a_function(tmp_path):
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(JUDGE))
    with pytest.raises(UserError, match="r must have a function, which --serves user calls"):
        load_service(tmp_path / "service.yaml", serves="user")


def test_what_is_served_enters_the_version(tmp_path):
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(FUNCTION))
    served = [load_service(tmp_path / "service.yaml", serves=serves) for serves in ("score", "user", "tools")]
    assert len({each.version for each in served}) == 3
    assert [each.kind.name for each in served] == ["score", "user", "tools"]


def test_version_of_a_reward_never_changes_by_itself(tmp_path):
    expected = "18038a30f8df8bc8c3abe81c84194e3ba5fe76b231fea3ecb502f1264c57a230"
    assert version_of(tmp_path, FUNCTION) == expected


def test_runner_may_open_connections_and_its_framework_enters_the_version(tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    command = {"module": COMMAND_MODULE, "factoryArgs": {"command": ["python"], "working_dir": "/agents"}}
    config.write_text(yaml.safe_dump({"name": "runner", "function": command}))
    program = load_service(config, serves=EPISODES)
    assert isinstance(program.backend, FunctionSettings)
    assert (program.backend.network, program.backend.folders, program.backend.framework) == (True, ("/agents",), "")
    environment = load_service(config, serves=EPISODES, framework="trl")
    assert isinstance(environment.backend, FunctionSettings)
    assert environment.backend.framework == "trl"
    assert environment.version != program.version


def load_user(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    return load_service(folder / "service.yaml", serves=USER)


@pytest.mark.parametrize(
    ("path", "value", "changes"),
    [
        ("userModel.persona", "You are bored.", True),
        ("userModel.stop", "[END]", True),
        ("userModel.endpoint.model", "other", True),
        ("userModel.endpoint.limits", {"concurrency": 3}, False),
        ("slots", 3, False),
    ],
)
def test_model_user_has_a_version_of_what_decides_its_replies(tmp_path, path, value, changes):
    served = load_user(tmp_path, MODEL_USER)
    assert isinstance(served.backend, UserModel)
    assert (load_user(tmp_path, changed(MODEL_USER, path, value)).version != served.version) is changes


def test_user_without_function_and_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="r must have a function, which --serves user calls"):
        load_user(tmp_path, MODEL)
