"""A registry in memory, as far as helm and buildah push and pull: blobs, manifests and tags (OCI distribution 1.1)."""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Registry:
    """`with Registry() as registry` listens on registry.host until it ends."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        """Media type and bytes, by name and by tag or digest."""
        registry = self

        class Handler(_Handler):
            owner = registry

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Registry:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def tags(self, name: str) -> list[str]:
        return sorted(tag for owner, tag in self.manifests if owner == name and not tag.startswith("sha256:"))


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Handler(BaseHTTPRequestHandler):
    owner: Registry
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/v2/":
            return self.answer(200)
        found = re.fullmatch(r"/v2/(.+)/(blobs|manifests)/([^/]+)", path)
        name, kind, reference = found.groups() if found else ("", "", "")
        if kind == "blobs" and reference in self.owner.blobs:
            return self.answer(200, self.owner.blobs[reference], Docker_Content_Digest=reference)
        if kind == "manifests" and (name, reference) in self.owner.manifests:
            media_type, body = self.owner.manifests[name, reference]
            return self.answer(200, body, Content_Type=media_type, Docker_Content_Digest=digest_of(body))
        return self.answer(404, b'{"errors": [{"code": "NOT_FOUND"}]}', Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.read_body()
        upload = uuid.uuid4().hex
        self.owner.uploads[upload] = b""
        self.answer(202, Location=f"{urlsplit(self.path).path.rstrip('/')}/{upload}", Range="0-0")

    def do_PATCH(self) -> None:
        upload = urlsplit(self.path).path.rpartition("/")[2]
        self.owner.uploads[upload] += self.read_body()
        size = len(self.owner.uploads[upload])
        self.answer(202, Location=urlsplit(self.path).path, Range=f"0-{max(0, size - 1)}")

    def do_PUT(self) -> None:
        url, body = urlsplit(self.path), self.read_body()
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", url.path):
            stored = (self.headers.get("Content-Type", ""), body)
            self.owner.manifests |= {(found[1], found[2]): stored, (found[1], digest_of(body)): stored}
            return self.answer(201, Location=url.path, Docker_Content_Digest=digest_of(body))
        content = self.owner.uploads.pop(url.path.rpartition("/")[2]) + body
        digest = parse_qs(url.query)["digest"][0]
        assert digest == digest_of(content), "the upload is whole"
        self.owner.blobs[digest] = content
        return self.answer(201, Location=url.path, Docker_Content_Digest=digest)
