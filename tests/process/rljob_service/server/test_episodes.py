"""Episodes of programs over HTTP: how they reach the model, and that each failure costs its episode alone."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_api.wire.contract import ExitCode
from tests.support.reward_process import TOKEN, Server
from tests.support.scripted_model import ScriptedModel
from tests.support.waiting import DEADLINE_SECONDS, wait_for

StartServer = Callable[..., Server]
EPISODES = ["--serves", "episodes"]
SHARED_MEMORY = {"RLJOB_REWARD_DISABLE_ISOLATION": "private-shm"}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    model.close()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Shared memory: besides its scratch directory, a program may write only there."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o777)  # for the worker's user
        yield Path(folder)


def build_call(mode: str = "", url: str = "http://127.0.0.1:1", key: str = "none", **fields: Any) -> dict[str, Any]:
    """Return the fields of an EpisodeCall whose row has the column `mode`."""
    call = {"episode": f"e{next(_numbers)}", "attempt": 0, "model": {"url": url, "api_key": key}}
    call |= {"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": "4", "extra_info": {"mode": mode}}
    return {**call, "seed": 1, "max_turns": 4, "deadline_seconds": 60, **fields}


def send(server: Server, call: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    return server.request("POST", "/v1/call", {"id": f"{call['episode']}-{call['attempt']}", "arguments": call})


FORMS = """
import os

def with_client(prompt, client, answer):
    reply = client.chat.completions.create(model="policy", messages=prompt)
    return float(reply.choices[0].message.content == answer)

class Agent:  # as AReaL's examples
    def __init__(self, temperature=1.0, **kwargs):
        self.temperature = temperature

    async def run(self, data, **extra_kwargs):
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")
        http_client = extra_kwargs.get("http_client", None)
        import openai
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0) as c:
            reply = await c.chat.completions.create(
                model="default", messages=data["messages"], temperature=self.temperature
            )
        return {reply.id: float(reply.choices[0].message.content == data["answer"])}
"""


@pytest.mark.parametrize(
    ("entrypoint", "check"),
    [
        ("with_client", lambda reply: reply["reward"] == 1.0),
        ("Agent", lambda reply: re.fullmatch(r"\{'chatcmpl-\d+': 1.0\}", str(reply["rewards"]))),
    ],
)
def test_program_reaches_the_model_with_an_official_client(
    start_server: StartServer, model: ScriptedModel, entrypoint: str, check: Callable[[Any], Any]
) -> None:
    server = start_server(FORMS, EPISODES, slots=1, function={"entrypoint": entrypoint, "spareWorkers": 0})
    for _ in range(2):
        status, result, _ = send(server, build_call(url=model.url, key=model.script(["4"])))
        assert (status, result["valid"]) == (200, True), result
        assert check(result["value"]), result


FAULTS = r"""
import asyncio, ctypes, os, struct, sys, time

def run(mode, seed):
    if mode == "raise": raise LookupError("no such city")
    if mode == "exit": os._exit(3)
    if mode == "crash": ctypes.string_at(0)
    if mode == "leave": sys.exit(3)
    if mode == "exhaust": len(bytearray(8 << 30))
    if mode == "text": return "well done"
    if mode == "nan": return float("nan")
    if mode == "large": return {"info": {"a": "x" * (8 << 20)}}
    if mode == "frames":
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"\x00\x00\x00\x05\x00\x00\x00\x01hello")
            except OSError:
                pass
        time.sleep(1000)
    if mode == "flood":
        for _ in range(100):
            print("\x00\xff" * 5000)
    return seed, {"pid": os.getpid(), "files": os.listdir()}
