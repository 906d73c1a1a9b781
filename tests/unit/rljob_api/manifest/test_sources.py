"""The forms of a source, as the API server's rules accept them."""

import re

import pytest
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.job_sections import DataSource, Model
from rljob_api.manifest.sources import _DATA_CEL, _MODEL_CEL, _SOURCE_CEL, ModelSource, Source, parse_source

OF_SERVED, OF_DATA, OF_MODEL = (re.search(r"matches\('(.*)'\)", cel)[1] for cel in (_SOURCE_CEL, _DATA_CEL, _MODEL_CEL))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://org/name", Source("hf", "org/name")),
        ("hf://org/name/", Source("hf", "org/name")),
        ("hf://gpt2", Source("hf", "gpt2")),
        ("hf://gpt2/", Source("hf", "gpt2")),
        ("pvc://claim/path/x", Source("pvc", "path/x", "claim")),
        ("pvc://claim", Source("pvc", "", "claim")),
        ("hf://", None),
        ("hf:///name", None),
        ("hf://org/name/file", None),
        ("hf://org//", None),
        ("pvc:///x", None),
        ("s3://bucket/x/y", Source("object", "s3://bucket/x/y")),
        ("s3://bucket/x/", Source("object", "s3://bucket/x")),
        ("gs://bucket", Source("object", "gs://bucket")),
        ("az://container/*.jsonl", Source("object", "az://container/*.jsonl")),
        ("s3://", None),
        ("s3:///x", None),
        ("ftp://host/x", None),
        ("env://train", Source("env", "train")),
        ("env://hard_2.v1-b", Source("env", "hard_2.v1-b")),
        ("env://" + "a" * 63, Source("env", "a" * 63)),
        ("env://" + "a" * 64, None),
        ("env://", None),
        ("env://../x", None),
        ("env://.hidden", None),
        ("env://a/b", None),
        ("job://sums", Source("job", "sums", step="last")),
        ("job://sums@last", Source("job", "sums", step="last")),
        ("job://sums@best", Source("job", "sums", step="best")),
        ("job://sums-2@120", Source("job", "sums-2", step="120")),
        ("job://sums@", None),
        ("job://sums@first", None),
        ("job://sums@1e3", None),
        ("job://Sums", None),
        ("job://../sums", None),
        ("job://a/b@2", None),
    ],
)
def test_source_is_parsed_exactly_if_the_api_server_accepts_it(source, expected):
    kind = None if expected is None else expected.kind
    assert (re.search(OF_DATA, source) is not None) == (kind not in (None, "job"))
    assert (re.search(OF_MODEL, source) is not None) == (kind not in (None, "env")), "no environment has a model"
    assert (re.search(OF_SERVED, source) is not None) == (kind not in (None, "env", "job"))
    if expected is not None:
        assert parse_source(source) == expected
    else:
        with pytest.raises(UserError, match="must be hf://org/name"):
            parse_source(source)


def test_paths_are_absolute_or_relative():
    assert parse_source("/data/x").kind == "absolute"
    assert parse_source("./x").kind == parse_source("x").kind == "relative"


def test_name_of_objects_is_that_of_the_last_part():
    assert parse_source("s3://bucket/sets/rows.jsonl").name == "rows.jsonl"
    assert parse_source("s3://bucket").container_path == "s3://bucket"


def test_only_data_may_come_from_an_environment():
    with pytest.raises(ValidationError, match="source must be hf://org/name, pvc://claim/path, s3://bucket/path or"):
        ModelSource(source="env://train")
    data = DataSource(source="env://train", offset=2)
    assert (data.env_split, DataSource(source="./a.jsonl").env_split) == ("train", None)
    with pytest.raises(ValidationError, match=r"split must be left out with env://, .* remove the three"):
        DataSource(source="env://train", split="train")


def test_only_the_trained_model_may_come_from_a_job():
    assert Model(source="job://sums@20").source == "job://sums@20"
    with pytest.raises(ValidationError, match="source must be hf://org/name"):
        ModelSource(source="job://sums@20")
    with pytest.raises(ValidationError, match=r"job://NAME@STEP or a path.* a step is a number, last or best"):
        Model(source="job://sums@first")


AGENTS = [
    ({"type": "singleTurn"}, False),
    ({"type": "program", "runner": {"command": ["agent"]}}, False),
    ({"type": "program", "runner": {"function": {"inline": "x"}}}, True),
    ({"type": "environment", "environment": {"framework": "verifiers", "id": "a"}}, True),
]
PLACES = [
    {"train": {"source": "env://train"}},
    {"train": {"source": "/a"}, "mix": [{"name": "b", "source": "env://train"}]},
    {"train": {"source": "/a"}, "eval": {"source": "env://train"}},
]


@pytest.mark.parametrize("data", PLACES, ids=["train", "mix", "eval"])
@pytest.mark.parametrize(("agent", "has_rows"), AGENTS)
def test_env_sources_need_an_agent_that_has_rows(agent, has_rows, data):
    rewards = [{"name": "r", "function": {"inline": "x"}}]
    spec = {"model": {"source": "/m"}, "data": data, "agent": agent, "rewards": rewards}
    if has_rows:
        assert RLJobSpec.model_validate(spec).env_sources
        return
    with pytest.raises(ValidationError) as caught:
        RLJobSpec.model_validate(spec)
    assert "data must have env:// only with agent.type environment, or program with runner.function" in str(
        caught.value
    )
    assert f"got data.{list(data)[-1]}" in str(caught.value), "it names the source"
