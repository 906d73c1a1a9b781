"""A real server under hostile functions: each costs one invalid result with its reason, or is refused by the kernel.

All cases run with every mechanism of this machine, then without dedicated users, as on a kernel without Landlock, and
as on one without a seccomp listener.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.reward_process import TOKEN, Server
from tests.support.waiting import wait_for

StartServer = Callable[..., Server]

SOURCE = r"""
import ctypes, mmap, multiprocessing, os, resource, signal, socket, subprocess, sys, tempfile, threading, time

SCRATCH = os.environ["TMPDIR"]
open(f"{SCRATCH}/from-import", "w").close()
FOLDER = f"{SCRATCH}/folder"
os.mkdir(FOLDER)
open(f"{FOLDER}/kept", "w").close()
kept = []
libc = ctypes.CDLL(None, use_errno=True)

def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno is not None
    except ValueError as error:  # of resource, for EPERM
        return "not allowed" in str(error)
    return False

def fork_bomb(_):
    while True:
        os.fork()

def thread_bomb(_):
    while True:
        threading.Thread(target=time.sleep, args=(60,)).start()

def print_much(_):
    piece = b"x" * (1 << 20)
    for _ in range(128):
        os.write(1, piece)
    return 1.0

def one_large_file(_):
    with open(f"{SCRATCH}/large", "wb") as file:
        while True:
            file.write(bytes(1 << 20))

def many_files(_):
    for number in range(1 << 20):
        with open(f"{SCRATCH}/{number}", "wb") as file:
            file.write(bytes(1 << 20))
        time.sleep(0.001)

def unnamed_files(_):
    for _ in range(200):
        file = tempfile.TemporaryFile()
        file.write(bytes(1 << 20))
        kept.append(file)
        time.sleep(0.02)

def fill_shared_memory(_):
    for number in range(20):
        with open(f"/dev/shm/{number}", "wb") as file:
            file.write(bytes(1 << 20))

def share(_):
    with open("/dev/shm/left", "xb"):
        pass
    with open(f"{FOLDER}/left", "x"):
        pass
    os.chmod(FOLDER, 0o500)
    return 1.0

def use_tmp(_):
    # As programs do that do not ask for $TMPDIR.
    with open("/tmp/left-by-a-sample", "x") as file:
        file.write("x")
    os.mkdir("/tmp/folder-of-a-sample")
    return 1.0

def use_socket_in_tmp(_):
    os.mkdir("/tmp/folder-of-a-sample")
    server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    server.bind("/tmp/folder-of-a-sample/socket")
    server.listen()
    client.connect("/tmp/folder-of-a-sample/socket")
    server.accept()
    return 1.0

def fill_tmp(_):
    for number in range(1 << 20):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(1 << 20))
        time.sleep(0.001)

def read_token(server):
    for path in (f"/proc/{server}/environ", f"/proc/{server}/cmdline", "/proc/self/environ"):
        try:
            if TOKEN in open(path, "rb").read():
                return path
        except PermissionError:
            pass
    return float(refused(open, f"/proc/{server}/mem", "rb") and refused(os.readlink, f"/proc/{server}/fd/0"))

def trace(server):
    attach = libc.ptrace(16, int(server), 0, 0)
    buffer = ctypes.create_string_buffer(8)
    piece = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    read = libc.process_vm_readv(int(server), piece, 1, piece, 1, 0)
    return float(attach == -1 and read == -1)

def touch(pids):
    return float(all(map(cannot_touch, {int(pid) for pid in pids.split()} - {os.getpid()})))

def cannot_touch(pid):
    return all((
        refused(os.kill, pid, signal.SIGKILL),
        refused(os.kill, pid, 0),
        refused(os.killpg, pid, 0),
        refused(os.sched_setaffinity, pid, {0}),
        refused(os.setpriority, os.PRIO_PROCESS, pid, 19),
        refused(resource.prlimit, pid, resource.RLIMIT_NOFILE, (3, 3)),
        refused(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)),
    ))

def leave_daemon(_):
    command = f"setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    return float(subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout)

def forget_mark(_):
    return float(refused(resource.setrlimit, 10, (1, 1)) and refused(resource.prlimit, os.getpid(), 10, (1, 1)))

