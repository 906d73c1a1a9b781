"""The certificates of one control plane: a CA of its own, and what it signs, made with the openssl command.

Private keys lie in a folder that only its owner can read. Nothing here is meant to outlive its cluster.
"""

import base64
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

_DAYS = "365"
_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class PkiError(Exception):
    """openssl refused; the message carries its last lines."""


class Pki:
    """One CA in one folder; every method gives what is there, and makes it where it is not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"
        self._ca_key = folder / "ca.key"

    def build_ca(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.ca.exists():
            _openssl(
                "req", "-x509", *_NEW_KEY, "-days", _DAYS, "-subj", "/CN=rljob-cluster",
                "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
                "-keyout", str(self._ca_key), "-out", str(self.ca),
            )  # fmt: skip

    def key(self, name: str) -> Path:
        """A bare private key, for signing service account tokens."""
        path = self.folder / f"{name}.key"
        if not path.exists():
            # Not genpkey: of a PKCS#8 key the API server cannot read the public half.
            _openssl("ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", str(path))
        return path

    def certificate(
        self, name: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Certificate and key of a client (user and groups) that also serves where hosts are given."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not certificate.exists():
            extensions = ["-addext", "basicConstraints=critical,CA:FALSE"]
            usage = "clientAuth,serverAuth" if hosts else "clientAuth"
            extensions += ["-addext", f"extendedKeyUsage={usage}"]
            if hosts:
                extensions += ["-addext", f"subjectAltName={','.join(map(subject_alternative, hosts))}"]
            _openssl(
                "req", "-x509", "-CA", str(self.ca), "-CAkey", str(self._ca_key), *_NEW_KEY, "-days", _DAYS,
                "-subj", subject(user, groups), *extensions, "-keyout", str(key), "-out", str(certificate),
            )  # fmt: skip
        return certificate, key


def subject(user: str, groups: Sequence[str]) -> str:
    """Kubernetes reads the user from CN and the groups from O; openssl splits at '/' unless it is escaped."""
    names = [("O", group) for group in groups] + [("CN", user)]
    return "".join(f"/{field}={value.replace('/', chr(92) + '/')}" for field, value in names)


def subject_alternative(host: str) -> str:
    return f"IP:{host}" if host.replace(".", "").isdigit() else f"DNS:{host}"


def build_kubeconfig(server: str, ca: bytes, certificate: bytes, key: bytes) -> str:
    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "rljob", "cluster": {"server": server, "certificate-authority-data": encoded(ca)}},
            ],
            "users": [
                {
                    "name": "rljob",
                    "user": {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)},
                }
            ],
            "contexts": [{"name": "rljob", "context": {"cluster": "rljob", "user": "rljob"}}],
            "current-context": "rljob",
        },
        sort_keys=False,
    )


def _openssl(*arguments: str) -> None:
    try:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise PkiError("openssl is not on PATH; install it (Debian: apt-get install openssl)") from None
    if done.returncode != 0:
        raise PkiError(f"openssl {arguments[0]} failed:\n{done.stderr[-1000:]}")
