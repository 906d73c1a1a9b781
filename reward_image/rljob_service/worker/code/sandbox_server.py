"""The server in each sandbox of agent-sandbox: runs the code of one episode, in a folder that the episode keeps.

    GET /ready                       200
    POST /v1/run {language, code,    {text}: what the model sees
      seconds, max_characters}

Runs in images that have nothing else of RLJob: `--copy PATH` writes a program with the few modules that it needs,
which import the standard library of Python 3.9 alone. Invariants: a call ends after its seconds, whatever the code
does, and none of its process group remains; what has ended is not left as a zombie; the code cannot read the token.
"""

import contextlib
import ctypes
import hmac
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rljob_service.worker.code import code_runner
from rljob_service.worker.code.code_output import Output, describe_exit
from rljob_service.worker.code.follower import Follower

ENV_TOKEN = "RLJOB_SANDBOX_TOKEN"
ENV_ADDRESS = "RLJOB_POD_IP"
"""Where it listens."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_MAX_BODY_BYTES = 16 << 20
_PROGRAM = "import sys\nfrom rljob_service.worker.code.sandbox_server import main\nsys.exit(main(sys.argv[1:]))\n"
_starting = threading.Lock()
_running: list[subprocess.Popen[bytes]] = []
"""The programs of the calls in progress, which their threads wait for."""
_MODULES = ("code_output", "code_runner", "follower", "sandbox_server", "__init__")


def main(arguments: list[str]) -> int:
    """Serve on a port: `PORT FOLDER`. Or `--copy PATH`."""
    first, second = arguments
    if first == "--copy":
        copy(Path(second))
    else:
        serve(int(first), second)
    return 0


def copy(path: Path) -> None:
    """Write the program to `path`, and its modules next to it."""
    source, target = Path(__file__).parent, path.parent / __package__.replace(".", "/")
    target.mkdir(parents=True)
    for name in _MODULES:
        shutil.copyfile(source / f"{name}.py", target / f"{name}.py")
    for package in target.parents[:2]:  # rljob_service.worker and rljob_service
        (package / "__init__.py").touch()
    path.write_text(_PROGRAM)


def serve(port: int, folder: str) -> None:
    """Serve forever."""
    token = os.environ.pop(ENV_TOKEN)
    # The code has the same user: without this it could read the environment and the memory of this process.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # as if it were process 1 everywhere
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as process 1 it ignores all other signals of the code
    with build_server(os.environ.get(ENV_ADDRESS, "127.0.0.1"), port, folder, token) as server:
        server.serve_forever()


def build_server(address: str, port: int, folder: str, token: str) -> http.server.ThreadingHTTPServer:
    """Return a server that is bound and does not serve yet."""

    class Handler(_Handler):
        pass

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        request_queue_size = 64

    Handler.folder, Handler.token = folder, token
    return Server((address, port), Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    folder = ""
    token = ""
    timeout = 30
    """Seconds for the request's headers and body."""

    def do_GET(self) -> None:
        self._answer(*((200, {}) if self.path == "/ready" else (404, {"error": "unknown path"})))

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return self._answer(401, {"error": "wrong token"})
        if self.path != "/v1/run":
            return self._answer(404, {"error": "unknown path"})
        try:
            size = int(self.headers.get("Content-Length", "0"))
            if not 0 <= size <= _MAX_BODY_BYTES:
                return self._answer(413, {"error": f"the request has more than {_MAX_BODY_BYTES} bytes"})
            request = json.loads(self.rfile.read(size))
            language, code = request["language"], request["code"]
            seconds, max_characters = float(request["seconds"]), int(request["max_characters"])
        except (ValueError, KeyError, TypeError) as error:
            return self._answer(400, {"error": f"not a request: {error!r}"})
        try:
            self._answer(200, {"text": run(language, code, self.folder, seconds, max_characters)})
        except OSError as error:  # no more processes, memory, or disk
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(OSError):  # the client has left
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the probes would fill the log."""


def run(language: str, code: str, folder: str, seconds: float, max_characters: int) -> str:
    """Run code in `folder`, and return what the model sees. Raise OSError if no process can start."""
    if problem := code_runner.find_problem(code):
        return problem
    output, process = Output(max_characters), _start(code_runner.build_command(language, code), folder)
    assert process.stdout is not None
    with process, Follower(process, {process.stdout: output.take}) as follower:
        try:
            has_ended = follower.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _running.remove(process)
            _reap()
        follower.read_rest()
    return output.describe(describe_exit(process.returncode) if has_ended else f"timed out after {seconds:.3g} s")


def _start(command: list[str], folder: str) -> subprocess.Popen[bytes]:
    with _starting:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "HOME": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        _running.append(process)
    return process


def _reap() -> None:
    """Take the exit status of what programs left behind: this process becomes its parent, and each zombie counts
    against the Pod's limit of processes."""
    with _starting, contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if any(process.pid == ended.si_pid for process in _running):
                return  # its own thread waits for it, and then reaps the others
            os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
