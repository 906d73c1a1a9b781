"""Quantities and names, as the API server reads them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity as parse_as_client

from rljob_operator.pod_checks import formats


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
    assert formats.parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "1 Gi", "1GiB", "1gb", "Gi", "1K", "--1", "1e", "1e99", "½", "1_000", "0x10"])
def test_invalid_quantity_is_refused(text):
    assert formats.parse_quantity(text) is None
    assert formats.is_quantity(text)


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", fullmatch=True))
def test_quantities_equal_those_of_the_kubernetes_client(text):
    assert formats.parse_quantity(text) == parse_as_client(text)


@given(st.text(max_size=70))
def test_formats_never_raise(text):
    for check in (formats.is_dns_label, formats.is_subdomain, formats.is_label_value, formats.is_qualified_name):
        check(text)
    for check in (formats.is_env_name, formats.is_port_name, formats.is_quantity, formats.is_field_path):
        check(text)
