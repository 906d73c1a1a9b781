"""Agents that people use, from their registries, unchanged: `rljob test-agent` plays an episode of each with given
answers, in the runner's sandbox. The files in programs/ are what docs/agents.md#programs shows."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from rljob_cli.main import app
from rljob_service.pool import requirements
from tests.support.agent_services import call_text
from tests.support.model_folder import write_model
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.packages]

PROGRAMS = Path(__file__).parent / "programs"
ROW = {"question": "Use the shell to compute 6 * 7. Reply with the number.", "answer": "42"}
CONTEXT = 65_536


class Case(NamedTuple):
    """An agent, and an answer of the policy that calls its tool, and one that ends it."""

    program: str
    call: str
    end: str
    ignored: set[str]
    """Some fields of its requests that have no effect."""
    requirements: tuple[str, ...] = ()
    npm: tuple[str, str] = ("", "")
    """Package and program."""
    causes: tuple[str | None, ...] = (None,)
    """Why each segment began: with one, all answers train in one sequence."""


def write_shell(name: str, argument: str, command: str = "echo $((6 * 7))") -> str:
    return call_text(name, json.dumps({argument: command}))


CASES = [
    Case(
        "claude_code",
        write_shell("Bash", "command"),
        "It is 42.",
        {"metadata"},
        ("claude-agent-sdk==0.2.184",),
    ),
    Case(
        "codex",
        write_shell("exec_command", "cmd"),
        "It is 42.",
        {"tools.web_search"},
        npm=("@openai/codex@0.171.0", "codex"),
    ),
    Case("opencode", write_shell("bash", "command"), "It is 42.", set(), npm=("opencode-ai@1.18.33", "opencode")),
    Case(
        "mini_swe_agent",
        write_shell("bash", "command"),
        write_shell("bash", "command", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 42"),
        set(),
        ("mini-swe-agent==2.4.6",),
    ),
    Case(
        "lit_agent",
        call_text("calculate", json.dumps({"expression": "6 * 7"})),
        "### ANSWER: 42 ###",
        {"temperature"},
        (
            *("agentlightning==0.1.2", "autogen-agentchat==0.7.5", "autogen-ext[openai,mcp]==0.7.5"),
            *("mcp-server-calculator==0.2.1", "sympy==1.14.0"),
        ),
        causes=(None, "tools"),  # AutoGen reflects on the result in a request without tools
    ),
]


def find_npm(folder: Path, package: str, program: str) -> str:
    if not shutil.which("npm"):
        pytest.skip("there is no npm on this machine")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    subprocess.run(install, check=True, timeout=DEADLINE_SECONDS * 10)
    return str(folder / "node_modules" / ".bin" / program)


def unpack(folder: Path, source: str, *names: str) -> None:
    """Put files of a package's source archive into the folder: its wheel does not have them."""
    python = requirements.ensure_environment(["pip"])
    get = ("-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), source)
    subprocess.run([python, *get], check=True, timeout=DEADLINE_SECONDS * 10)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for name in names:
            [member] = [each for each in archive.getmembers() if each.name.endswith(f"/{name}")]
            content = archive.extractfile(member)
            assert content is not None
            (folder / Path(name).name).write_bytes(content.read())


def play(folder: Path, program: str, packages: tuple[str, ...], answers: list[str], **kwargs: str) -> dict[str, Any]:
    """Return the row of the episode."""
    shutil.copy(PROGRAMS / f"{program}.py", folder)
    (folder / "rows.jsonl").write_text(json.dumps(ROW))
    model = write_model(folder / "model", {"max_position_embeddings": CONTEXT})
    init = ["init", str(folder / "job"), "--gpus", "0", "--agent", "program", "--model", str(model)]
    assert CliRunner().invoke(app, init).exit_code == 0
    file = folder / "job" / "rljob.yaml"
    job = yaml.safe_load(file.read_text())
    function = {"file": str(folder / f"{program}.py"), "requirements": [*packages], "kwargs": kwargs, "network": True}
    # The runtimes of these programs reserve more memory than they use.
    runner = {"function": {**function, "maxMemory": "1Ti", "maxFileSize": "1Gi"}, "timeoutSeconds": 300}
    job["spec"] |= {
        "data": {"train": {"source": str(folder / "rows.jsonl"), "prompt": "question"}, "format": "chat"},
        "agent": {"type": "program", "constraints": "ignore", "runner": runner},
        "rollout": {"maxModelLen": CONTEXT, "sampling": {"maxTokens": 512}},
    }
    file.write_text(yaml.safe_dump(job))
    given = [part for answer in answers for part in ("--completion", answer)]
    done = CliRunner().invoke(app, ["test-agent", str(file), *given, "-o", "json"])
    assert done.exit_code == 0, done.output[-4000:]
    [episode] = json.loads(done.stdout)["episodes"]
    assert episode["end"] == "returned"
    return dict(episode)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program)
def test_an_agent_runs_the_tool_that_the_policy_calls(tmp_path: Path, case: Case) -> None:
    package, program = case.npm
    kwargs = {program: find_npm(tmp_path, package, program)} if package else {}
    if case.program == "lit_agent":
        unpack(tmp_path, case.requirements[0], "examples/calc_x/calc_agent.py")
        stand_in = tmp_path / "uvx"
        stand_in.write_text("#!/bin/sh\nexec python -m mcp_server_calculator\n")
        stand_in.chmod(0o755)
    episode = play(tmp_path, case.program, case.requirements, [case.call, case.end], **kwargs)
    assert episode["score"] == 1.0
    assert [turn["text"] for turn in episode["turns"]] == [case.call, case.end]
    messages = json.loads(episode["messages"])
    [result] = [message["content"] for message in messages if message["role"] == "tool"]
    assert "42" in result
    assert tuple(segment["cause"] for segment in episode["segments"]) == case.causes
    assert set(episode["ignored"]) >= case.ignored, episode["ignored"]


def test_a_rollout_of_art_plays_its_game(tmp_path: Path) -> None:
    folder = "examples/tic_tac_toe"
    unpack(tmp_path, "openpipe-art==0.3.13", f"{folder}/rollout.py", f"{folder}/game_utils.py")  # later ones have none
    moves = [f"<move>{row}{column}</move>" for row in "ABC" for column in (1, 2, 3)]
    packages = ("openpipe-art==0.5.4", "openpipe==5.0.0", "python-dotenv")
    episode = play(tmp_path, "art_rollout", packages, moves[:3])
    assert len(episode["turns"]) >= 2
    info = json.loads(episode["info"])
    assert info["num_moves"] >= 1
    assert episode["score"] is not None