def leave_files(_):
    os.makedirs(f"{SCRATCH}/a/b")
    open(f"{SCRATCH}/a/b/c", "w").close()
    os.chmod(f"{SCRATCH}/a/b", 0)
    os.chdir(f"{SCRATCH}/a")
    return 1.0

def close_scratch(mode):
    open(f"{SCRATCH}/left", "w").close()
    os.chmod(SCRATCH, mode)
    return 1.0

def look_around(_):
    seen = sorted(os.listdir(SCRATCH)), os.listdir(FOLDER), os.getcwd()
    return float(seen == (["folder", "from-import"], ["kept"], SCRATCH)) or str(seen)

def live_in_a_constant_home(_):
    # Agents write it into prompts, and those of a group are to be equal.
    homes = {os.getcwd(), *(os.environ[name] for name in ("HOME", "TMPDIR", "TMP", "TEMP")), tempfile.gettempdir()}
    return float(homes == {"/tmp/home"}) or str(homes)

def ordinary_work(_):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    child = subprocess.Popen(["sleep", "1000"])
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    assert subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True).stdout == b"42\n"
    thread = threading.Thread(target=list)
    thread.start()
    thread.join()
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/sub")
        open(f"{folder}/x", "w").write("y")
        os.rename(f"{folder}/x", f"{folder}/sub/x")
    with open(os.devnull, "w") as null:
        null.write("x")
    left, right = socket.socketpair()
    left.send(b"x")
    return float(right.recv(1) == b"x")

def manager(_):
    with multiprocessing.Manager() as manager:
        return float(len(manager.list([1, 2])))

def unix_by_link(path):
    os.symlink(path, f"{SCRATCH}/link")
    socket.socket(socket.AF_UNIX).connect(f"{SCRATCH}/link")

def unix_after_the_check(path):
    # Exchange the path in memory while it is connected.
    own = socket.socket(socket.AF_UNIX)
    own.bind(f"{SCRATCH}/own")
    own.listen(128)
    allowed, wanted = f"{SCRATCH}/own".encode(), path.encode()
    address = ctypes.create_string_buffer(110)
    address[:2] = b"\x01\x00"
    stopped = threading.Event()
    def exchange():
        while not stopped.is_set():
            for each in (allowed, wanted):
                ctypes.memmove(ctypes.addressof(address) + 2, each + b"\0", len(each) + 1)
    thread = threading.Thread(target=exchange)
    thread.start()
    until = time.monotonic() + 0.2
    num_connected = 0
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as client:
            num_connected += libc.connect(client.fileno(), address, 110) == 0
        if num_connected > 100:
            break
    stopped.set()
    thread.join()
    socket.socket(socket.AF_UNIX).connect(path)

def connect(address):
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        return float(connection.recv(2))

