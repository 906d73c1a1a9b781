"""Real servers of tools that run code of the policy: whatever the code does is text for the model, and costs one call.

tests/process/.../test_isolation.py checks the sandbox of workers, which the code inherits.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rljob_api.manifest.quantity import Size
from rljob_api.manifest.services.tool import Tool
from tests.support.reward_process import Server
from tests.support.waiting import wait_for

StartServer = Callable[..., Server]
MAX_MEMORY = "512Mi"
MAX_FILE_SIZE = Size("8Mi")


def build_fields(seconds: float = 30, **sandbox: Any) -> dict[str, Any]:
    """Return the settings of a server, as those of the tool in a job."""
    tool = Tool.model_validate(
        {"name": "code", "slots": 2, "timeoutSeconds": seconds, "sandbox": {"maxMemory": MAX_MEMORY} | sandbox}
    )
    service = tool.build_service()
    assert service.function is not None
    function = service.function.model_copy(update={"max_file_size": MAX_FILE_SIZE, "max_processes": 20})
    fields = {"slots": service.slots, "timeoutSeconds": service.timeout_seconds}
    return fields | {"function": function.model_dump(mode="json", by_alias=True, exclude_defaults=True)}


WITHOUT_LANDLOCK = pytest.param("uid,landlock", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["", WITHOUT_LANDLOCK], ids=lambda names: f"without-{names}")
def disabled(request: pytest.FixtureRequest) -> str:
    """Disabled mechanisms."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(disabled: str, start_server: StartServer) -> Server:
    environment = {"RLJOB_REWARD_DISABLE_ISOLATION": disabled}
    return start_server(
        None, ["--serves", "tools"], environment=environment, **build_fields(languages=["python", "shell"])
    )


@pytest.fixture(scope="module")
def impatient(start_server: StartServer) -> Server:
    return start_server(None, ["--serves", "tools"], **build_fields(seconds=1, languages=["python", "shell"]))


def run(server: Server, code: str, **fields: Any) -> str:
    """Return what the model sees of Python code."""
    result = server.call({"code": code}, "run_python", **fields)
    assert result["valid"], result["message"]
    return str(result["value"])


def run_shell(server: Server, command: str) -> str:
    result = server.call({"command": command}, "run_shell")
    assert result["valid"], result["message"]
    return str(result["value"])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("2+2", "4"),
        ("x = 3\nprint(x)\nx * 2", "3\n6"),
        ("x = 3", "[no output]"),
        ("print('a', end='')", "a"),
        ("import os\nos.listdir(), os.path.samefile(os.getcwd(), os.environ['HOME'])", "([], True)"),
        ("def f(n):\n    return 1 / n\nf(0)", "ZeroDivisionError: division by zero\n[exit code 1]"),
        ("1 +", "SyntaxError: invalid syntax\n[exit code 1]"),
        ("import sys\nsys.exit(3)", "[exit code 3]"),
        ("input()", "EOFError: EOF when reading a line\n[exit code 1]"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("import ctypes\nctypes.string_at(0)", "[killed by SIGSEGV]"),
        ("import os\nos._exit(3)", "[exit code 3]"),
        ("print('\\ud83d')", "\\ud83d"),
        ("'\0'", "[not run: the code has a null character]"),
        pytest.param("#" * 200_000, "[not run: the code has more than 100000 bytes]", id="long"),
        ("open('a', 'w').write('b')\nopen('a').read()", "'b'"),
    ],
)
def test_the_model_sees_what_a_notebook_would_show(server: Server, code: str, text: str) -> None:
    assert run(server, code).endswith(text)


def test_a_traceback_shows_the_code_alone(server: Server) -> None:
    lines = run(server, "def f(n):\n    return 1 / n\n\nf(0)").splitlines()
    files = [line for line in lines if line.startswith("  File")]
    assert files == ['  File "<code>", line 4, in <module>', '  File "<code>", line 2, in f']
    assert "    return 1 / n" in lines


def test_the_shell_has_the_interpreter_of_the_tool(server: Server) -> None:
    assert run_shell(server, "echo a | tr a b; exit 4") == "b\n[exit code 4]"
    assert run_shell(server, "python3 -c 'import sys; print(sys.prefix)'") == sys.prefix
    assert "nosuch: command not found\n[exit code 127]" in run_shell(server, "nosuch")


