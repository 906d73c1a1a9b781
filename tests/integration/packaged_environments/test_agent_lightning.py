"""Agent Lightning's own example agent, unchanged, in a runner of Python 3.12 at a real gateway."""

from __future__ import annotations

import asyncio
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_service.pool import requirements
from tests.support.gateways import SpelledPolicy, make_task, running_gateway
from tests.support.pythons import require_python
from tests.support.reward_process import Server
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.packages]

SOURCE = "agentlightning==1.0.2"
EXAMPLE = "agentlightning-1.0.2/examples/gsm8k/gsm8k_agent.py"
REQUIREMENTS = ["openai", "httpx", SOURCE, "pip"]
AGENT = """
import os
from gsm8k_agent import ChatAgent

async def run(question, answer):
    os.environ.update(QUESTION=question, ANSWER=answer)
    await ChatAgent().run()
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program next to the example, which only the source archive of the package has."""
    for name, value in require_python("3.12").items():
        monkeypatch.setenv(name, value)
    python = requirements.ensure_environment(REQUIREMENTS, "3.12")
    get = ("-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(tmp_path), SOURCE)
    subprocess.run([python, *get], check=True, timeout=DEADLINE_SECONDS * 5)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        source = archive.extractfile(EXAMPLE)
        assert source is not None
        (tmp_path / "gsm8k_agent.py").write_bytes(source.read())
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


async def test_its_gsm8k_agent_is_played_and_rewarded(start_server: Callable[..., Server], agent: Path) -> None:
    function = {"file": str(agent), "requirements": REQUIREMENTS, "maxMemory": "64Gi"}
    server = start_server(None, ["--serves", "episodes"], slots=1, python="3.12", function=function)
    policy = SpelledPolicy("3 + 4 = 7. ### ANSWER: 7 ###", "It is 8.")
    rewards = []
    async with running_gateway() as gateway:
        for name in ("first", "second"):
            episode = gateway.open(make_task(policy, name))
            number, access = episode.start_attempt()
            call = {"episode": name, "attempt": number, "model": access.model_dump(mode="json")}
            call |= {"prompt": [{"role": "user", "content": "3+4?"}], "ground_truth": "#### 7", "seed": 1}
            result = await asyncio.to_thread(
                server.call, {**call, "max_turns": 4, "deadline_seconds": DEADLINE_SECONDS}
            )
            assert result["valid"], result
            rewards.append(episode.read().reward)
    assert rewards == [1.0, 0.0]
    assert len(policy.prompts) == 2
