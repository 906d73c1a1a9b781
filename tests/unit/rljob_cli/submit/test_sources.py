"""Which fields name files of this machine, and what the files contain."""

from __future__ import annotations

import os

import pytest

from rljob_api.errors import UserError
from rljob_cli.submit.sources import MAX_SMALL_BYTES, LocalSource, find_sources, read_tree


def job(**spec):
    return {"kind": "RLJob", "metadata": {"name": "sums"}, "spec": {"model": {"source": "hf://org/model"}} | spec}


def found(manifest):
    return [(source.field, source.path, source.kind, source.label) for source in find_sources(manifest)]


def test_every_relative_path_of_a_job_is_found():
    manifest = job(
        model={"source": "./model"},
        data={"train": {"source": "train.jsonl"}, "eval": {"source": "../eval"}},
        rewards=[
            {"name": "correct", "function": {"file": "reward.py"}},
            {"name": "rm", "model": {"source": "rm"}},
            {"name": "judge", "judge": {"model": {"source": "judge"}}},
        ],
    )
    assert found(manifest) == [
        ("spec.model.source", "./model", "model", "model"),
        ("spec.data.train.source", "train.jsonl", "data", "train"),
        ("spec.data.eval.source", "../eval", "data", "eval"),
        ("spec.rewards[0].function.file", "reward.py", "function", "correct"),
        ("spec.rewards[1].model.source", "rm", "model", "rm"),
        ("spec.rewards[2].judge.model.source", "judge", "model", "judge"),
    ]


def test_further_sources_of_prompts_are_found():
    mix = [{"name": "hub", "source": "hf://org/data"}, {"name": "own", "source": "./own.jsonl"}]
    manifest = job(data={"train": {"source": "/t"}, "mix": mix}, rewards=[])
    assert found(manifest) == [("spec.data.mix[1].source", "./own.jsonl", "data", "mix-own")]


def test_data_of_evaluation_sets_is_found():
    sets = [{"name": "hub", "data": {"source": "hf://org/data"}}, {"name": "hard", "data": {"source": "./hard.jsonl"}}]
    manifest = job(data={"train": {"source": "/t"}}, evaluation={"sets": sets}, rewards=[])
    assert found(manifest) == [("spec.evaluation.sets[1].data.source", "./hard.jsonl", "data", "eval-hard")]


def test_model_of_a_user_is_found():
    manifest = job(agent={"type": "loop", "user": {"model": {"model": {"source": "./user"}}}})
    assert found(manifest)[-1] == ("spec.agent.user.model.model.source", "./user", "model", "user")


def test_functions_of_an_agent_are_found():
    tools = [{"name": "own", "function": {"inline": "x"}}, {"name": "calc", "function": {"file": "lib/calc.py"}}]
    manifest = job(agent={"type": "loop", "user": {"function": {"file": "user.py"}}, "tools": tools})
    assert found(manifest)[-2:] == [
        ("spec.agent.user.function.file", "user.py", "function", "user"),
        ("spec.agent.tools[1].function.file", "lib/calc.py", "function", "calc"),
    ]
    assert found(job(agent={"type": "singleTurn"})) == []


def test_files_of_a_runner_are_found():
    function = job(agent={"type": "program", "runner": {"function": {"file": "agent.py"}}})
    assert found(function) == [("spec.agent.runner.function.file", "agent.py", "function", "runner")]
    command = {"command": ["python", "agent.py"], "workingDir": "./app"}
    (program,) = found(job(agent={"type": "program", "runner": command}))
    assert program == ("spec.agent.runner.workingDir", "./app", "program", "runner")
    assert found(job(agent={"type": "program", "runner": command | {"workingDir": "/app"}})) == []


def test_folder_of_a_program_comes_without_hidden_files_and_caches(tmp_path):
    for name in (
        "app/agent.py",
        "app/lib/tool.py",
        "app/job.yaml",
        "app/.env",
        "app/.venv/big.py",
        "app/lib/__pycache__/tool.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    source = LocalSource(("spec", "agent", "runner", "workingDir"), "app", "program", "runner")
    tree = read_tree(source, tmp_path, tmp_path / "app" / "job.yaml")
    assert [file.name for file in tree.files] == ["agent.py", "lib/tool.py"]
    with pytest.raises(UserError, match=r"spec\.agent\.runner\.workingDir: .* is a file; set its folder"):
        read_tree(LocalSource(source.location, "app/agent.py", "program", "runner"), tmp_path)


def test_sources_of_the_cluster_are_left_out():
    rewards = [{"name": "a", "function": {"file": "/opt/reward.py"}}, {"name": "b", "function": {"inline": "x = 1"}}]
    rewards += [{"name": "c", "http": {"url": "http://x"}}, {"name": "d", "rewardModelRef": {"name": "m"}}]
    manifest = job(data={"train": {"source": "pvc://claim/train"}, "eval": {"source": "/data/eval"}}, rewards=rewards)
    assert found(manifest) == []


def test_sources_of_a_reward_model_have_its_name():
    manifest = {"kind": "RewardModel", "metadata": {"name": "rm"}, "spec": {"function": {"file": "reward.py"}}}
    assert found(manifest) == [("spec.function.file", "reward.py", "function", "rm")]


def source(path, kind="data"):
    return LocalSource(("spec", "data", "train", "source"), path, kind, "train")


def test_folder_is_read_with_its_nested_files_and_followed_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(b"weights")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "sub" / "b.txt").write_text("b")
    os.symlink("../blobs/1", tmp_path / "model" / "a.safetensors")
    tree = read_tree(source("./model"), tmp_path)
    assert (tree.name, tree.is_folder, tree.num_bytes) == ("model", True, 8)
    assert [(file.name, file.content) for file in tree.files] == [("a.safetensors", b"weights"), ("sub/b.txt", b"b")]


