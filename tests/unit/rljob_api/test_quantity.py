"""Quantities, as the API server reads them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity as parse_as_client

from rljob_api.quantity import format_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (2, "2"),
        ("16Gi", 16 * 2**30),
        ("1k", 1000),
        ("1e3", 1000),
        ("1E", 10**18),
        (".5", "0.5"),
    ],
)
def test_quantity_has_its_value(text, value):
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "1 Gi", "1GiB", "1gb", "Gi", "1K", "--1", "1e", "1e99", "½", "1_000", "0x10"])
def test_invalid_quantity_is_none(text):
    assert parse_quantity(text) is None


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", fullmatch=True))
def test_quantities_equal_those_of_the_kubernetes_client(text):
    assert parse_quantity(text) == parse_as_client(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0"), (1000, "1000"), (1024, "1Ki"), (1536 << 20, "1536Mi"), (2 << 30, "2Gi")]
)
def test_bytes_have_the_largest_suffix_that_loses_nothing(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**63))
def test_bytes_survive_writing_and_reading(num_bytes):
    assert parse_quantity(format_bytes(num_bytes)) == num_bytes