BEHAVIOURS = {
    "fine": lambda _: 1.0,
    "10 GB": lambda _: len(bytearray(10 << 30)),
    "10 GB mapped": lambda _: len(mmap.mmap(-1, 10 << 30)),
    "endless": lambda _: exec("while True: pass"),
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "os._exit": lambda _: os._exit(3),
    "segfault": lambda _: ctypes.string_at(0),
    "inet": lambda _: socket.socket(socket.AF_INET),
    "inet6": lambda _: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "netlink": lambda _: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "unix": lambda path: socket.socket(socket.AF_UNIX).connect(path),
    "name": lambda _: socket.create_connection(("localhost", 80)),
    "io_uring": lambda _: float(libc.syscall(425, 8, ctypes.create_string_buffer(256)) == -1),
    "namespace": lambda _: float(libc.unshare(0x10000000) == -1),
    "write": lambda path: open(path, "w"),
    "truncate": lambda path: float(refused(os.truncate, path, 0)),
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    behaviour = BEHAVIOURS.get(solution_str) or globals()[solution_str]
    return behaviour(ground_truth)
""".replace("TOKEN", repr(TOKEN.encode()))

COSTS_ONE_RESULT = [
    ("fork_bomb", "worker_died", r"more than 20 processes and threads \(maxProcesses\)"),
    ("thread_bomb", "worker_died", r"more than 20 processes and threads \(maxProcesses\)"),
    ("10 GB", "exception", r"MemoryError.*maxMemory is 1Gi"),
    ("10 GB mapped", "exception", r"Cannot allocate memory"),
    ("os._exit", "worker_died", "exit code 3"),
    ("segfault", "worker_died", "SIGSEGV"),
    ("one_large_file", "exception", r"File too large.*maxFileSize is 8Mi"),
    ("many_files", "worker_died", r"files took more than 8Mi \(maxFileSize\)"),
    ("unnamed_files", "worker_died", r"files took more than 8Mi \(maxFileSize\)"),
    ("inet", "exception", r"function\.network is false"),
    ("inet6", "exception", r"function\.network is false"),
    ("netlink", "exception", r"function\.network is false"),
    ("name", "exception", r"function\.network is false"),
]
REFUSED = ["read_token", "trace", "touch", "io_uring", "namespace", "forget_mark"]
NEED_THE_LISTENER = {"fork_bomb", "thread_bomb"}
FIELDS = {
    "slots": 2,
    "timeoutSeconds": 30,
    "function": {"maxFileSize": "8Mi", "maxProcesses": 20, "maxMemory": "1Gi"},
}


DISABLED = ["", "uid", "uid,landlock", "uid,seccomp-listener"]


@pytest.fixture(scope="module", params=DISABLED, ids=lambda names: f"without-{names}")
def disabled(request: pytest.FixtureRequest) -> list[str]:
    """Disabled mechanisms."""
    return str(request.param).split(",")


@pytest.fixture(scope="module")
def server(disabled: list[str], start_server: StartServer) -> Server:
    return start_server(SOURCE, environment={"RLJOB_REWARD_DISABLE_ISOLATION": ",".join(disabled)}, **FIELDS)


@pytest.fixture(scope="module")
def impatient_server(disabled: list[str], start_server: StartServer) -> Server:
    environment = {"RLJOB_REWARD_DISABLE_ISOLATION": ",".join(disabled)}
    return start_server(SOURCE, environment=environment, **FIELDS | {"timeoutSeconds": 1})


@pytest.fixture(scope="module")
def networked_server(start_server: StartServer) -> Server:
    return start_server(SOURCE, slots=1, function={"network": True, "cpuSeconds": 1})


def _skip_without(disabled: list[str], mechanism: str) -> None:
    if mechanism in disabled:
        pytest.skip(f"not promised without {mechanism}")


@pytest.mark.parametrize(("behaviour", "reason", "expected"), COSTS_ONE_RESULT)
def test_hostile_function_costs_one_invalid_result_with_its_reason(
    server: Server, disabled: list[str], behaviour: str, reason: str, expected: str
) -> None:
    if behaviour in NEED_THE_LISTENER:
        _skip_without(disabled, "seccomp-listener")
    result = server.score(behaviour)
    assert (result["valid"], result["score"], result["reason"]) == (False, None, reason), result["message"]
    assert re.search(expected, result["message"]), result["message"]
    assert server.score("fine")["score"] == 1.0, "the next request is served"


@pytest.mark.parametrize("behaviour", ["endless", "stopped"])
def test_function_that_never_returns_is_a_timeout(impatient_server: Server, behaviour: str) -> None:
    result = impatient_server.score(behaviour)
    assert (result["valid"], result["score"], result["reason"]) == (False, None, "timeout"), result["message"]
    assert "timeoutSeconds" in result["message"]


@pytest.mark.parametrize("behaviour", REFUSED)
def test_forbidden_operation_is_refused(server: Server, behaviour: str) -> None:
    result = server.score(behaviour, ground_truth=str(server.pid))
    assert result["score"] == 1.0, result["message"]
    assert server.score("fine")["score"] == 1.0


def test_worker_cannot_signal_or_adjust_another(server: Server, disabled: list[str]) -> None:
    if "seccomp-listener" in disabled:
        _skip_without(disabled, "landlock")
    server.score("fine")
    wait_for(lambda: len(server.children()) == 2, "both workers to start")
    pids = " ".join(str(child.pid) for child in server.children())
    result = server.score("touch", ground_truth=pids)
    assert result["score"] == 1.0, result["message"]
    assert " ".join(str(child.pid) for child in server.children()) == pids


def test_excessive_output_is_cut_and_disturbs_nothing(server: Server) -> None:
    assert server.score("print_much")["score"] == 1.0
    assert server.log.stat().st_size < 4 << 20


def test_secrets_of_the_shell_do_not_reach_a_function(start_server: StartServer) -> None:
    source = "import os\ndef compute_score(solution_str): return float(solution_str in os.environ)"
    secrets = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_API_KEY"), "s")
    server = start_server(source, slots=1, environment=secrets | {"RLJOB_CONTAINER_ENV": "OPENAI_API_KEY"})
    assert [server.score(name)["score"] for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "RLJOB_TOKEN")] == [0.0] * 3
    assert server.score("OPENAI_API_KEY")["score"] == 1.0, "the job's env names it"


@pytest.fixture
def folder_elsewhere() -> Iterator[Path]:
    """A folder that is not in /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def test_files_elsewhere_cannot_be_written(server: Server, disabled: list[str], folder_elsewhere: Path) -> None:
    _skip_without(disabled, "landlock")
    kept = folder_elsewhere / "kept"
    kept.write_text("kept")
    for path in (kept, folder_elsewhere / "new"):
        result = server.score("write", ground_truth=str(path))
        assert result["reason"] == "exception"
        assert "only to its scratch directory" in result["message"], result["message"]
    assert server.score("truncate", ground_truth=str(kept))["score"] == 1.0
    assert kept.read_text() == "kept"


def test_scratch_directory_is_cleaned_after_each_request(server: Server) -> None:
    for _ in range(2):
        assert server.score("leave_files")["score"] == 1.0
        result = server.score("look_around")
        assert result["score"] == 1.0, result["message"]


def test_samples_share_neither_memory_files_nor_folders_of_the_import(server: Server) -> None:
    for _ in range(4):
        result = server.score("share")
        assert result["score"] == 1.0, result["message"]
        assert server.score("look_around")["score"] == 1.0


def test_tmp_is_private_to_the_worker_and_cleaned_after_each_request(server: Server) -> None:
    for _ in range(3):
        result = server.score("use_tmp")
        assert result["score"] == 1.0, result["message"]
        assert not os.path.exists("/tmp/left-by-a-sample")


def test_home_has_the_same_path_in_every_worker(server: Server) -> None:
    result = server.score("live_in_a_constant_home")
    assert result["score"] == 1.0, result["message"]


def test_socket_in_tmp_can_be_connected(server: Server, disabled: list[str]) -> None:
    _skip_without(disabled, "seccomp-listener")
    result = server.score("use_socket_in_tmp")
    assert result["score"] == 1.0, result["message"]


def test_files_of_the_machines_tmp_are_hidden_and_the_message_says_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    result = server.score("write", ground_truth=str(tmp_path / "kept"))
    assert "has its own /tmp" in result["message"], result["message"]
    assert (tmp_path / "kept").read_text() == "kept"


def test_what_the_job_names_in_tmp_can_be_read_and_not_written(start_server: StartServer, tmp_path: Path) -> None:
    source = """
import helper_of_the_job

def compute_score(data_source, solution_str, ground_truth, extra_info=None, table=""):
    assert open(table).read() == "table"
    if solution_str == "connect":
        import socket
        socket.socket(socket.AF_UNIX).connect(table + ".socket")
    open(table, "w")
"""
    (tmp_path / "reward.py").write_text(source)
    (tmp_path / "helper_of_the_job.py").touch()
    (tmp_path / "table").write_text("table")
    kwargs = {"table": str(tmp_path / "table")}
    function = {"file": str(tmp_path / "reward.py"), "kwargs": kwargs}
    server = start_server(None, slots=1, function=function)
    result = server.score("x")
    assert "Read-only file system" in result["message"], result["message"]
    assert "only to its scratch directory" in result["message"]
    assert (tmp_path / "table").read_text() == "table"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "table.socket"))
        listener.listen()
        assert "function.network is false" in server.score("connect")["message"]