"""


@pytest.fixture(scope="module")
def faults(start_server: StartServer) -> Server:
    return start_server(FAULTS, EPISODES, slots=16)


@pytest.mark.parametrize(
    ("mode", "reason", "message"),
    [
        ("raise", "exception", r"function.inline:\d+: LookupError: no such city"),
        ("leave", "exception", "SystemExit: 3"),
        ("exhaust", "exception", "MemoryError"),
        ("exit", "worker_died", "ended with exit code 3"),
        ("crash", "worker_died", "SIGSEGV"),
        ("text", "bad_return", "run: returned str 'well done'; expected None, a number"),
        ("nan", "not_finite", "reward is nan"),
        ("large", "bad_return", "the reply has 8192 KiB as JSON, at most 4096 KiB"),
        ("frames", "worker_died", "wrote garbage to its pipe"),
    ],
)
def test_failed_episode_costs_itself_alone(faults: Server, mode: str, reason: str, message: str) -> None:
    result = send(faults, build_call(mode))[1]
    assert (result["valid"], result["value"], result["reason"]) == (False, None, reason), result
    assert re.search(message, result["message"]), result
    assert send(faults, build_call())[1]["value"]["reward"] == 1.0


def test_output_without_end_costs_nothing(faults: Server) -> None:
    assert send(faults, build_call("flood"))[1]["value"]["reward"] == 1.0
    assert faults.log.stat().st_size < 1 << 20


def test_crashes_among_sixteen_at_once_cost_themselves_alone(faults: Server) -> None:
    modes = ["exit", "raise", "crash", ""] * 16
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda mode: send(faults, build_call(mode))[1], modes))
    reasons = [result["reason"] for result in results]
    assert reasons == ["worker_died", "exception", "worker_died", None] * 16


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({}, "arguments: episode: Field required"),
        (build_call(model={"url": "http://127.0.0.1"}), "arguments: model.api_key: Field required"),
        (build_call(max_turns="many"), "arguments: max_turns: Input should be a valid integer"),
    ],
)
def test_call_that_is_not_an_episode_is_refused(faults: Server, arguments: dict[str, Any], detail: str) -> None:
    status, answer, _ = faults.request("POST", "/v1/call", {"id": "a", "arguments": arguments})
    assert (status, detail in answer["detail"]) == (422, True), answer
    assert faults.request("POST", "/v1/call", {"id": "a", "arguments": build_call()}, token="wrong")[0] == 401
    assert "serves episodes" in faults.request("POST", "/v1/score", {})[1]["detail"]


SLOW = """
import asyncio, os, signal, subprocess, sys, time

def record(name):
    with open(f"FOLDER/{name}", "a") as file:
        file.write("x")

class Agent:
    def setup(self, episode):
        record(f"setup-{episode}")

    def run(self, mode, episode):
        if mode == "child":
            subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(1000)"])
        if mode == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        record(f"ran-{episode}")
        if mode == "async":
            return self.later()
        while not os.path.exists(f"FOLDER/go-{episode}"):
            time.sleep(0.005)
        return 1

    async def later(self):
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            record("finally")

    def close(self, episode):
        record(f"closed-{episode}")
"""


@pytest.mark.parametrize(
    ("mode", "files"), [("hang", ("setup", "ran", "closed")), ("async", ("setup", "ran", "closed")), ("deaf", ())]
)
def test_episode_over_its_time_is_torn_down_and_killed(
    start_server: StartServer, shared_folder: Path, mode: str, files: tuple[str, ...]
) -> None:
    source = SLOW.replace("FOLDER", str(shared_folder))
    server = start_server(source, EPISODES, environment=SHARED_MEMORY, slots=1, timeoutSeconds=1)
    call = build_call(mode)
    result = send(server, call)[1]
    assert (result["valid"], result["reason"]) == (False, "timeout"), result
    assert "ran longer than 1 s (timeoutSeconds) and was killed" in result["message"]
    for name in files:
        assert (shared_folder / f"{name}-{call['episode']}").read_text() == "x"
    assert (shared_folder / "finally").exists() == (mode == "async")
    after = build_call()
    (shared_folder / f"go-{after['episode']}").touch()
    assert send(server, after)[1]["value"]["reward"] == 1.0


def test_client_that_leaves_ends_its_episode_and_what_it_started(
    start_server: StartServer, shared_folder: Path
) -> None:
    source = SLOW.replace("FOLDER", str(shared_folder))
    server = start_server(source, EPISODES, environment=SHARED_MEMORY, slots=1, function={"spareWorkers": 0})
    [worker] = server.children()
    call = build_call("child")
    with send_and_leave(server, call):
        wait_for((shared_folder / f"ran-{call['episode']}").exists, "the episode to run")
        [child] = worker.children()
    wait_for(lambda: not child.is_running() and not worker.is_running(), "the worker and its child to end")
    assert (shared_folder / f"closed-{call['episode']}").exists()
    cancelled = 'rljob_reward_execute_seconds_count{lane="train",outcome="cancelled"'
    wait_for(lambda: server.metric(cancelled) == 1, "the result")


@contextlib.contextmanager
def send_and_leave(server: Server, call: dict[str, Any]) -> Iterator[None]:
    """Send a request, and close its connection afterwards."""
    connection = http.client.HTTPConnection(server.host, 8080)
    with contextlib.closing(connection):
        body = json.dumps({"id": call["episode"], "arguments": call})
        connection.request("POST", "/v1/call", body, {"Authorization": f"Bearer {TOKEN}"})
        yield


def test_full_runner_refuses_and_drains_on_sigterm(start_server: StartServer, shared_folder: Path) -> None:
    source = SLOW.replace("FOLDER", str(shared_folder))
    server = start_server(source, EPISODES, environment=SHARED_MEMORY, slots=1, queueLength=1)
    calls = [build_call() for _ in range(3)]
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(send, server, calls[0])
        wait_for((shared_folder / f"ran-{calls[0]['episode']}").exists, "the first episode to run")
        waiting = threads.submit(send, server, calls[1])
        wait_for(lambda: server.metric('rljob_reward_queue_length{lane="train"') == 1, "the second one to wait")
        status, _, headers = send(server, calls[2])
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: send(server, calls[2])[0] == 503, "the server to drain")
        for call in calls:
            (shared_folder / f"go-{call['episode']}").touch()
        assert [each.result()[1]["value"]["reward"] for each in (running, waiting)] == [1.0, 1.0]
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


def test_episodes_that_outlast_the_grace_are_torn_down(start_server: StartServer, shared_folder: Path) -> None:
    source = SLOW.replace("FOLDER", str(shared_folder))
    server = start_server(source, [*EPISODES, "--grace", "0.1"], environment=SHARED_MEMORY, slots=1)
    call = build_call()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(send, server, call)
        wait_for((shared_folder / f"ran-{call['episode']}").exists, "the episode to run")
        server.process.send_signal(signal.SIGTERM)
        assert running.result()[1]["reason"] == "cancelled"
    assert (shared_folder / f"closed-{call['episode']}").exists()
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


SCRIPT = r"""
import json, os, signal, subprocess, sys, time

