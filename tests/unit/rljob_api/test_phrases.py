"""Parts of messages."""

import pytest

from rljob_api.phrases import did_you_mean, list_some


def test_nearest_name_is_suggested_if_one_is_near():
    assert did_you_mean("promt", {"prompt", "answer"}) == "did you mean prompt?"
    assert did_you_mean("xyz", ["prompt"], "remove it") == "remove it"
    assert did_you_mean("xyz", iter(["prompt"])) == ""


@pytest.mark.parametrize(("texts", "shown"), [([], ""), (["a", "b"], "a; b"), (["a", "b", "c"], "a; b and 1 more")])
def test_long_list_says_how_many_are_left_out(texts, shown):
    assert list_some(texts, 2, "; ") == shown
