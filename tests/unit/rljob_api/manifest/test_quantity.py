"""Sizes: read once, written as the user wrote them."""

import copy
import pickle

import pydantic
import pytest
import yaml

from rljob_api.manifest.quantity import Size, size_within
from rljob_api.manifest.roles import RolloutRole


@pytest.mark.parametrize(
    ("given", "text", "num_bytes"),
    [("1.5Gi", "1.5Gi", 3 << 29), (2**30, "1073741824", 2**30), ("128M", "128M", 128 * 10**6)],
)
def test_size_keeps_its_text_and_has_its_bytes(given, text, num_bytes):
    role = RolloutRole.model_validate({"kvCacheMemory": given})
    for size in (
        role.kv_cache_memory,
        copy.deepcopy(role).kv_cache_memory,
        pickle.loads(pickle.dumps(role)).kv_cache_memory,
    ):
        assert (size, size.num_bytes) == (text, num_bytes)
    assert yaml.safe_load(yaml.safe_dump(role.to_manifest(exclude_defaults=True))) == {"kvCacheMemory": text}


def test_default_is_left_out():
    assert RolloutRole.model_validate({"kvCacheMemory": "1Gi"}).to_manifest(exclude_defaults=True) == {}


@pytest.mark.parametrize("given", ["2GB", "-1Gi", 0.5, None, "1e99", 4, "63Ki"])
def test_other_values_and_too_small_ones_are_refused(given):
    with pytest.raises(pydantic.ValidationError):
        RolloutRole.model_validate({"kvCacheMemory": given})


@pytest.mark.parametrize(
    ("size", "holds"), [("0", True), ("1", False), ("1Mi", True), ("2097152", True), ("2Mi", True), ("2049Ki", False)]
)
def test_bounds_may_exclude_all_but_zero(size, holds):
    rule = size_within("kvCacheMemory", "1Mi", "2Mi", may_be_zero=True)
    assert rule.holds(RolloutRole().model_copy(update={"kv_cache_memory": Size(size)})) is holds
    assert rule.message == "must be 0 or at least 1Mi and at most 2Mi"
