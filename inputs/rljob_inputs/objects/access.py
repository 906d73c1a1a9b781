"""Which object storage a URL names, with which credentials, and fsspec's client for it.

Leaves errors to `errors`. Invariant: nothing is read or connected here, and no client caches a listing: an object that
is replaced has a new tag at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.sources import OBJECT_SCHEMES
from rljob_api.wire.redaction import Redactor
from rljob_inputs.machine.installation import MissingExtraError, describe_installation, has_module

PACKAGES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""fsspec's package for a scheme. RLJob brings that of s3 (extra data); the others are the user's."""
_CONNECT_SECONDS, _READ_SECONDS, _MAX_ATTEMPTS = 5, 60, 3
"""Attempts are those of s3fs, which also repeats what breaks while it is read; botocore's own would multiply them."""


@dataclass(frozen=True)
class ObjectAccess:
    """Address and credentials of S3. None: what botocore finds: a profile, the identity of the Pod or of the machine.
    Clients of other storage read the environment themselves."""

    endpoint: str | None = None
    region: str | None = None
    key: str | None = None
    secret: str | None = None
    token: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ObjectAccess:
        def read(*names: str) -> str | None:
            return next(filter(None, (environment.get(name) for name in names)), None)

        return cls(
            (read("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or "").rstrip("/") or None,
            read("AWS_REGION", "AWS_DEFAULT_REGION"),
            read("AWS_ACCESS_KEY_ID"),
            read("AWS_SECRET_ACCESS_KEY"),
            read("AWS_SESSION_TOKEN"),
        )

    @property
    def place(self) -> str:
        """Where requests go, for messages: without a password in the address."""
        return Redactor().hide(self.endpoint) if self.endpoint else "AWS"

    @property
    def identity(self) -> str:
        """Whose rights count, for messages. The id of a key is no secret."""
        return f"the key {self.key}" if self.key else "the identity of this machine or Pod"


def is_object(location: str) -> bool:
    """Whether a location is a URL of object storage, also a pinned one."""
    url, _ = split_pin(location)
    return url.partition("://")[0] in OBJECT_SCHEMES and "://" in url


def pin(url: str, digest: str) -> str:
    """Return a location that names one version of objects: s3+DIGEST://bucket/key. `digest`: of their listing."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}+{digest}://{rest}"


def split_pin(location: str) -> tuple[str, str]:
    """Return the URL, and the digest of a pinned location; empty for another one."""
    scheme, separator, rest = location.partition("://")
    scheme, _, digest = scheme.partition("+")
    return f"{scheme}{separator}{rest}", digest if separator else ""


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket, or the container, and the key or prefix, which may be empty."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


def open_client(url: str, access: ObjectAccess) -> Any:
    """Return the file system of fsspec for a URL. Raise UserError if its package is not installed."""
    scheme = url.partition("://")[0]
    package = PACKAGES[scheme]
    if not has_module(package):
        if scheme == "s3":  # not `require`: the images have other parts of the extra
            raise MissingExtraError(f"{url} needs the package {package}; {describe_installation('data')}")
        raise UserError(
            f"{url}: needs the package {package}; install it beside RLJob, and in the images of head, trainer and "
            "rollout"
        )
    return _build_client(scheme, access, os.getpid())


@functools.lru_cache(maxsize=8)
def _build_client(scheme: str, access: ObjectAccess, process: int) -> Any:
    """`process`: a client does not work in a process that was forked from the one that built it."""
    import fsspec

    settings = _s3_settings(access) if scheme == "s3" else {}
    client = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **settings)
    if scheme == "s3":
        client.retries = _MAX_ATTEMPTS
    return client


def _s3_settings(access: ObjectAccess) -> dict[str, Any]:
    retries = {"total_max_attempts": 1, "mode": "standard"}
    config: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _READ_SECONDS,
        "retries": retries,
    }
    if access.endpoint:
        # Checksums that S3 has since 2025, and many of those who speak its protocol refuse.
        config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    return {
        "key": access.key,
        "secret": access.secret,
        "token": access.token,
        "endpoint_url": access.endpoint,
        "client_kwargs": {"region_name": access.region} if access.region else {},
        "config_kwargs": config,
    }
