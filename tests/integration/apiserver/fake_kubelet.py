"""A kubelet that serves only logs, which the API server requests from it.

The test writes the log of each container, also while it is followed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from rljob_cluster.control_plane.pki import Pki
from tests.support.waiting import DEADLINE_SECONDS

STAMP = "2026-01-01T00:00:{:02d}.{:09d}Z"


class Log:
    """The log of one run of a container."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_ended = False


class FakeKubelet:
    """`with FakeKubelet(folder, address) as kubelet` listens on kubelet.port until it ends."""

    def __init__(self, folder: Path, address: str) -> None:
        self.changed = threading.Condition()
        self.logs: dict[tuple[str, str], list[Log]] = defaultdict(lambda: [Log()])
        """By Pod and container: the log of each run, the newest last."""
        self.address = address
        kubelet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kubelet.answer(self)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer((address, 0), Handler)
        pki = Pki(folder)
        pki.build_ca()
        context = SSLContext(PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pki.certificate("kubelet", "kubelet", hosts=[address]))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]

    def __enter__(self) -> FakeKubelet:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        with self.changed:
            for runs in self.logs.values():
                runs[-1].has_ended = True
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def write(self, pod: str, container: str, text: str, second: int) -> None:
        with self.changed:
            log = self.logs[pod, container][-1]
            log.lines.append(f"{STAMP.format(second, len(log.lines))} {text}\n")
            self.changed.notify_all()

    def restart(self, pod: str, container: str) -> None:
        """End the container's run and start a new one."""
        with self.changed:
            runs = self.logs[pod, container]
            runs[-1].has_ended = True
            runs.append(Log())
            self.changed.notify_all()

    def end(self, pod: str, container: str) -> None:
        with self.changed:
            self.logs[pod, container][-1].has_ended = True
            self.changed.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        _, _, _, pod, container = url.path.split("/")
        options = {name: values[0] for name, values in parse_qs(url.query).items()}
        with self.changed:
            runs = self.logs[pod, container]
            log = runs[-2] if options.get("previous") == "true" else runs[-1]
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        follow = options.get("follow") == "true"
        position = max(0, len(log.lines) - int(options["tailLines"])) if "tailLines" in options else 0
        while True:
            with self.changed:
                new = log.lines[position:]
                if not new and follow and not log.has_ended:
                    assert self.changed.wait(DEADLINE_SECONDS), f"the test neither wrote to {pod} nor ended it"
                    continue
            for line in new:
                request.wfile.write(f"{len(line.encode()):x}\r\n{line}\r\n".encode())
            position += len(new)
            if not new or not follow:
                break
        request.wfile.write(b"0\r\n\r\n")
