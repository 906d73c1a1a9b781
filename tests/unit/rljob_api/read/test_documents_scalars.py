"""Scalars are read as kubectl reads them, and written so that it reads them back."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.read import documents
from rljob_api.read.documents import read_documents
from rljob_core.children.common import to_yaml
from tests.support.kubectl_scalars import AS_KUBECTL_READS


def read(text):
    (document,), problems = read_documents(text)
    assert problems == []
    return document.data


@pytest.mark.parametrize(("text", "value"), AS_KUBECTL_READS.items())
def test_scalar_has_the_value_that_kubectl_gives_it(text, value):
    got = read(f"v: {text}\n")["v"]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("text", AS_KUBECTL_READS)
def test_text_that_looks_like_another_type_is_quoted(text):
    written = to_yaml({"v": text})
    assert read(written) == {"v": text}
    assert documents.is_text(text) or "'" in written or '"' in written


@given(st.text(alphabet="yYnNoOfFtTrueslE0123456789+-._xXbaAiI:~", max_size=6))
def test_any_short_text_survives_writing_and_reading(text):
    written = to_yaml({text: [text]})
    assert read(written) == {text: [text]}
    assert yaml.safe_load(written) == {text: [text]}
