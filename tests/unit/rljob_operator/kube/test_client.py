"""How the client trusts a server: as kubectl does, no less and no more."""

import ssl

import pytest
from kubernetes.aio.client import Configuration

from rljob_operator.kube import client


@pytest.fixture
def _as_in_python_3_13(monkeypatch):
    real = ssl.create_default_context

    def strict(**options):
        context = real(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


def configuration(host):
    found = Configuration()
    found.host = host
    return found


@pytest.mark.usefixtures("_as_in_python_3_13")
def test_a_ca_need_not_be_written_as_rfc_5280_wants_but_must_have_signed_the_server():
    context = client._ssl_context(configuration("https://10.0.0.1"))
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_http_needs_no_trust():
    assert client._ssl_context(configuration("http://127.0.0.1:8001")) is None