HOSTILE = {
    "ends its worker": (
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "PermissionError: [Errno 1] Operation not permitted",
    ),
    "adjusts its worker": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))",
        "PermissionError: [Errno 1] Operation not permitted",
    ),
    "takes all memory": ("x = bytearray(8 << 30)", "MemoryError"),
    "takes it in many processes": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(200 << 20)\n"
        "        time.sleep(100)\nos.wait()",
        f"[ended: it used more than {MAX_MEMORY} of memory]",
    ),
    "prints without end": ("while True:\n    print('x' * 10000)", "[ended: it printed more than 16Mi]"),
    "writes a large file": ("open('a', 'wb').write(bytes(1 << 28))", "OSError: [Errno 27] File too large"),
    "opens a socket": ("import socket\nsocket.socket()", "OSError: [Errno 100] Network is down"),
    "resolves a name": (
        "import urllib.request\nurllib.request.urlopen('http://example.com')",
        "URLError: <urlopen error [Errno",
    ),
}


@pytest.mark.parametrize("behaviour", HOSTILE)
def test_hostile_code_is_text_for_the_model_and_costs_one_call(server: Server, behaviour: str) -> None:
    code, text = HOSTILE[behaviour]
    workers = {child.pid for child in server.children()}
    assert text in run(server, code)
    assert run(server, "2+2") == "4"
    assert workers <= {child.pid for child in server.children()}, "no worker had to be replaced"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\nwhile True:\n    os.fork()", r"more than 20 processes and threads \(maxProcesses\)"),
        (
            "import time\nfor i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))\n    time.sleep(0.02)",
            r"files took more than 8Mi \(maxFileSize\)",
        ),
    ],
)
def test_code_that_costs_its_worker_is_not_tried_again(server: Server, code: str, message: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(run, server, "import time\ntime.sleep(0.5)\n7")
        result = server.call({"code": code}, "run_python")
        assert other.result() == "7", "another call at the same time"
    assert (result["valid"], result["reason"]) == (False, "bad_request"), result
    assert re.search(message, result["message"]), result
    assert run(server, "2+2") == "4"


def test_code_cannot_read_the_files_of_the_machine(server: Server, disabled: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder, "answers").write_text("42")
        text = run(server, f"open('{folder}/answers').read()")
        assert ("PermissionError" in text) == ("landlock" not in disabled)
        text = run(server, f"open('{folder}/new', 'w')")
        assert ("PermissionError" in text) == ("landlock" not in disabled)
    (tmp_path / "answers").write_text("42")
    assert "FileNotFoundError" in run(server, f"open({str(tmp_path / 'answers')!r}).read()"), "/tmp is the worker's own"
    assert "secret" not in run_shell(server, f"cat /proc/{server.pid}/environ /proc/*/environ 2>&1 | tr '\\0' '\\n'")


def test_code_reads_neither_passwords_nor_the_command_lines_of_others(server: Server, disabled: str) -> None:
    """As root, too, whose `rljob run` this may be."""
    if "landlock" in disabled:
        pytest.skip("nothing restricts reads")
    others = [
        f"/proc/{pid}/{name}" for pid in (server.pid, os.getpid(), 1) for name in ("cmdline", "environ", "status")
    ]
    files = [path for path in Path("/etc").rglob("*") if path.is_file() and not path.is_symlink()]
    private = [str(path) for path in files if not path.stat().st_mode & stat.S_IROTH]
    assert "/etc/shadow" in private
    code = f"""
import glob, os
for path in {[*private, *others]}:
    try:
        print(path, open(path).read(1))
    except PermissionError:
        pass
glob.glob("/proc/[0-9]*")
"""
    assert run(server, code) == "[]"


def test_code_reads_what_programs_need_of_etc_and_proc(server: Server) -> None:
    code = """
import os, pwd, subprocess
for path in ("/etc/passwd", "/etc/hosts", "/proc/meminfo", "/proc/self/status", "/proc/sys/kernel/ostype"):
    assert open(path).read(), path
assert os.listdir("/proc/self/fd") and os.readlink("/proc/self/exe") and pwd.getpwuid(0).pw_name == "root"
subprocess.run(["bash", "-c", "cat <(echo a) /dev/stdin"], input=b"b", capture_output=True).stdout
"""
    assert run(server, code) == r"b'a\nb'"


def test_calls_do_not_see_the_files_of_others(server: Server) -> None:
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(run, server, "import os, time\nopen('a', 'w').close()\ntime.sleep(0.5)\nos.listdir()")
        assert run(server, "import os\nos.listdir()") == "[]"
        assert other.result() == "['a']"
    assert run(server, "import os\nos.listdir()") == "[]"


def test_what_code_leaves_behind_ends_with_its_call(server: Server) -> None:
    daemon = "(setsid sh -c 'sleep 1000 & echo $! > pid; sleep 1000' &)"
    pid = int(run_shell(server, f"{daemon}; until [ -s pid ]; do sleep 0.01; done; cat pid"))
    assert not os.path.exists(f"/proc/{pid}")
    assert run(server, "2+2") == "4"


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("run_python", {"code": "print('first')\nwhile True:\n    pass"}),
        ("run_shell", {"command": "echo first; kill -STOP $$"}),
        ("run_shell", {"command": "echo first; setsid sh -c 'sleep 1000' ; wait"}),
    ],
)
def test_a_call_that_takes_too_long_is_text_for_the_model(
    impatient: Server, function: str, arguments: dict[str, Any]
) -> None:
    workers = {child.pid for child in impatient.children()}
    result = impatient.call(arguments, function)
    assert result["valid"], result["message"]
    assert result["value"].endswith("[timed out after 1 s]"), "after what it printed, if it has come so far"
    wait_for(lambda: {child.pid for child in impatient.children()} == workers, "only the workers to remain")


