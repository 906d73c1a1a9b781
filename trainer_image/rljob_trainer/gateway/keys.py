"""Keys of episode attempts: what a program sends as its API key. Pure.

A key names its attempt and proves that this gateway made it. So an ended episode needs no memory: its keys still differ
from unknown ones.
"""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

_PREFIX = "sk-rljob"
"""Some programs require that a key begins with `sk-`."""
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class AttemptName:
    """One attempt of one episode."""

    episode: str
    attempt: int


class AttemptKeys:
    def __init__(self, secret: bytes | None = None) -> None:
        """`secret`: None makes a random one, so that keys end with the process."""
        self._secret = secret or secrets.token_bytes(32)

    def make(self, name: AttemptName) -> str:
        """Return the key: letters, digits, `-`, `_` and `.`."""
        body = f"{_encode(name.episode.encode())}.{name.attempt}"
        return f"{_PREFIX}.{body}.{self._sign(body)}"

    def read(self, key: str) -> AttemptName | None:
        """Return the attempt of a key; None if this gateway did not make it."""
        prefix, _, rest = key.partition(".")
        body, _, signature = rest.rpartition(".")
        if prefix != _PREFIX or not hmac.compare_digest(signature.encode(errors="replace"), self._sign(body).encode()):
            return None
        episode, _, attempt = body.rpartition(".")
        return AttemptName(_decode(episode).decode(), int(attempt))

    def _sign(self, body: str) -> str:
        digest = hmac.digest(self._secret, body.encode(errors="replace"), hashlib.sha256)
        return _encode(digest[:_DIGEST_BYTES])


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