def test_file_that_is_too_large_for_a_config_map_is_not_read(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(bytes(MAX_SMALL_BYTES + 1))
    tree = read_tree(source("train.jsonl"), tmp_path)
    assert (tree.is_folder, tree.num_bytes, tree.files[0].content) == (False, MAX_SMALL_BYTES + 1, None)


def test_digest_changes_with_name_size_and_time(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("a")
    os.utime(path, ns=(1, 1))
    first = read_tree(source("train.jsonl"), tmp_path).digest
    assert read_tree(source("./train.jsonl"), tmp_path).digest == first
    os.utime(path, ns=(2, 2))
    assert read_tree(source("train.jsonl"), tmp_path).digest != first


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("none", "data", "/none not found; correct the path"),
        ("empty", "model", "/empty is empty; correct the path"),
        ("empty", "function", "/empty is a folder; set a Python file"),
    ],
)
def test_source_that_cannot_be_copied_is_reported(tmp_path, path, kind, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        read_tree(source(path, kind), tmp_path)


def test_function_comes_with_the_modules_of_its_folder_that_it_imports(tmp_path):
    texts = {
        "reward.py": "import re, numbers_of\nfrom parsing.answers import last\n",
        "numbers_of.py": "import words\ndef f():\n    import late\n",
        "words.py": "import numbers_of\n",
        "late.py": "",
        "unused.py": "",
        "parsing/__init__.py": "",
        "parsing/answers.py": "",
        "parsing/table.json": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [file.name for file in read_tree(source("reward.py", "function"), tmp_path).files]
    assert names[0] == "reward.py"
    assert {*names} == {*texts} - {"unused.py", "parsing/table.json"}


@pytest.mark.parametrize("has_init", [True, False])
def test_function_of_a_package_comes_with_what_it_imports_of_it(tmp_path, has_init):
    more = "\nfrom ..shared import x\nimport kit.more"
    texts = {
        "kit/rewards/math.py": "from .texts import strip\nfrom . import tables\nimport kit_of_others",
        "kit/rewards/texts.py": "from . import late" + more * has_init,
        "kit/rewards/late.py": "",
        "kit/rewards/tables/__init__.py": "",
    }
    packaged = ("kit/__init__.py", "kit/rewards/__init__.py", "kit/shared.py", "kit/more.py")
    texts |= dict.fromkeys(packaged * has_init, "")
    for name, text in {**texts, "kit_of_others.py": "", "kit/rewards/unused.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    tree = read_tree(source("kit/rewards/math.py", "function"), tmp_path)
    top = "" if has_init else "kit/"
    names = {file.name for file in tree.files}
    assert tree.name == tree.files[0].name == "kit/rewards/math.py".removeprefix(top)
    assert names >= {name.removeprefix(top) for name in texts}
    assert ("kit_of_others.py" in names, "kit/rewards/unused.py" in names) == (has_init, has_init)


def test_function_that_is_not_python_comes_alone(tmp_path):
    (tmp_path / "reward.py").write_text("def (")
    assert len(read_tree(source("reward.py", "function"), tmp_path).files) == 1


def test_a_glob_comes_with_its_files_alone(tmp_path):
    (tmp_path / "shards").mkdir()
    for name in ("b.csv", "a.csv", "notes.txt"):
        (tmp_path / "shards" / name).write_text("x\n")
    tree = read_tree(source("./shards/*.csv"), tmp_path)
    assert (tree.name, [file.name for file in tree.files]) == ("shards", ["a.csv", "b.csv"])
    with pytest.raises(UserError, match=r"no file matches .*/shards/\*.json; correct the path"):
        read_tree(source("./shards/*.json"), tmp_path)
    with pytest.raises(UserError, match="matches files of several folders; copy them into one"):
        read_tree(source("./**/*.csv"), tmp_path)