def test_ordinary_work_of_code_works(server: Server) -> None:
    pool = (
        "from multiprocessing import Pool\ndef f(x):\n    return x * x\nwith Pool(2) as p:\n    print(p.map(f, [1, 2]))"
    )
    assert run(server, pool) == "[1, 4]"
    assert run(server, "import tempfile\nwith tempfile.TemporaryFile() as f:\n    print(f.write(b'ab'))") == "2"
    assert run(server, "import subprocess\nsubprocess.run(['ls', '/usr'], capture_output=True).returncode") == "0"
    assert run(server, "import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()") == "1"


def test_a_unix_server_of_the_machine_is_not_reached(server: Server, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})"
        assert "Error: [Errno" in run(server, code)


def test_a_model_sees_the_tools_of_its_languages(server: Server, impatient: Server) -> None:
    tools = server.request("GET", "/v1/info")[1]["tools"]
    assert [tool["name"] for tool in tools] == ["run_python", "run_shell"]
    assert server.call({"code": 3.5}, "run_python")["value"] == "3.5"
    assert server.call({}, "run_python")["reason"] == "bad_request"


def test_the_end_of_a_process_does_not_interrupt_the_start_of_the_next_one(server: Server) -> None:
    """A start waits for the server. A signal in this time must not be an error."""
    loop = "i=0; while [ $i -lt 100 ]; do true | true | true | true; i=$((i+1)); done; echo $i"
    assert run_shell(server, loop) == "100"


@pytest.mark.slow
def test_many_calls_at_once_end_one_as_another(server: Server) -> None:
    barrier = threading.Barrier(8)

    def work(number: int) -> list[str]:
        barrier.wait()
        return [run(server, f"{number} * {other}") for other in range(8)]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(8)))
    assert results == [[str(a * b) for b in range(8)] for a in range(8)]


@pytest.mark.slow
def test_code_imports_the_packages_of_the_tool(start_server: StartServer) -> None:
    server = start_server(None, ["--serves", "tools"], **build_fields(requirements=["humanize==4.9.0"]))
    assert run(server, "import humanize\nhumanize.intcomma(12345)") == "'12,345'"


def test_code_may_use_a_private_tmp_which_is_emptied_after_the_call(server: Server) -> None:
    code = "import os\nprint(os.path.exists('/tmp/x'))\nopen('/tmp/x', 'x').close()"
    for _ in range(3):
        assert run(server, code) == "False"
