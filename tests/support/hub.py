"""A Hugging Face Hub over a folder, for tests: what huggingface_hub, datasets, transformers and vLLM request.

    FOLDER/models/ORG/NAME/...          revision main
    FOLDER/models/ORG/NAME@REVISION/... another branch or tag
    FOLDER/datasets/ORG/NAME/...
    FOLDER/access.json                  {"models/ORG/NAME": {"token": "hf_x", "gated": true}}

A repository with a token is private; a gated one answers 403 to other tokens. Models can be created and committed to,
without Git LFS, with any token but one that begins with hf_read. Only the standard library is used, so
that a Pod can run this file: `python hub.py FOLDER [PORT]`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info|refs)(?:/([^/]+)(?:/(.*))?)?)?")
_RESOLVE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CHUNK_BYTES = 1 << 20


class RefusalError(Exception):
    """An error as the Hub reports it."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


class Revision(NamedTuple):
    name: str
    commit: str
    folder: Path

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


class Catalog:
    """The repositories of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, kind: str, name: str, revision: str, token: str) -> Revision:
        """Return a revision by branch, tag or commit. Raise RefusalError as the Hub would."""
        root = self._folder / kind / name
        if not root.is_dir():
            # The Hub does not reveal which private repositories exist: without a token a missing one is 401.
            raise RefusalError(404 if token else 401, "RepoNotFound", "Repository not found")
        access = self._read_access().get(f"{kind}/{name}", {})
        if access.get("token") not in (None, token):
            if not access.get("gated"):
                raise RefusalError(404 if token else 401, "RepoNotFound", "Repository not found")
            raise RefusalError(403 if token else 401, "GatedRepo", f"Access to {kind} {name} is restricted")
        for folder in (root, *root.parent.glob(f"{root.name}@*")):
            branch = folder.name.partition("@")[2] or "main"
            commit = _digest(f"{kind}/{name}/{branch}")
            if revision in (branch, commit):
                return Revision(name, commit, folder)
        raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def is_private(self, kind: str, name: str) -> bool:
        return self._read_access().get(f"{kind}/{name}", {}).get("token") is not None

    def create(self, wanted: dict[str, Any], token: str) -> dict[str, str]:
        name = f"{wanted['organization']}/{wanted['name']}"
        folder = self._folder / "models" / name
        if folder.exists():
            raise RefusalError(409, "", "You already created this model repo")
        folder.mkdir(parents=True)
        if wanted.get("visibility") == "private" or wanted.get("private"):
            access = self._read_access() | {f"models/{name}": {"token": token, "gated": False}}
            (self._folder / "access.json").write_text(json.dumps(access))
        return {"id": name}

    def _read_access(self) -> dict[str, dict[str, Any]]:
        file = self._folder / "access.json"
        return json.loads(file.read_text()) if file.exists() else {}


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def _etag(file: Path) -> str:
    stat = file.stat()
    return _digest(f"{file}:{stat.st_size}:{stat.st_mtime_ns}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    catalog: Catalog
    requests: list[str]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep stderr for the tests."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append(f"{self.command} {path}")
        try:
            if match := _RESOLVE.fullmatch(path):
                self._send_file(match[1] or "models", match[2], match[3], match[4])
            elif self.command == "POST" and (answer := self._write(path, body)) is not None:
                self._send_json(answer)
            elif match := _API.fullmatch(path):
                self._send_json(self._describe(match, parse_qs(url.query), body))
            else:
                raise RefusalError(404, "", f"no such route: {path}")
        except RefusalError as refusal:
            self._send_refusal(refusal)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    @property
    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()

    def _page(self, wanted: dict[str, str]) -> str:
        return f"http://{self.headers['Host']}/{wanted['organization']}/{wanted['name']}"

    def _find(self, kind: str, name: str, revision: str) -> Revision:
        return self.catalog.find(kind, name, revision, self._token)

    def _write(self, path: str, body: bytes) -> Any:
        """Answer a request that creates a model or commits to it; None for others."""
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        match = _COMMIT.fullmatch(path)
        if path != "/api/repos/create" and not match:
            return None
        if not self._token or self._token.startswith("hf_read"):
            raise RefusalError(403, "", "You don't have the rights to write to this namespace")
        if not match:
            return self.catalog.create(json.loads(body), self._token) | {"url": self._page(json.loads(body))}
        name, what = match.groups()
        found = self._find("models", name, "main")
        if what == "preupload":
            files = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                target = found.folder / line["value"]["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(base64.b64decode(line["value"]["content"]))
        page = f"http://{self.headers['Host']}/{name}/commit/{found.commit}"
        return {"success": True, "commitOid": found.commit, "commitUrl": page, "hookOutput": ""}

    def _describe(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> Any:
        kind, name, what, revision, path = match.groups()
        found = self._find(kind, name, unquote(revision or "main"))
        if what == "refs":
            return {"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": found.commit}], "tags": []}
        if what == "tree":
            return _list_tree(found, path or "", recursive=query.get("recursive", [""])[0].lower() in ("true", "1"))
        if what == "paths-info":
            wanted = parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
            return [_describe_entry(found, found.folder / p) for p in wanted if (found.folder / p).exists()]
        siblings = [
            {"rfilename": str(file.relative_to(found.folder)), "size": file.stat().st_size, "blobId": _etag(file)}
            for file in found.files()
        ]
        is_private = self.catalog.is_private(kind, name)
        fields = {"_id": _digest(name), "private": is_private, "gated": False, "tags": [], "downloads": 0, "likes": 0}
        return {"id": name, "sha": found.commit, "siblings": siblings, **fields}

    def _send_file(self, kind: str, name: str, revision: str, path: str) -> None:
        found = self._find(kind, name, revision)
        file = found.folder / path
        if not file.is_file():
            raise RefusalError(404, "EntryNotFound", f"{path} does not exist")
        size = file.stat().st_size
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) if wanted and wanted[2] else size - 1, size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        if self.command != "HEAD":
            self._copy(file, start, end - start + 1)

    def _copy(self, file: Path, start: int, num_bytes: int) -> None:
        with file.open("rb") as stream:
            stream.seek(start)
            while num_bytes > 0 and (chunk := stream.read(min(_CHUNK_BYTES, num_bytes))):
                self.wfile.write(chunk)
                num_bytes -= len(chunk)

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_refusal(self, refusal: RefusalError) -> None:
        body = json.dumps({"error": str(refusal)}).encode()
        self.send_response(refusal.status)
        if refusal.code:
            self.send_header("X-Error-Code", refusal.code)
        self.send_header("X-Error-Message", str(refusal))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _list_tree(found: Revision, path: str, *, recursive: bool) -> list[dict[str, Any]]:
    folder = found.folder / path
    if not folder.is_dir():
        raise RefusalError(404, "EntryNotFound", f"{path} does not exist")
    return [_describe_entry(found, entry) for entry in sorted(folder.rglob("*") if recursive else folder.iterdir())]


def _describe_entry(found: Revision, entry: Path) -> dict[str, Any]:
    path = str(entry.relative_to(found.folder))
    if entry.is_dir():
        return {"type": "directory", "path": path, "oid": _digest(path), "size": 0}
    return {"type": "file", "path": path, "oid": _etag(entry), "size": entry.stat().st_size}


class LocalHub:
    """A running hub. `requests` has "METHOD path" of every request."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        self.folder = folder
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"catalog": Catalog(folder), "requests": self.requests})
        self._server = ThreadingHTTPServer((address, port), handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_address[1]}"

    def serve(self) -> None:
        self._server.serve_forever()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, path: str, source: Path | None = None, *, token: str | None = None, gated: bool = False) -> Path:
        """Add models/ORG/NAME or datasets/ORG/NAME, a link to `source` if given. Return its folder."""
        folder = self.folder / path
        folder.parent.mkdir(parents=True, exist_ok=True)
        if source is None:
            folder.mkdir()
        else:
            folder.mkdir()
            for file in source.iterdir():
                (folder / file.name).symlink_to(file)
        if token is not None or gated:
            access = self.folder / "access.json"
            known = json.loads(access.read_text()) if access.exists() else {}
            access.write_text(json.dumps({**known, path: {"token": token, "gated": gated}}))
        return folder


@contextlib.contextmanager
def run_hub(folder: Path) -> Iterator[LocalHub]:
    """Serve `folder` on a free port until the block ends."""
    hub = LocalHub(folder)
    thread = threading.Thread(target=hub.serve, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.close()
        thread.join()


if __name__ == "__main__":
    LocalHub(Path(sys.argv[1]), "0.0.0.0", int(sys.argv[2]) if len(sys.argv) > 2 else 8000).serve()
