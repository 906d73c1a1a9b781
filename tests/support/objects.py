"""An S3 server in this process, for tests: moto's. Its users and policies are those of IAM."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

BUCKET = "bucket"
_REGION = "us-east-1"
_ROOT = ("test-root", "test-root-secret")


class ObjectServer:
    """A running server with one bucket."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client("s3").create_bucket(Bucket=BUCKET)

    def _client(self, service: str) -> Any:
        import boto3

        key, secret = _ROOT
        return boto3.client(
            service, endpoint_url=self.url, region_name=_REGION, aws_access_key_id=key, aws_secret_access_key=secret
        )

    def environment(self, key: str = _ROOT[0], secret: str = _ROOT[1]) -> dict[str, str]:
        """Return the variables with which a program finds the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_REGION": _REGION,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
        }

    def put(self, key: str, content: bytes) -> None:
        self._client("s3").put_object(Bucket=BUCKET, Key=key, Body=content)

    def put_folder(self, prefix: str, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys in the order in which they were last written."""
        found = self._client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [each["Key"] for each in sorted(found, key=lambda each: (each["LastModified"], each["Key"]))]

    def read(self, key: str) -> bytes:
        return self._client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()

    @contextlib.contextmanager
    def only_with(self, *rights: str) -> Iterator[dict[str, str]]:
        """Within, the server checks rights. Yield the variables of a user that has these: s3:GetObject."""
        iam = self._client("iam")
        name = f"user-{len(iam.list_users()['Users'])}"
        iam.create_user(UserName=name)
        statement = [{"Effect": "Allow", "Action": list(rights) or ["sts:GetCallerIdentity"], "Resource": "*"}]
        policy = json.dumps({"Version": "2012-10-17", "Statement": statement})
        iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self._check_rights_after("0")
        try:
            yield self.environment(key["AccessKeyId"], key["SecretAccessKey"])
        finally:
            self._check_rights_after("inf")

    def _check_rights_after(self, num_requests: str) -> None:
        headers = {"Content-Type": "text/plain"}
        urlopen(Request(f"{self.url}/moto-api/reset-auth", num_requests.encode(), headers, method="POST")).close()


@contextlib.contextmanager
def run_objects(address: str = "127.0.0.1") -> Iterator[ObjectServer]:
    """Serve on a free port until the block ends."""
    from moto.server import ThreadedMotoServer  # seconds to import

    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield ObjectServer(f"http://{host}:{port}")
    finally:
        server.stop()