def test_files_in_tmp_count_against_the_limit(server: Server) -> None:
    result = server.score("fill_tmp")
    assert result["reason"] == "worker_died", result["message"]
    assert "maxFileSize" in result["message"]


def test_files_in_shared_memory_are_bounded_and_end_with_the_worker(server: Server) -> None:
    result = server.score("fill_shared_memory")
    assert "No space left on device" in result["message"] or "maxFileSize" in result["message"], result["message"]
    assert server.score("share")["score"] == 1.0
    server.score("os._exit")
    written = {"left", *map(str, range(20))}
    assert not written & set(os.listdir("/dev/shm")), "nothing of it is on this machine's /dev/shm"


@pytest.mark.parametrize("mode", [0o000, 0o500, 0o600])
def test_scratch_directory_that_a_function_locks_is_usable_for_the_next(server: Server, mode: int) -> None:
    assert server.score("close_scratch", ground_truth=mode)["score"] == 1.0
    for _ in range(4):
        result = server.score("look_around")
        assert result["score"] == 1.0, result["message"]


def test_daemon_ends_with_its_sample_or_without_a_listener_with_its_worker(server: Server, disabled: list[str]) -> None:
    pid = int(server.score("leave_daemon")["score"])
    if "seccomp-listener" in disabled:
        assert psutil.pid_exists(pid)
        for _ in range(2):
            server.score("os._exit")
    wait_for(lambda: not psutil.pid_exists(pid), "the daemon to end")


