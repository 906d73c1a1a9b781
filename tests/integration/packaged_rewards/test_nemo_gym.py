"""A resources server of NeMo Gym, unchanged, in an environment of Python 3.12: the rewards of its examples."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.scores import ScoreRequest
from rljob_service.pool import requirements
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RewardClients
from tests.support.pythons import require_python
from tests.support.reward_harness import score_alone
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.packages]

REQUIREMENTS = ["nemo-gym==0.4.0"]
SERVE = """
import sys
from unittest.mock import MagicMock
import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.mcqa.app import MCQAResourcesServer, MCQAResourcesServerConfig

port = int(sys.argv[1])
config = MCQAResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="app.py", name="mcqa")
server = MCQAResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port)
"""


class Gym:
    """The server, and the rows of its examples."""

    def __init__(self, url: str, rows: list[dict]) -> None:
        self.url, self.rows = url, rows


@pytest.fixture(scope="module")
def gym(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gym]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in require_python("3.12").items():
            patch.setenv(name, value)
        python = Path(requirements.ensure_environment(REQUIREMENTS, "3.12"))
    (packages,) = python.parents[1].glob("lib/python3*/site-packages")
    lines = (packages / "resources_servers/mcqa/data/example.jsonl").read_text().splitlines()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("gym")
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(python), "-c", SERVE, str(port)]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json"):
                return True
        except OSError:
            return False

    try:
        wait_for(answers, "the resources server")
        yield Gym(f"http://127.0.0.1:{port}/verify", [json.loads(line) for line in lines])
    finally:
        process.terminate()
        process.wait()


async def test_the_right_letter_alone_is_rewarded(gym: Gym) -> None:
    spec = Reward.model_validate({"name": "mcqa", "http": {"url": gym.url, "protocol": "nemoGym"}})
    rewards = {}
    async with open_session() as session:
        clients = RewardClients([spec], session)
        await clients.start()
        for number, row in enumerate(gym.rows):
            right = row["expected_answer"]
            wrong = "B" if right == "A" else "A"
            for answer in (right, wrong, None):
                other = wrong if answer == right else right
                thought = f"<think>Or \\boxed{{{other}}}?</think>"  # which is no part of the answer
                text = f"{thought}I think so. \\boxed{{{answer}}}" if answer else f"{thought}I do not know."
                request = ScoreRequest(
                    id=f"{number}/{answer}",
                    prompt=row["responses_create_params"]["input"],
                    completion=text,
                    ground_truth=right,
                    answer_column="expected_answer",
                    extra_info={name: value for name, value in row.items() if name != "expected_answer"},
                )
                result = (await score_alone(clients, request))["mcqa"]
                rewards[number, answer and answer == right] = (result.valid, result.score, result.message)
        await clients.close()
    assert len(gym.rows) >= 5
    expected = {
        (number, is_right): (True, float(bool(is_right)), "")
        for number in range(len(gym.rows))
        for is_right in (True, False, None)
    }
    assert rewards == expected