with open(os.environ["RLJOB_EPISODE"]) as file:
    episode = json.load(file)
mode = episode["extra_info"]["mode"]
if mode == "openai":
    from openai import OpenAI
    reply = OpenAI().chat.completions.create(model=episode["model"]["name"], messages=episode["prompt"])
    print("thinking about it")
    print(float(reply.choices[0].message.content == episode["ground_truth"]))
elif mode == "json":
    print(json.dumps({"reward": 0.5, "rewards": {"0": 1}, "info": {"folder": os.getcwd(), "argument": sys.argv[1]}}))
elif mode == "silent":
    pass
elif mode == "word":
    print("done")
elif mode == "wrong":
    print(json.dumps({"reward": "good"}))
elif mode == "nan":
    print("nan")
elif mode == "fail":
    print("first\nsecond", file=sys.stderr)
    sys.exit(2)
elif mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "flood":
    for _ in range(2000):
        print("x" * 5000)
        print("y" * 5000, file=sys.stderr)
    print(1)
elif mode == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # it holds stdout
    print(1, flush=True)
elif mode == "loud-child":
    subprocess.Popen([sys.executable, "-c", "while True: print('y' * 1000)"], start_new_session=True)
    time.sleep(0.1)
elif mode == "hang":
    def end(*_):
        print("ended by SIGTERM", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print("hangs", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def command(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent.py").write_text(SCRIPT)
    arguments = {"command": [sys.executable, "agent.py", "a b"], "working_dir": str(folder)}
    function = {"module": COMMAND_MODULE, "entrypoint": "Command", "factoryArgs": arguments}
    return start_server(None, EPISODES, slots=2, timeoutSeconds=20, function=function)


def test_script_with_the_openai_client_is_an_episode(command: Server, model: ScriptedModel) -> None:
    result = send(command, build_call("openai", model.url, model.script(["4"])))[1]
    assert result["value"] == {"reward": 1.0, "rewards": {}, "state": {}, "info": {}, "seats": []}, result
    assert "thinking about it" in command.log.read_text()


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("silent", {"reward": None, "rewards": {}, "state": {}, "info": {}, "seats": []}),
        ("word", {"reward": None, "rewards": {}, "state": {}, "info": {}, "seats": []}),
        ("flood", {"reward": 1.0, "rewards": {}, "state": {}, "info": {}, "seats": []}),
        ("child", {"reward": 1.0, "rewards": {}, "state": {}, "info": {}, "seats": []}),
        ("loud-child", {"reward": None, "rewards": {}, "state": {}, "info": {}, "seats": []}),
    ],
)
def test_program_ends_with_its_children_and_its_last_line_is_the_reward(
    command: Server, mode: str, value: dict[str, Any]
) -> None:
    result = send(command, build_call(mode))[1]
    assert result["value"] == value, result
    wait_for(lambda: all(is_worker(child) for child in command.children()), "what the program started to end")


def is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        return "rljob_service.worker" in process.cmdline()
    return False


def test_program_runs_in_its_folder_with_its_arguments(command: Server) -> None:
    value = send(command, build_call("json"))[1]["value"]
    assert (value["reward"], value["rewards"], value["info"]["argument"]) == (0.5, {"0": 1.0}, "a b")
    assert Path(value["info"]["folder"], "agent.py").exists()


@pytest.mark.parametrize(
    ("mode", "reason", "message"),
    [
        ("wrong", "bad_return", "agent.py a b: reward is str 'good'"),
        ("nan", "not_finite", "reward is nan"),
        (
            "fail",
            "exception",
            r"^agent.runner.command: .*: python[\d.]* ended with exit code 2:\nfirst\nsecond",
        ),
        ("killed", "exception", "was ended by SIGKILL, without a word on standard error"),
    ],
)
def test_failed_program_costs_its_episode(command: Server, mode: str, reason: str, message: str) -> None:
    result = send(command, build_call(mode))[1]
    assert (result["valid"], result["reason"]) == (False, reason), result
    assert re.search(message, result["message"]), result
    assert send(command, build_call("json"))[1]["valid"]


def test_program_that_must_end_gets_sigterm_and_its_children_end(command: Server) -> None:
    with send_and_leave(command, build_call("hang")):
        wait_for(lambda: "hangs" in command.log.read_text(), "the program to run")
    wait_for(lambda: "ended by SIGTERM" in command.log.read_text(), "the program to end")
    wait_for(lambda: all(is_worker(child) for child in command.children()), "what it started to end")


def test_command_that_cannot_start_ends_the_server(start_server: StartServer) -> None:
    function = {"module": COMMAND_MODULE, "entrypoint": "Command", "factoryArgs": {"command": ["no-such-agent"]}}
    server = start_server(None, EPISODES, wait=False, function=function)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    assert "agent.runner.command: no-such-agent was not found" in server.log.read_text()


ENVIRONMENT = """
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):  # as OpenRLHF's examples
    def __init__(self, tries): self.tries = tries
    async def reset(self, states, **kwargs): return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        self.tries -= 1
        right = states["action_text"] == states["label"]
        feedback = {"environment_feedback": "No.", "done": right or not self.tries}
        return {"rewards": float(right), "extra_logs": {"left": self.tries}, **feedback}
"""


def test_environment_of_another_project_plays_its_episodes(start_server: StartServer, model: ScriptedModel) -> None:
    arguments = [*EPISODES, "--framework", "openrlhf"]
    server = start_server(ENVIRONMENT, arguments, slots=1, function={"factoryArgs": {"tries": 3}})
    assert server.request("GET", "/v1/info")[1]["signature"] == "openrlhf"
    for answers, rewards in ((["3", "4"], [0.0, 1.0]), (["1", "2", "3", "4"], [0.0, 0.0, 0.0])):
        result = send(server, build_call(url=model.url, key=model.script(answers)))[1]
        assert list(result["value"]["rewards"].values()) == rewards, result
        assert result["value"]["info"] == {"left": 3 - len(rewards)}


PACKAGE = """
import importlib.util
import urllib.request

class Agent:
    def run(self, base_url, client=None):
        request = urllib.request.Request(f"{base_url}/chat/completions", b"{}", {"Authorization": "Bearer KEY"})
        with urllib.request.urlopen(request) as reply:
            return 1, {"client": client, "pydantic": importlib.util.find_spec("pydantic")}
"""


@pytest.mark.slow
def test_programs_and_commands_run_with_their_requirements_alone(
    start_server: StartServer, model: ScriptedModel, tmp_path: Path
) -> None:
    wheel = tmp_path / "rljobagent-1.0-py3-none-any.whl"
    info = "rljobagent-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rljobagent.py", PACKAGE.replace("KEY", model.script(["4"])))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rljobagent\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    requirements = {"requirements": [f"rljobagent @ {wheel.as_uri()}"]}
    server = start_server(
        None, EPISODES, environment=environment, slots=1, function={"module": "rljobagent", **requirements}
    )
    result = send(server, build_call(url=model.url))[1]
    assert result["value"]["reward"] == 1.0
    assert result["value"]["info"] == {"client": None, "pydantic": None}
    arguments = {"command": ["python", "-c", "import rljobagent; print(2)"]}
    function = {"module": COMMAND_MODULE, "entrypoint": "Command", "factoryArgs": arguments, **requirements}
    path = {"PATH": str(tmp_path)}  # `python` is then that of the requirements
    server = start_server(None, EPISODES, environment=environment | path, slots=1, function=function)
    result = send(server, build_call(url=model.url))[1]
    assert result["value"]["reward"] == 2.0, result