def test_ordinary_work_of_functions_still_works(server: Server) -> None:
    for _ in range(3):
        result = server.score("ordinary_work")
        assert result["score"] == 1.0, result["message"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_imports_a_function_that_is_given_as_text(start_server: StartServer, method: str) -> None:
    source = f"""
import multiprocessing

def square(number):
    return number * number

def compute_score(solution_str):
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        return pool.map(square, [3])[0]
"""
    result = start_server(source, slots=1).score("x")
    assert result["score"] == 9.0, result["message"]


def test_manager_works_without_network_and_sockets_elsewhere_are_refused(
    server: Server, disabled: list[str], folder_elsewhere: Path
) -> None:
    _skip_without(disabled, "seccomp-listener")
    assert server.score("manager")["score"] == 2.0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder_elsewhere / "socket"))
        listener.listen()
        listener.setblocking(False)
        for behaviour in ("unix", "unix_by_link", "unix_after_the_check"):
            result = server.score(behaviour, ground_truth=str(folder_elsewhere / "socket"))
            assert "function.network is false" in result["message"], behaviour
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_scratch_directories_are_removed_with_the_server(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(SOURCE, arguments=["--scratch", str(tmp_path)], **FIELDS)
    server.score("leave_files")
    assert list((tmp_path / "workers").iterdir())
    server.stop()
    assert list(tmp_path.iterdir()) == []


def test_terminal_of_the_user_cannot_be_written(server: Server, disabled: list[str]) -> None:
    _skip_without(disabled, "landlock")
    controller, terminal = os.openpty()
    path = os.ttyname(terminal)
    os.chmod(path, 0o666)
    try:
        assert server.score("write", ground_truth=path)["reason"] == "exception"
        assert server.score("write", ground_truth="/dev/tty")["reason"] == "exception"
    finally:
        os.close(controller)
        os.close(terminal)


def test_function_with_network_can_connect(networked_server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"7")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert networked_server.score("connect", ground_truth=f"{host}:{port}")["score"] == 7.0
        thread.join()


def test_info_lists_what_is_not_enforced(server: Server, disabled: list[str]) -> None:
    not_enforced = "\n".join(server.request("GET", "/v1/info")[1]["not_enforced"])
    for mechanism in filter(None, disabled):
        assert f"{mechanism}: " in not_enforced, not_enforced
    for line in not_enforced.splitlines():
        assert f"not enforced here: {line}" in server.log.read_text()


def test_call_that_uses_too_much_cpu_time_is_killed(networked_server: Server) -> None:
    result = networked_server.score("endless")
    assert result["reason"] == "worker_died"
    assert "SIGXCPU (cpuSeconds)" in result["message"]
    assert networked_server.score("fine")["score"] == 1.0
