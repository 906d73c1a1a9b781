"""How the client trusts a server: exactly as kubectl does. Real handshakes, with certificates of openssl."""

import ssl
import subprocess

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from rljob_api.errors import TransientError
from rljob_core.kube import client


@pytest.fixture
def _as_in_python_3_13(monkeypatch):
    real = ssl.create_default_context

    def strict(*purpose, **options):
        context = real(*purpose, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


def make_old_ca(folder, name):
    """Create a CA and a server certificate without key usage and key identifiers, as older tools did."""
    (folder / f"{name}.cnf").write_text(
        "[req]\ndistinguished_name=dn\nx509_extensions=ca\n[dn]\n[ca]\nbasicConstraints=CA:TRUE\n"
        "[leaf]\nsubjectAltName=IP:127.0.0.1\nsubjectKeyIdentifier=none\nauthorityKeyIdentifier=none\n"
    )
    key = "-newkey rsa:2048 -nodes -days 2"
    for command in (
        f"req -x509 {key} -config {name}.cnf -subj /CN=ca -keyout {name}-ca.key -out {name}-ca.crt",
        f"req {key} -config {name}.cnf -subj /CN=leaf -keyout {name}.key -out {name}.csr",
        f"x509 -req -in {name}.csr -CA {name}-ca.crt -CAkey {name}-ca.key -CAcreateserial -days 2 "
        f"-extfile {name}.cnf -extensions leaf -out {name}.crt",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder / f"{name}-ca.crt"


@pytest.fixture
async def server(tmp_path):
    """Yield its URL. Its CA is tmp_path/old-ca.crt."""
    make_old_ca(tmp_path, "old")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "old.crt", tmp_path / "old.key")

    async def answer(request):
        return web.json_response({"major": "1"})

    app = web.Application()
    app.router.add_get("/version", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def get_version(server, ca):
    api = client.KubeApi(Configuration(host=server, ssl_ca_cert=str(ca)))
    try:
        return await api.request("GET", "/version")
    finally:
        await api.close()


@pytest.mark.usefixtures("_as_in_python_3_13")
async def test_ca_of_an_older_cluster_is_trusted(server, tmp_path):
    ca = tmp_path / "old-ca.crt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_ssl_context", lambda found: ssl.create_default_context(cafile=found.ssl_ca_cert))
        with pytest.raises(TransientError, match="certificate verify failed"):  # otherwise this test proves nothing
            await get_version(server, ca)
    assert await get_version(server, ca) == {"major": "1"}


async def test_server_of_another_ca_is_not_trusted(server, tmp_path):
    other = make_old_ca(tmp_path, "other")
    with pytest.raises(TransientError, match="certificate verify failed"):
        await get_version(server, other)
