"""The forms of a source, as the API server's rule accepts them."""

import re

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.sources import _SOURCE_CEL, Source, parse_source

CEL_PATTERN = re.search(r"matches\('(.*)'\)", _SOURCE_CEL)[1]


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
        ("s3://bucket/x", None),
    ],
)
def test_source_is_parsed_exactly_if_the_api_server_accepts_it(source, expected):
    assert (re.search(CEL_PATTERN, source) is not None) == (expected is not None)
    if expected is not None:
        assert parse_source(source) == expected
    else:
        with pytest.raises(UserError, match="must be hf://org/name"):
            parse_source(source)


def test_paths_are_absolute_or_relative():
    assert parse_source("/data/x").kind == "absolute"
    assert parse_source("./x").kind == parse_source("x").kind == "relative"
