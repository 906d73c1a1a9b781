"""The certificates of one control plane: its CA, and what the CA signs, created with the openssl command.

Only the owner can read the folder with the private keys. Nothing here outlives its cluster.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

import yaml

from rljob_cluster.host.commands import run

_DAYS = "365"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", _DAYS)


class Pki:
    """One CA in one folder. Every method returns existing files, and creates missing ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"
        self._ca_key = folder / "ca.key"

    def build_ca(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.ca.exists():
            run(
                "openssl", "req", "-x509", *_NEW_KEY, "-subj", "/CN=rljob-cluster",
                "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
                "-keyout", str(self._ca_key), "-out", str(self.ca),
            )  # fmt: skip

    def key(self, name: str) -> Path:
        """A bare private key, for signing service account tokens."""
        path = self.folder / f"{name}.key"
        if not path.exists():
            # Not genpkey: the API server cannot read the public half of a PKCS#8 key.
            run("openssl", "ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", str(path))
        return path

    def certificate(
        self, name: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Certificate and key of a client (user and groups); with hosts, they are valid for a server too."""
        self.build_ca()
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not certificate.exists():
            extensions = ["basicConstraints=critical,CA:FALSE"]
            extensions += [f"extendedKeyUsage={'clientAuth,serverAuth' if hosts else 'clientAuth'}"]
            extensions += [f"subjectAltName={','.join(map(subject_alternative, hosts))}"] if hosts else []
            run(
                "openssl", "req", "-x509", "-CA", str(self.ca), "-CAkey", str(self._ca_key), *_NEW_KEY,
                "-subj", subject(user, groups), *(part for value in extensions for part in ("-addext", value)),
                "-keyout", str(key), "-out", str(certificate),
            )  # fmt: skip
        return certificate, key


def subject(user: str, groups: Sequence[str]) -> str:
    """Kubernetes reads the user from CN and the groups from O; openssl splits at '/' unless it is escaped."""
    names = [("O", group) for group in groups] + [("CN", user)]
    return "".join(f"/{field}={value.replace('/', chr(92) + '/')}" for field, value in names)


def subject_alternative(host: str) -> str:
    return f"IP:{host}" if host.replace(".", "").isdigit() else f"DNS:{host}"


def build_kubeconfig(server: str, ca: Path, certificate: Path, key: Path) -> str:
    def encode(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    cluster = {"server": server, "certificate-authority-data": encode(ca)}
    user = {"client-certificate-data": encode(certificate), "client-key-data": encode(key)}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rljob", "cluster": cluster}],
            "users": [{"name": "rljob", "user": user}],
            "contexts": [{"name": "rljob", "context": {"cluster": "rljob", "user": "rljob"}}],
            "current-context": "rljob",
        },
        sort_keys=False,
    )
