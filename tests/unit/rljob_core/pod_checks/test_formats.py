"""Quantities and names, as the API server reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_core.pod_checks import formats


@pytest.mark.parametrize("text", ["1 Gi", "--1", "1GiB", "-1"])
def test_invalid_quantity_is_refused(text):
    assert formats.is_quantity(text)


@given(st.text(max_size=70))
def test_formats_never_raise(text):
    for check in (formats.is_dns_label, formats.is_subdomain, formats.is_label_value, formats.is_qualified_name):
        check(text)
    for check in (formats.is_env_name, formats.is_port_name, formats.is_quantity, formats.is_field_path):
        check(text)
