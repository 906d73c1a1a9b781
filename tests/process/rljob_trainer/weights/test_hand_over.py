"""The hand-over between two processes: shared memory, its descriptor, and a receiver that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rljob_trainer.weights.checksum import digest_tensors
from rljob_trainer.weights.hand_over import HandOver
from tests.support.waiting import wait_for

CPU = torch.device("cpu")
RECEIVER = """
import sys
from pathlib import Path
import torch
from rljob_trainer.weights.checksum import digest_tensors
from rljob_trainer.weights.hand_over import receive_tensors
tensors = []
for name, tensor in receive_tensors(Path(sys.argv[1]), "secret", "g:1", torch.device("cpu")):
    tensors.append(tensor)
    if sys.argv[2] == "stops":
        print("has one", flush=True)
        sys.stdin.read()
print(digest_tensors(tensors), flush=True)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[HandOver]:
    rank = HandOver(tmp_path, "secret", CPU, 64 << 10)
    rank.allow("g:1")
    yield rank
    rank.close()


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RECEIVER, str(folder), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def count_shared_memory() -> int:
    """Return the bytes of hand-overs that this process has mapped or open."""
    links = [os.readlink(f"/proc/self/fd/{each.name}") for each in os.scandir("/proc/self/fd") if each.is_symlink()]
    name = "memfd:rljob-weights"
    return Path("/proc/self/maps").read_text().count(name) + sum(name in link for link in links)


def test_two_processes_get_the_weights_and_the_one_that_is_killed_leaves_nothing(
    rank: HandOver, tmp_path: Path
) -> None:
    tensors = {f"layer{i}": torch.randn(100, 300) for i in range(10)}
    killed, complete = start(tmp_path, "stops"), start(tmp_path, "completes")
    assert killed.stdout is not None

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(tensors.items()):
            yield item
            if number == 1:
                assert killed.stdout is not None
                assert killed.stdout.readline() == "has one\n"
                killed.send_signal(signal.SIGKILL)

    try:
        wait_for(lambda: rank.num_waiting == 2, "both wait")
        assert rank.give(gather(), 0.0, lambda: None) == 1
        output, _ = complete.communicate(timeout=300)
        assert output.strip() == str(digest_tensors(tensors.values()))
        assert count_shared_memory() == 0, "the rank has freed it"
    finally:
        for process in (killed, complete):
            process.kill()
            process.communicate()
